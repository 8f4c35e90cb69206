"""Where tensors come from: what is scanned of a module, and each of the tensors in what it gives."""

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Optional

#: Tensors of one output that are looked at, and how deep they may lie in it.
_TENSORS_MAX, _DEPTH_MAX = 16, 4


class Spot:
    """One of a module's tensors."""

    __slots__ = ("index", "nbytes", "place", "point", "same_as")

    def __init__(self, place: "Optional[Place]", index: int, point: int) -> None:
        self.place: Any = place
        self.index, self.point = index, point
        self.nbytes = -1  # the last time; -1: it was not one that can wait
        self.same_as: Optional[Spot] = None  # of which it handed on the tensor


#: Of modules that were never seen.
NEW = Spot(None, -1, -1)


class Place:
    """What is scanned of a watched module: its names, its role, what is known of each of its tensors."""

    __slots__ = ("class_name", "dtype", "path", "role", "root", "same", "spots", "writes_input")

    def __init__(self, root: int, path: str, class_name: str, role: str, dtype: str = "") -> None:
        self.root, self.path, self.class_name, self.role = root, path, class_name, role
        self.dtype = dtype  # what its bytes are, where torch does not know it
        self.spots = [NEW]  # by which of its tensors it is
        self.same: set[tuple[int, int]] = set()
        self.writes_input = False


def tensors_in(tensor: "Any", value: "Any") -> "Iterator[Any]":
    """Tensors in nested tuples, lists, dictionaries and dataclasses, in order."""
    found = 0
    waiting = [(value, 0)]
    while waiting and found < _TENSORS_MAX:
        each, depth = waiting.pop()
        if isinstance(each, tensor):
            found += 1
            yield each
        elif depth < _DEPTH_MAX:
            waiting += [(one, depth + 1) for one in reversed(_inside(each))]


def _inside(value: "Any") -> "list[Any]":
    if isinstance(value, (tuple, list)):
        return list(value[:_TENSORS_MAX])
    if isinstance(value, dict):
        return list(value.values())[:_TENSORS_MAX]
    names = getattr(type(value), "__dataclass_fields__", ())
    own = getattr(value, "__dict__", {})
    return [own[name] for name in names if name in own]
