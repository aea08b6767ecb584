#include "dispatch/operator_call.h"

namespace locked_tensor {

// Note [Lazy conjugation] Above Python, torch resolves lazily conjugated and negated tensors and
// zero tensors; on the way to a __torch_dispatch__ it excludes those keys, so an operator that
// makes such a view inside itself (linalg.pinv of complex matrices) computes with the unconjugated
// bytes: wrong values, for every subclass and mode in torch 2.13. So they are let in again around
// it.
void call_operator(const c10::OperatorHandle& op, Below below, torch::jit::Stack* stack) {
  constexpr c10::DispatchKeySet kResolvedAbove(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  constexpr c10::DispatchKeySet kPython({c10::DispatchKey::Python, c10::DispatchKey::PreDispatch,
                                         c10::DispatchKey::PythonTLSSnapshot});
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet excluded = local.excluded_ - kResolvedAbove;
  if (below == Below::kPython) {
    excluded = excluded | kPython;
  }
  c10::impl::ForceDispatchKeyGuard guard(local.included_, excluded);
  op.callBoxed(stack);
}

}  // namespace locked_tensor
