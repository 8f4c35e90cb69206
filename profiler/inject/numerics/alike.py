"""Models like one that is gone, as programs make them for each request: they go by its number and its places.

Else each would add to the names of all that was scanned, for as long as the program runs.
"""

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .places import Place
    from .roots import Root

#: Models that are gone whose names are kept.
LEFT_MAX = 64


class Alike:
    """Numbers and places that models have left. A model may go at any time, in any thread."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, dict[tuple[str, str, str], Place]]] = {}
        self._count = 0

    def name(self, root: "Root", modules: "Iterable[tuple[str, Any]]") -> bool:
        """Give a new model its number, and the places of the one before; whether there was one."""
        root.like = hash(tuple((path, type(each).__name__) for path, each in modules))
        left = self._left.pop(root.like, None)
        if left is not None:
            root.number, root.left = left
            return True
        root.number = self._count
        self._count += 1
        return False

    def leave(self, root: "Root") -> None:
        """A model is gone."""
        left = self._left
        while len(left) >= LEFT_MAX:
            left.pop(next(iter(left.copy()), 0), None)
        left[root.like] = root.number, root.made
