"""As much of torch as the agent touches."""

from contextlib import nullcontext
from types import SimpleNamespace

import fakegpu

from . import autograd, cuda, nn

__all__ = ["autograd", "cuda", "nn"]
__version__ = "0.0+fake"

#: torch.cuda.cudart() hands this out.
_C = SimpleNamespace(
    DisableTorchFunction=nullcontext,
    _cudart=SimpleNamespace(
        cudaProfilerStart=lambda: fakegpu.profiler(1), cudaProfilerStop=lambda: fakegpu.profiler(0)
    ),
)
