"""What to do about numbers that leave their format, in one sentence each."""

from __future__ import annotations

from spikeprof.analyzers.derived.numerics_heat import MODEL
from spikeprof.analyzers.derived.numerics_origin import Origin
from spikeprof.analyzers.derived.numerics_scans import Scans, Tensor

RECALIBRATE = "Calibrate its scale anew, by channel or group, or leave its outliers in a wider format."
AFTER_SCALE = "Keep the scale and what it gives in BF16 or FP32, or leave the outliers in a wider format."
SCALE_UP = "Scale it up by a power of two before it is rounded to this format, or keep it in BF16 or FP32."
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")


def after_overflow(tensor: Tensor, infinite: bool) -> str:
    """For a tensor that holds NaN, and Inf where ``infinite``."""
    if not infinite:
        return "Look for 0 / 0 or a row that is masked whole, and for what a bad step before left in a cache."
    if _is_narrow(tensor):
        return "Keep it in BF16 or FP32, or scale it by a power of two and undo that after the sum."
    return "Look for a division by zero, Inf - Inf, or a row that is masked whole."


def before_overflow(tensor: Tensor) -> str:
    """For a tensor that comes close to its limit."""
    if _is_narrow(tensor):
        return "Keep it in BF16 or FP32, or scale it by a power of two and undo that after the sum."
    return "Bound it: no format in use is wider."


def source_action(scans: Scans, found: Origin) -> str:
    """For the tensor that was bad first: the first of these that applies."""
    tensor = scans.tensors[scans.tensor[found.scan]]
    last = scans.tensors[scans.tensor[found.scan - 1]]
    before = last.path or MODEL
    infinite = bool(scans.inf[found.scan])
    cases = (
        (
            scans.changed[found.scan],
            "Look at what writes into this tensor after the module: it was scanned after that.",
        ),
        (tensor.role == "weight", "Load the weights anew, or look into the file: the weight itself holds Inf or NaN."),
        (
            not found.before_count,
            "Look at what it takes, too: spikeprof run --numerics --numerics-roles output,input,weight -- CMD.",
        ),
        (
            tensor.role == "gradient" != last.role,
            "Look at the loss: the first gradient that was scanned is bad already.",
        ),
        (
            tensor.role == "gradient",
            f"Look at the backward pass of what follows this module: the gradient that {before} got was fine.",
        ),
        (tensor.role == "input", f"Look at what is computed between {before}, which was fine, and this input."),
        (
            infinite and _is_narrow(tensor),
            "Keep this module's result in BF16 or FP32, or scale what it takes by a power of two.",
        ),
        (infinite, "Look for a division by zero or a log of zero in this module."),
    )
    nan = "Look for 0 / 0, Inf - Inf, a root of a negative number, or a softmax of a row that is masked whole."
    return next((action for applies, action in cases if applies), nan)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.format is not None and tensor.format.name in _NARROW
