// The I/O half of _C: AioHandle, IoTicket, engines().
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/given.h"
#include "bindings/initialized.h"
#include "bindings/io_arguments.h"
#include "bindings/io_docs.h"
#include "handle/aio_handle.h"
#include "io/engine_select.h"

namespace locked_tensor {

namespace {

// Lets Python's signal handlers run; what they raise leaves the wait, and the transfers go on.
void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

// The handle as Python holds it: every wait is without the GIL, and keep-alives of ended transfers
// are dropped with it.
class PyHandle {
 public:
  explicit PyHandle(const HandleOptions& options) {
    py::gil_scoped_release no_gil;
    handle_ = std::make_shared<AioHandle>(options);
  }

  ~PyHandle() {
    try {
      close();
    } catch (...) {
      // Nobody is left to raise it to; sys.unraisablehook shows it.
      set_error(exception_object(std::current_exception()));
      PyErr_WriteUnraisable(py::str("an aio_handle dropped without close()").ptr());
    }
  }

  AioHandle& get() { return *handle_; }
  const std::shared_ptr<AioHandle>& shared() { return handle_; }

  template <typename Call>
  auto without_gil(Call call) {
    drop_retired();
    struct Drop {
      PyHandle& self;
      ~Drop() { self.drop_retired(); }
    } drop{*this};
    py::gil_scoped_release no_gil;
    return call(*handle_);
  }

  void close() {
    without_gil([](AioHandle& handle) { handle.close(check_signals); });
  }

  // The vector's destructor runs outside every lock, with the GIL.
  void drop_retired() { handle_->take_retired(); }

 private:
  std::shared_ptr<AioHandle> handle_;
};

// One transfer, to be waited for by itself.
class IoTicket {
 public:
  IoTicket(std::shared_ptr<AioHandle> handle, std::shared_ptr<Transfer> transfer)
      : handle_(std::move(handle)), transfer_(std::move(transfer)) {}

  uint64_t wait(const GivenSeconds& timeout) {
    if (!wait_until_done(nanoseconds_of("timeout", timeout).value_or(-1))) {
      PyErr_SetString(PyExc_TimeoutError,
                      "the transfer has not ended yet; it goes on, and can be waited for again");
      throw py::error_already_set();
    }
    if (const std::exception_ptr failure = handle_->take_failure(transfer_)) {
      std::rethrow_exception(failure);
    }
    return transfer_->bytes;
  }

  bool done() { return wait_until_done(0); }

  py::object exception() {
    wait_until_done(-1);
    const std::exception_ptr failure = handle_->take_failure(transfer_);
    return failure == nullptr ? py::none() : exception_object(failure);
  }

  uint64_t bytes() const { return transfer_->bytes; }

 private:
  bool wait_until_done(int64_t timeout_ns) {  // -1: however long it takes
    py::gil_scoped_release no_gil;
    return handle_->wait_for(transfer_, timeout_ns, check_signals);
  }

  std::shared_ptr<AioHandle> handle_;
  std::shared_ptr<Transfer> transfer_;
};

}  // namespace

}  // namespace locked_tensor

template <>
class pybind11::detail::type_caster<locked_tensor::PyHandle>
    : public locked_tensor::InitializedCaster<locked_tensor::PyHandle> {};
template <>
class pybind11::detail::type_caster<locked_tensor::IoTicket>
    : public locked_tensor::InitializedCaster<locked_tensor::IoTicket> {};

namespace locked_tensor {

namespace {

int64_t start_async(PyHandle& self, TransferSpec spec) {
  self.without_gil([&](AioHandle& handle) { handle.start(std::move(spec), Report::kWait); });
  return 0;
}

int64_t run_sync(PyHandle& self, TransferSpec spec) {
  self.without_gil([&](AioHandle& handle) { handle.run(std::move(spec), check_signals); });
  return 1;
}

// `fd=` stands in filename's place.
FileName one_file(const GivenFile& filename, const GivenWhole& fd) {
  if (filename.is_none() == fd.is_none()) {
    throw std::invalid_argument("give either filename or fd");
  }
  return filename.is_none() ? file_of("fd", fd) : file_of("filename", filename);
}

// Binds a method of both operations: a write takes the keyword `durable` too.
template <Operation kOperation, typename Result, typename... Arguments, typename... Extra>
void bind_method(py::class_<PyHandle>& handle, const std::string& name,
                 Result (*call)(bool durable, PyHandle& self, Arguments...),
                 const Extra&... extra) {
  if constexpr (kOperation == Operation::kRead) {
    handle.def(
        name.c_str(),
        [call](PyHandle& self, Arguments... arguments) { return call(false, self, arguments...); },
        extra...);
  } else {
    const auto with_durable = [call](PyHandle& self, Arguments... arguments,
                                     const GivenFlag& durable) {
      return call(flag_of("durable", durable), self, arguments...);
    };
    if constexpr ((std::is_same_v<Extra, py::kw_only> || ...)) {
      handle.def(name.c_str(), with_durable, extra..., py::arg("durable") = false);
    } else {
      handle.def(name.c_str(), with_durable, extra..., py::kw_only(), py::arg("durable") = false);
    }
  }
}

// Bytes.
py::arg_v file_offset_argument() {
  return py::arg("file_offset") = 0;
}

template <Operation kOperation>
void bind_operation(py::class_<PyHandle>& handle, const std::string& name) {
  using Tensor = const GivenTensor&;
  using Tensors = const GivenTensors&;
  using File = const GivenFile&;
  using Whole = const GivenWhole&;
  using Flag = const GivenFlag&;
  constexpr auto index = static_cast<size_t>(kOperation);
  bind_method<kOperation>(
      handle, name,
      +[](bool durable, PyHandle& self, Tensor buffer, File filename, Flag validate,
          Whole file_offset) {
        run_sync(self, spec_of(kOperation, {tensor_of("buffer", buffer)},
                               file_of("filename", filename), whole_of("file_offset", file_offset),
                               durable, flag_of("validate", validate)));
        return 0;
      },
      docs::kSimple[index], py::arg("buffer"), py::arg("filename"), py::arg("validate"),
      file_offset_argument());
  bind_method<kOperation>(
      handle, "p" + name,
      +[](bool durable, PyHandle& self, Tensor buffer, File filename, Flag validate, Flag is_async,
          Whole file_offset) {
        TransferSpec made =
            spec_of(kOperation, {tensor_of("buffer", buffer)}, file_of("filename", filename),
                    whole_of("file_offset", file_offset), durable, flag_of("validate", validate));
        return flag_of("async", is_async) ? start_async(self, std::move(made))
                                          : run_sync(self, std::move(made));
      },
      docs::kEither[index], py::arg("buffer"), py::arg("filename"), py::arg("validate"),
      py::arg("async"), file_offset_argument());
  bind_method<kOperation>(
      handle, "sync_p" + name,
      +[](bool durable, PyHandle& self, Tensor buffer, File filename, Whole file_offset) {
        return run_sync(
            self, spec_of(kOperation, {tensor_of("buffer", buffer)}, file_of("filename", filename),
                          whole_of("file_offset", file_offset), durable));
      },
      docs::kSync[index], py::arg("buffer"), py::arg("filename"), file_offset_argument());
  bind_method<kOperation>(
      handle, "async_p" + name,
      +[](bool durable, PyHandle& self, Tensor buffer, File filename, Whole file_offset, Whole fd) {
        return start_async(
            self, spec_of(kOperation, {tensor_of("buffer", buffer)}, one_file(filename, fd),
                          whole_of("file_offset", file_offset), durable));
      },
      docs::kAsync[index], py::arg("buffer"), py::arg("filename") = py::none(),
      file_offset_argument(), py::kw_only(), py::arg("fd") = py::none());
  bind_method<kOperation>(
      handle, "_submit_p" + name,
      +[](bool durable, PyHandle& self, Tensor buffer, File file, Whole file_offset) {
        TransferSpec made =
            spec_of(kOperation, {tensor_of("buffer", buffer)}, file_of("file", file),
                    whole_of("file_offset", file_offset), durable);
        return IoTicket(self.shared(), self.without_gil([&](AioHandle& handle) {
          return handle.start(std::move(made), Report::kTicket);
        }));
      },
      py::arg("buffer"), py::arg("file"), file_offset_argument());
  bind_method<kOperation>(
      handle, "p" + name + "v",
      +[](bool durable, PyHandle& self, Tensors buffers, File file, Whole file_offset) {
        TransferSpec made =
            spec_of(kOperation, tensors_of("buffers", buffers), file_of("file", file),
                    whole_of("file_offset", file_offset), durable);
        return self.without_gil(
            [&](AioHandle& handle) { return handle.run(std::move(made), check_signals); });
      },
      docs::kVectored[index], py::arg("buffers"), py::arg("file"), file_offset_argument());
}

std::vector<IoTicket> submit_batch(PyHandle& self, const py::iterable& requests) {
  std::vector<TransferSpec> specs;
  for (const py::handle request : requests) {
    specs.push_back(spec_of_request(request));
  }
  const auto transfers = self.without_gil(
      [&](AioHandle& handle) { return handle.start_all(std::move(specs), Report::kTicket); });
  std::vector<IoTicket> tickets;
  for (const std::shared_ptr<Transfer>& transfer : transfers) {
    tickets.emplace_back(self.shared(), transfer);
  }
  return tickets;
}

DirectMode direct_mode(const std::string& name) {
  if (name == "auto") {
    return DirectMode::kAuto;
  }
  if (name == "require") {
    return DirectMode::kRequire;
  }
  if (name == "never") {
    return DirectMode::kNever;
  }
  throw std::invalid_argument("direct must be \"auto\", \"require\" or \"never\", got \"" + name +
                              "\"");
}

uint64_t not_negative(const char* name, const GivenWhole& given) {
  const int64_t value = whole_of(name, given);
  if (value < 0) {
    throw std::invalid_argument(std::string(name) + " must not be negative, got " +
                                std::to_string(value));
  }
  return static_cast<uint64_t>(value);
}

void bind_handle(py::module_& module) {
  py::class_<PyHandle> handle(module, "AioHandleBase");
  const HandleOptions defaults;
  using Whole = const GivenWhole&;
  using Flag = const GivenFlag&;
  using Text = const GivenText&;
  handle.def(py::init([](Whole block_size, Whole queue_depth, Flag single_submit,
                         Flag overlap_events, Whole intra_op_parallelism, Text engine, Text direct,
                         Whole staging_bytes, Whole vector_run_bytes, Whole max_pending) {
               HandleOptions options;
               options.block_size_bytes = not_negative("block_size", block_size);
               options.queue_depth = not_negative("queue_depth", queue_depth);
               options.single_submit = flag_of("single_submit", single_submit);
               options.overlap_events = flag_of("overlap_events", overlap_events);
               options.intra_op_parallelism =
                   not_negative("intra_op_parallelism", intra_op_parallelism);
               options.engine = text_of("engine", engine);
               options.direct = direct_mode(text_of("direct", direct));
               options.staging_bytes = not_negative("staging_bytes", staging_bytes);
               options.vector_run_bytes = not_negative("vector_run_bytes", vector_run_bytes);
               options.max_pending_transfers = not_negative("max_pending", max_pending);
               return std::make_unique<PyHandle>(options);
             }),
             py::arg("block_size"), py::arg("queue_depth"), py::arg("single_submit"),
             py::arg("overlap_events"), py::arg("intra_op_parallelism"), py::kw_only(),
             py::arg("engine") = defaults.engine, py::arg("direct") = "auto",
             py::arg("staging_bytes") = defaults.staging_bytes,
             py::arg("vector_run_bytes") = defaults.vector_run_bytes,
             py::arg("max_pending") = defaults.max_pending_transfers);
  const auto option = [&](const char* name, auto member, const char* doc) {
    handle.def(
        name, [member](PyHandle& self) { return self.get().options().*member; }, doc);
  };
  option("get_block_size", &HandleOptions::block_size_bytes, "Bytes of one request.");
  option("get_queue_depth", &HandleOptions::queue_depth, "Requests in flight at once.");
  option("get_single_submit", &HandleOptions::single_submit,
         "Is each request a system call of its own?");
  option("get_overlap_events", &HandleOptions::overlap_events,
         "What was asked for; submitting and reaping always overlap.");
  option("get_intra_op_parallelism", &HandleOptions::intra_op_parallelism,
         "Threads that share one large transfer.");
  handle.def_property_readonly("engine", [](PyHandle& self) { return self.get().engine_name(); });
  handle.def_property_readonly("closed", [](PyHandle& self) { return self.get().is_closed(); });
  bind_operation<Operation::kRead>(handle, "read");
  bind_operation<Operation::kWrite>(handle, "write");
  handle.def("_submit_batch", &submit_batch, py::arg("requests"));
  handle.def(
      "wait",
      [](PyHandle& self) {
        return self.without_gil([](AioHandle& handle) { return handle.wait(check_signals); });
      },
      docs::kWait);
  handle.def(
      "fsync",
      [](PyHandle& self, const GivenFile& file, const GivenFlag& data_only) {
        const FileName name = file_of("file", file);
        const bool is_data_only = flag_of("data_only", data_only);
        self.without_gil(
            [&](AioHandle& handle) { handle.sync(name, is_data_only, check_signals); });
      },
      docs::kFsync, py::arg("file"), py::kw_only(), py::arg("data_only") = false);
  handle.def("_stats", [](PyHandle& self) {
    const DriverStats stats = self.get().stats();
    return py::make_tuple(stats.bytes_direct, stats.bytes_bounced, stats.bytes_buffered,
                          stats.operations, stats.requests, stats.retries);
  });
  handle.def("_poll",
             [](PyHandle& self) { self.without_gil([](AioHandle& handle) { handle.poll(); }); });
  handle.def(
      "_notify", [](PyHandle& self, int event_fd) { self.get().notify(event_fd); },
      py::arg("event_fd"));
  handle.def("close", &PyHandle::close);
}

}  // namespace

void bind_io(py::module_& module) {
  bind_handle(module);
  py::class_<IoTicket>(module, "IoTicketBase")
      .def("wait", &IoTicket::wait, py::arg("timeout") = py::none())
      .def("done", &IoTicket::done)
      .def("exception", &IoTicket::exception)
      .def_property_readonly("bytes", &IoTicket::bytes);
  module.def("engines", [] {
    std::vector<EngineInfo> found;
    {
      py::gil_scoped_release no_gil;
      found = engines();
    }
    py::list rows;
    for (const EngineInfo& info : found) {
      rows.append(py::make_tuple(info.name, info.usable, info.reason));
    }
    return rows;
  });
}

}  // namespace locked_tensor
