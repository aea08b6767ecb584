"""torch's own operator samples, on locked tensors against plain ones: equal results, true tags."""

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map_only

import locked_tensor as lt

SAMPLES = 3  # of each operator and dtype
DTYPES = [torch.float32, torch.int64, torch.complex64, torch.bool]

# Not compared, each with the reason.
EXCEPTIONS = {
    "empty": "what is in fresh memory is not defined",
    "empty_like": "what is in fresh memory is not defined",
    "empty_permuted": "what is in fresh memory is not defined",
    "empty_strided": "what is in fresh memory is not defined",
    "new_empty": "what is in fresh memory is not defined",
    "new_empty_strided": "what is in fresh memory is not defined",
    "resize_": "what is in fresh memory is not defined",
    "resize_as_": "what is in fresh memory is not defined",
    "to_sparse": "a sparse result has no bytes of its own to compare",
}
RANDOM = ("bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "multinomial", "normal",
          "rand", "rrelu", "uniform", "gumbel", "scaled_dot_product", "pca_lowrank", "svd_lowrank", "fractional_max")

# LAPACK's and vectorised results differ in the last bits with the alignment of the memory.
ROUGH = ("pinverse", "norm", "linalg", "svd")


def locked(value):
    def copy(tensor):
        plain = tensor.detach()
        return lt.lock(plain) if plain.layout is torch.strided else plain

    return tree_map_only(torch.Tensor, copy, value)


def cases():
    for op in op_db:
        yield pytest.param(op, id=f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}")


def call(op, sample):
    torch.manual_seed(0)
    try:
        return op(sample.input, *sample.args, **sample.kwargs), None
    except Exception as error:
        return None, error


def tensors(value):
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", list(cases()))
def test_an_operator_gives_equal_results_and_true_tags(op):
    if op.name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[op.name])
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        # The generator makes its samples when asked: both calls get tensors of their own.
        for plain, ours in zip(
            itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES),
            itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES),
        ):
            ours.input, ours.args, ours.kwargs = locked(plain.input), locked(plain.args), locked(plain.kwargs)
            plain.input = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), plain.input)
            expected, expected_error = call(op, plain)
            result, error = call(op, ours)
            assert type(error) is type(expected_error), error
            for found, wanted in zip(tensors(result), tensors(expected), strict=True):
                if found.layout != torch.strided:
                    continue
                assert found.shape == wanted.shape and found.dtype == wanted.dtype
                assert found.stride() == wanted.stride()
                is_tagged = type(found) is lt.LockedTensor
                assert is_tagged == lt.is_locked(found) or found.nbytes == 0
                if not any(word in op.name for word in RANDOM):
                    exactly = {} if op.name.startswith(ROUGH) else {"rtol": 0, "atol": 0}
                    torch.testing.assert_close(lt.as_plain(found), wanted, equal_nan=True, **exactly)
