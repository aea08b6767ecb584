#include "dispatch/operator_table.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>

namespace locked_tensor {

namespace {

using Table = std::unordered_map<std::string_view, Results>;

const Table& table() {
  static const Table* entries = [] {
    auto* made = new Table;
    for (std::string_view name :
         {"_conj",        "_neg_view", "_reshape_alias", "_unsafe_view",    "alias",
          "as_strided",   "detach",    "diagonal",       "expand",          "narrow",
          "permute",      "select",    "slice",          "split",           "split_with_sizes",
          "squeeze",      "t",         "transpose",      "unbind",          "unfold",
          "unsafe_split", "unsqueeze", "view",           "view_as_complex", "view_as_real"}) {
      made->emplace(name, Results::kViews);
    }
    for (std::string_view name : {"_to_copy",  "abs",        "add",        "addmm",
                                  "bmm",       "cat",        "clone",      "cos",
                                  "div",       "empty_like", "eq",         "exp",
                                  "full_like", "ge",         "gelu",       "gt",
                                  "le",        "log",        "lt",         "maximum",
                                  "mean",      "minimum",    "mm",         "mul",
                                  "ne",        "neg",        "new_empty",  "new_empty_strided",
                                  "new_full",  "new_ones",   "new_zeros",  "ones_like",
                                  "pow",       "rand_like",  "randn_like", "reciprocal",
                                  "relu",      "rsqrt",      "rsub",       "sigmoid",
                                  "silu",      "sin",        "sqrt",       "stack",
                                  "sub",       "sum",        "tanh",       "where",
                                  "zeros_like"}) {
      made->emplace(name, Results::kFresh);
    }
    return made;
  }();
  return *entries;
}

bool has_alias_annotation(const c10::Argument& argument) {
  return argument.alias_info() != nullptr;
}

}  // namespace

Results results_of(const c10::FunctionSchema& schema) {
  constexpr std::string_view kNamespace = "aten::";
  const std::string_view name = schema.name();
  if (name.substr(0, kNamespace.size()) != kNamespace) {
    return Results::kAsk;
  }
  const auto entry = table().find(name.substr(kNamespace.size()));
  if (entry == table().end()) {
    return Results::kAsk;
  }
  // out= variants have the name of what they are variants of.
  if (entry->second == Results::kFresh &&
      std::any_of(schema.returns().begin(), schema.returns().end(), has_alias_annotation)) {
    return Results::kAsk;
  }
  return entry->second;
}

}  // namespace locked_tensor
