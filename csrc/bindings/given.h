// Arguments as Python gave them, and what is asked of them by name: what does not fit is a short
// TypeError or ValueError that says which argument, what it takes and what it got, where pybind11
// would show every signature. In help() they have the types that they should have.
#pragma once

#include <torch/extension.h>

#include <optional>
#include <string>
#include <vector>

namespace locked_tensor {

namespace py = pybind11;

inline bool is_anything(PyObject*) {
  return true;
}

class GivenTensor : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenTensor, py::object, is_anything)
};
class GivenTensors : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenTensors, py::object, is_anything)
};
class GivenFile : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenFile, py::object, is_anything)
};
class GivenWhole : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenWhole, py::object, is_anything)
};
class GivenFlag : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenFlag, py::object, is_anything)
};
class GivenText : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenText, py::object, is_anything)
};
class GivenSeconds : public py::object {
  PYBIND11_OBJECT_DEFAULT(GivenSeconds, py::object, is_anything)
};

// What it is, for messages: the value of what is short, else the type.
std::string show(py::handle given);

// TypeError for what is no tensor, and for a parameter without bytes yet.
at::Tensor tensor_of(const char* name, py::handle given);
// Of a list, tuple or other iterable.
std::vector<at::Tensor> tensors_of(const char* name, py::handle given);
// TypeError for a bool, a float of whatever library or anything else that is no whole number,
// ValueError for one of more than 64 bits.
int64_t whole_of(const char* name, py::handle given);
// What has a truth value of its own: bool, None, numpy.bool_.
bool flag_of(const char* name, py::handle given);
std::string text_of(const char* name, py::handle given);
// None is none; ValueError when negative or not a number.
std::optional<int64_t> nanoseconds_of(const char* name, py::handle given);

}  // namespace locked_tensor

namespace pybind11::detail {

template <>
struct handle_type_name<locked_tensor::GivenTensor> {
  static constexpr auto name = const_name("torch.Tensor");
};
template <>
struct handle_type_name<locked_tensor::GivenTensors> {
  static constexpr auto name = const_name("collections.abc.Iterable[torch.Tensor]");
};
template <>
struct handle_type_name<locked_tensor::GivenFile> {
  static constexpr auto name = const_name("str | bytes | os.PathLike | int");
};
template <>
struct handle_type_name<locked_tensor::GivenWhole> {
  static constexpr auto name = const_name("int");
};
template <>
struct handle_type_name<locked_tensor::GivenFlag> {
  static constexpr auto name = const_name("bool");
};
template <>
struct handle_type_name<locked_tensor::GivenText> {
  static constexpr auto name = const_name("str");
};
template <>
struct handle_type_name<locked_tensor::GivenSeconds> {
  static constexpr auto name = const_name("float | None");
};

}  // namespace pybind11::detail
