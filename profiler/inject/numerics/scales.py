"""Scales of quantised tensors: what their codes stand for, at most.

A scale is scanned as codes are: nothing is read from the device for it. With a zero point, what is scanned is
|scale| * max(|zero|, |end - zero|), as far as each group of codes can reach: a few operators on tensors of the scale's
size.
"""

import sys

from .formats import FLOAT, SIGNED
from .places import Place

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .formats import Format
    from .looks import Looks

#: What codes with a scale that has no format of its own become.
_DEFAULT = "float16"


class Scales:
    """Tells, once of each point, which scale its codes have. Faults are the caller's."""

    def __init__(self, looks: "Looks", say: "Callable[..., None]") -> None:
        self._looks, self._say = looks, say
        self._places: dict[int, Place] = {}  # of the scales, by point of the codes
        self._told: dict[int, list[Any]] = {}

    def beside(self, place: "Place", form: "Format", tensor: "Any", scale: "Any", zero: "Any") -> None:
        """The scale of a tensor that was just looked at as ``place``: x = scale * (code - zero), numbers or tensors."""
        looks, point = self._looks, self._looks.point(place)
        real = _name(scale.dtype) if isinstance(scale, looks.tensor) else _DEFAULT
        reaches = zero is not None and (isinstance(zero, looks.tensor) or zero != 0)
        beside = self._places.get(point)
        if beside is None:
            beside = self._places[point] = Place(place.root, place.path, place.class_name, "scale")
        looks.see(beside, 0, _reach(form, tensor, scale, zero) if reaches else _on_device(tensor, scale))
        told = [point, looks.point(beside), real, int(reaches)]
        if self._told.get(point) != told:
            self._told[point] = told
            self._say(ev="numerics_scales", scales=[told])


def scale_beside(module: "Any", name: str) -> "tuple[Any, Any]":
    """(scale, zero point) that a module keeps beside a quantised weight, as libraries name them; None where none."""
    names = [name + "_scale", name + "_scales"] + (["scale", "scales"] if name == "weight" else [])
    zeros = [name + "_zero_point"] + (["zero_point"] if name == "weight" else [])
    return _held(module, names), _held(module, zeros)


def _held(module: "Any", names: "list[str]") -> "Any":
    tensor = sys.modules["torch"].Tensor
    for name in names:
        for held in (module._parameters, module._buffers, vars(module)):
            value = held.get(name)
            if isinstance(value, (tensor, int, float)) and not isinstance(value, bool):
                return value
    return None


def _on_device(tensor: "Any", number: "Any") -> "Any":
    """A number as a tensor: filled in on the device, where it is also right in a CUDA graph."""
    torch = sys.modules["torch"]
    if isinstance(number, torch.Tensor):
        return number
    return torch.full((1,), float(number), dtype=torch.float32, device=tensor.device)


def _reach(form: "Format", tensor: "Any", scale: "Any", zero: "Any") -> "Any":
    torch = sys.modules["torch"]
    zero = _on_device(tensor, zero).detach().to(torch.float32)
    least = {FLOAT: -form.limit, SIGNED: -form.limit - 1}.get(form.kind, 0)
    reach = torch.maximum((form.limit - zero).abs(), (least - zero).abs())
    return reach * _on_device(tensor, scale).detach().to(torch.float32).abs()


def is_quantised(form: "Optional[Format]") -> bool:
    """Whether elements of this format are worth something only with a scale."""
    return form is not None and form.item_bytes == 1


def _name(dtype: "Any") -> str:
    return str(dtype).rpartition(".")[2]
