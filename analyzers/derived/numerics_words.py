"""What to do about numbers that leave their format, in one sentence each."""

from __future__ import annotations

from spikeprof.analyzers.derived.numerics_heat import MODEL
from spikeprof.analyzers.derived.numerics_origin import Origin
from spikeprof.analyzers.derived.numerics_scans import Scans, Tensor

RECALIBRATE = "Calibrate its scale anew, by channel or group, or leave its outliers in a wider format."
SCALE_UP = "Scale it up by a power of two before it is rounded to this format, or keep it in BF16 or FP32."
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")


def after_overflow(tensor: Tensor) -> str:
    """For a tensor that holds Inf or NaN."""
    if _is_narrow(tensor):
        return "Keep it in BF16 or FP32, or scale it by a power of two and undo that after the sum."
    return "Look for a division by zero, Inf - Inf, or a row that is masked whole."


def before_overflow(tensor: Tensor) -> str:
    """For a tensor that comes close to its limit."""
    if _is_narrow(tensor):
        return "Keep it in BF16 or FP32, or scale it by a power of two and undo that after the sum."
    return "Bound it: no format in use is wider."


def source_action(scans: Scans, found: Origin) -> str:
    """For the tensor that was bad first."""
    tensor = scans.tensors[scans.tensor[found.scan]]
    if tensor.role == "weight":
        return "Load the weights anew, or look into the file: the weight itself holds Inf or NaN."
    if not found.before_count:
        return "Look at what it takes, too: spikeprof run --numerics --numerics-roles output,input,weight -- CMD."
    if tensor.role == "input":
        before = scans.tensors[scans.tensor[found.scan - 1]]
        return f"Look at what is computed between {before.path or MODEL}, which was fine, and this input."
    if scans.inf[found.scan] and _is_narrow(tensor):
        return "Keep this module's result in BF16 or FP32, or scale what it takes by a power of two."
    if scans.inf[found.scan]:
        return "Look for a division by zero or a log of zero in this module."
    return "Look for 0 / 0, Inf - Inf, a root of a negative number, or a softmax of a row that is masked whole."


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.format is not None and tensor.format.name in _NARROW
