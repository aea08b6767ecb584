"""What torch's `GradScaler` leaves to an optimizer that unscales gradients by itself."""

from __future__ import annotations

import contextlib
from typing import Iterator, NamedTuple, Optional

from torch.optim import Optimizer

# Note [Scaling] torch's GradScaler does not unscale float16 gradients: what is small would be rounded to 0.
# To an optimizer with `_step_supports_amp_scaling` it gives the scale instead, as the attributes `grad_scale`
# and `found_inf`, which it removes after `step`; but not where that raises, and a second try would scale by
# both. https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py


class Scaling(NamedTuple):
    """What a scaler wants of one step."""

    is_skipped: bool = False  #: a gradient is not finite
    unscale: Optional[float] = None  #: gradients are to be multiplied by it
    is_by_scaler: bool = False  #: a scaler called


@contextlib.contextmanager
def scaling_of(optimizer: Optimizer) -> Iterator[Scaling]:
    """The scaling of a step in this context; a step that raises leaves none for the next."""
    try:
        yield _asked(optimizer)
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        raise


def _asked(optimizer: Optimizer) -> Scaling:
    asked = vars(optimizer)
    if "found_inf" not in asked:
        return Scaling()
    scale = asked.get("grad_scale")
    unscale = None if scale is None else float(scale.double().reciprocal().float())
    return Scaling(bool(asked["found_inf"]), unscale, True)
