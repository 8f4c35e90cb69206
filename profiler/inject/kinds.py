"""Kinds of steps: the same model with inputs of about the same size. Prefill and decode are two of them."""

from __future__ import annotations

import sys

from .interrupts import is_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

#: Attributes of a marked step that tell its size.
_SIZES = ("llm.batch_size", "llm.token_usage.total")


class Kind:
    """One kind: steps of equal ``key`` are of the same."""

    __slots__ = ("key", "text")

    def __init__(self, key: Hashable, text: str) -> None:
        self.key, self.text = key, text


def of_call(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
    """By the module and the shape of the first tensor among its arguments, sizes to the next power of two."""
    shape = _first_shape((*args, *kwargs.values()))
    key = (id(module), type(module).__name__, *(size.bit_length() if type(size) is int else -1 for size in shape))
    sizes = "x".join(str(size) if type(size) is int else "?" for size in shape)
    return Kind(key, "%s %s" % (type(module).__name__, sizes) if sizes else type(module).__name__)


def of_mark(name: str, attributes: Mapping[str, Any]) -> Kind:
    """By the name of a marked step and the sizes that it tells, to the next power of two."""
    sizes = [attributes.get(size) for size in _SIZES]
    key = (name, *(size.bit_length() if type(size) is int else -1 for size in sizes))
    return Kind(key, "marked %s" % name)


def _first_shape(values: tuple[Any, ...]) -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if torch is None or tensor is None:
        return ()
    return next((shape_of(torch, value) for value in values if issubclass(type(value), tensor)), ())


def shape_of(torch: Any, tensor: Any) -> tuple[Any, ...]:
    """A tensor's shape, asked for without the program's noticing: by its modes and subclasses that would be a call."""
    try:
        with torch._C.DisableTorchFunction():
            return tuple(tensor.shape)
    except Exception as error:  # a nested tensor has none
        # What code of a class of the program's raises is told from what a signal handler does by the class alone.
        if type(tensor).__module__.partition(".")[0] == "torch" and not is_ours(error, "torch"):
            raise
        return ()
