"""Tensors that are looked at by name, as no module gives them: what the program names, and a model's weights.

With them the scales of those that are quantised. Called by one thread at a time; faults are the caller's.
"""

from .places import Place
from .scales import Scales, is_quantised, scale_beside
from .unseen import unseen

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from .roots import Root
    from .watch import Numerics


class Named:
    """Of one watch."""

    def __init__(self, numerics: "Numerics", say: "Callable[..., None]") -> None:
        self._numerics, self._looks = numerics, numerics.looks
        self._scales = Scales(numerics.looks, say)
        self._places: dict[tuple[str, str, str], Place] = {}  # of what the program names

    def look(self, name: str, tensor: "Any", role: str, dtype: str, scale: "Any", zero_point: "Any") -> None:
        """Scan a tensor that the program names, see ``Numerics.look_at``."""
        place = self._places.get((name, role, dtype))
        if place is None:
            place = self._places[name, role, dtype] = Place(-1, name, type(tensor).__name__, role, dtype)
        with unseen():
            if self._numerics.look(place, 0, tensor, ends=scale is None) and scale is not None:
                self._scale(place, tensor, scale, zero_point)
                if self._numerics.thread == 0:
                    self._looks.flush(ends=True)

    def weights(self, root: "Root", modules: "Iterable[tuple[str, Any]]") -> None:
        """Parameters and buffers of a model's modules; shared ones under their first name."""
        seen: set[int] = set()
        for path, module in modules:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                full = "%s.%s" % (path, name) if path else name
                place = root.place(full, type(module).__name__, "weight")
                self._looks.see(place, 0, tensor)
                if is_quantised(self._looks.format_of(tensor)):
                    scale, zero_point = scale_beside(module, name)
                    if scale is not None:
                        self._scale(place, tensor, scale, zero_point)

    def _scale(self, place: "Place", tensor: "Any", scale: "Any", zero_point: "Any") -> None:
        form = self._looks.form(place, tensor)
        if form is not None:
            try:
                self._scales.beside(place, form, tensor, scale, zero_point)
            except (TypeError, ValueError, RuntimeError) as error:  # sizes that do not fit, say
                self._looks.unchecked(place.path, "its scale: %s" % str(error).partition("\n")[0])
