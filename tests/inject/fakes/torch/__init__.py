"""As much of torch as the agent touches."""

from . import autograd, cuda, nn

__all__ = ["autograd", "cuda", "nn"]
__version__ = "0.0+fake"
