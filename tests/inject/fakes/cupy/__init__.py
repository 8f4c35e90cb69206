"""A CUDA package that uses CUDA from its import on."""

from fakegpu import *  # noqa: F403
