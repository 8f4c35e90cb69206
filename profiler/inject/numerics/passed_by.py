"""Modules of a watched model whose outputs never came by: told at the end, so that nobody takes silence for health."""

from .given import gives
from .places import NEW

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from .looks import Looks
    from .roots import Root

_NEVER = "no call of it was seen: it was not called, or only its forward, or it is part of a fused operator"
_LATE = "it came into the model after that was called first"


def tell(looks: "Looks", roots: "Iterable[Root]", modules: "Callable[[Any], Iterator[tuple[str, Any]]]") -> None:
    """Note them; ``modules`` gives those of a model that are to be watched, with their paths."""
    told = {path for path, _ in list(looks.reasons)}
    for root in roots:
        model, expected = root.module(), dict(root.expected)
        if not root.steps:
            if not root.refused and "" not in told:
                looks.unchecked("", _NEVER)
            continue
        for path, (_, place) in expected.items():
            if place.spots[0] is NEW and path not in told:
                looks.unchecked(path, _NEVER)
        for path, each in modules(model) if model is not None and expected else ():
            if gives(each) and expected.get(path, (0,))[0] != id(each):
                looks.unchecked(path, _LATE)
