"""What is in a tensor, asked for at once: of inputs that were kept, and of what operators give that are run again."""

import math
import sys

from . import scan_torch
from .formats import FLOAT, FORMATS

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional


class Contents:
    """What a scan of a tensor saw. ``origin`` is the operator that its bad values come from, -1 = none of the tape."""

    __slots__ = ("amax", "first_bad", "inf", "masked", "nan", "origin", "plus")

    def __init__(self, amax: "Optional[float]", nan: int, inf: int, first_bad: int, plus: bool) -> None:
        self.amax, self.nan, self.inf, self.first_bad = amax, nan, inf, first_bad
        self.plus = plus  # whether +Inf is there
        self.masked = inf > 0 and not nan and not plus  # it was put in by intention, where nothing else is known
        self.origin = -1

    @property
    def bad(self) -> bool:
        """Whether NaN or Inf were there."""
        return self.nan + self.inf > 0


def contents_of(tensor: "Any") -> "Optional[Contents]":
    """What is in a tensor; None where its numbers cannot be bad. Waits for the device."""
    pairs = tensor.is_complex()
    if pairs:
        tensor = sys.modules["torch"].view_as_real(tensor.resolve_conj())
    form = FORMATS.get(str(tensor.dtype).rpartition(".")[2])
    if form is None or form.kind != FLOAT or not tensor.numel():
        return None
    amax, _, nan, inf, _, _, _, first_bad = scan_torch.scan(tensor, form)[:8]
    first_bad = first_bad // 2 if pairs else first_bad
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # FP8 cannot be compared
    return Contents(form.value(amax), nan, inf, first_bad, plus=inf > 0 and bool((wide == math.inf).any()))


def shown(tensor: "Any", seen: Contents) -> "dict[str, Any]":
    """A tensor for the event."""
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype).rpartition(".")[2], "amax": seen.amax,
        "nan": seen.nan, "inf": seen.inf,
    }  # fmt: skip
