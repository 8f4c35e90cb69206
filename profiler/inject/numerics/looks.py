"""Tensors on their way from a module to a scanner: which wait, which are the same, which cannot be scanned and why."""

import sys
import weakref

from ..events import Clock
from . import records
from .formats import FORMATS
from .scanners import LONG_ITEMS, WAITING_ITEMS, WAITING_ITEMS_MAX, WAITING_MAX, Unchecked, scanner_for

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Optional

    from .formats import Format

#: Tensors of one output that are looked at, and how deep they may lie in it.
_TENSORS_MAX, _DEPTH_MAX = 16, 4

#: Points, and reasons why something is not checked, that are kept.
POINTS_MAX = (1 << 24) - 1
_REASONS_MAX = 2000

#: Wait for scans under way at the end.
_PATIENCE_MS = 50


class Place:
    """What is scanned of a watched module: its names, its role, a point for each of its tensors."""

    __slots__ = ("class_name", "dtype", "path", "points", "role", "root", "same", "writes_input")

    def __init__(self, root: int, path: str, class_name: str, role: str, dtype: str = "") -> None:
        self.root, self.path, self.class_name, self.role = root, path, class_name, role
        self.dtype = dtype  # what its bytes are, where torch does not know it
        self.points: dict[int, int] = {}  # which of its tensors -> point
        self.same: set[tuple[int, int]] = set()
        self.writes_input = False


class Looks:
    """The tensors of one step, and the scanners of all devices. Used by one thread at a time, but for ``drain``."""

    def __init__(self, say: "Callable[..., None]", every: int) -> None:
        torch = sys.modules["torch"]
        self._torch, self._say, self._every = torch, say, every
        self.tensor = torch.Tensor
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._forms: dict[Any, Format] = {
            getattr(torch, name): form for name, form in FORMATS.items() if hasattr(torch, name) and name != "int4"
        }
        self.scanners: dict[Any, Any] = {}  # by device
        self.quick: dict[int, Any] = {}  # those for which tensors may wait, by what ``Tensor.get_device`` says
        self.order = 0  # of the next scan of the step
        self.inference = False  # whether tensors made now have no version
        self._long: dict[int, tuple[Any, Optional[int], int]] = {}  # id -> weak reference, version, point
        self._points: list[list[Any]] = []  # yet to be told
        self._points_count = 0
        self._reasons: dict[tuple[str, str], None] = {}
        self._reasons_told = 0

    def begin(self) -> None:
        """A step begins; what waits of one that never ended is given up."""
        self.order = 0
        self.inference = self._torch.is_inference_mode_enabled()
        self.drop()
        for scanner in self.scanners.values():
            scanner.begin()

    def capturing(self) -> bool:
        """Whether the step is captured instead of run."""
        return any(scanner.capturing() for scanner in self.scanners.values())

    def drop(self) -> int:
        """Give up what waits; how many tensors that are."""
        self._long.clear()
        dropped = 0
        for scanner in self.quick.values():
            dropped += len(scanner.waiting)
            scanner.waiting, scanner.items = [], 0
        return dropped

    # -- tensors ------------------------------------------------------------------------------

    def see(self, place: "Place", index: int, tensor: "Any") -> None:
        """Scan a tensor now, or let it wait."""
        version = self._version(tensor)
        may_wait = type(tensor) in self._plain and not place.dtype
        scanner = self.quick.get(tensor.get_device()) if may_wait else None
        if scanner is not None and tensor.numel() <= WAITING_ITEMS:
            self.wait(scanner, place, index, tensor, version, tensor.numel())
            return
        before = self._long.get(id(tensor))
        if before is not None and before[0]() is tensor and before[1] == version and not place.writes_input:
            self._note_same(place, index, before[2])
            return
        point = self._point(place, index)
        form = self._form(place, tensor)
        scanner = form and self._scanner(place, tensor.device)
        if form is None or scanner is None:
            return
        if (
            may_wait and tensor.get_device() in self.quick and tensor.numel() <= WAITING_ITEMS
        ):  # the first of this device
            self.wait(scanner, place, index, tensor, version, tensor.numel())
            return
        self._add(scanner, place, tensor, form, self._tag(self.order, form, point))
        self.order += 1
        self._long[id(tensor)] = (weakref.ref(tensor), version, point)

    def wait(
        self, scanner: "Any", place: "Place", index: int, tensor: "Any", version: "Optional[int]", items: int
    ) -> None:
        """Let a tensor wait for one launch with others; hooks do the same themselves."""
        if scanner.moved() or not scanner.waiting:
            self.flush()
            scanner.take_up()
        scanner.waiting.append((place, index, tensor, version, self.order))
        self.order += 1
        scanner.items += items
        if len(scanner.waiting) >= WAITING_MAX or scanner.items >= WAITING_ITEMS_MAX:
            self.flush()

    def flush(self) -> None:
        """Scan what waits."""
        for scanner in self.quick.values():
            if scanner.waiting:
                waiting, scanner.waiting, scanner.items = scanner.waiting, [], 0
                self._send(scanner, waiting)
        self._long.clear()

    def _send(self, scanner: "Any", waiting: "list[tuple[Place, int, Any, Optional[int], int]]") -> None:
        groups: dict[Any, tuple[Format, list[int], list[int]]] = {}  # dtype -> short and long tensors
        seen: dict[int, tuple[int, Optional[int], list[int], int]] = {}  # id -> point, version, its row
        forms, strided = self._forms, self._torch.strided
        for place, index, tensor, version, order in waiting:
            before = seen.get(id(tensor))
            if before is not None:
                if before[1] == version and not place.writes_input:
                    self._note_same(place, index, before[0])
                    continue
                before[2][before[3]] = before[2][before[3]] & ~records.WHEN | records.CHANGED
            point = place.points.get(index)
            if point is None:
                point = self._point(place, index)
            dtype = tensor.dtype
            group = groups.get(dtype)
            if group is None:
                form = forms.get(dtype)
                if form is None:
                    self._form(place, tensor)
                    continue
                group = groups[dtype] = (form, [], [])
            scanned = records.LATER if version is None or tensor._version == version else records.CHANGED
            tag = order << 32 | group[0].number << 24 | point
            address, items = tensor.data_ptr(), tensor.numel()
            if tensor.layout is not strided or address % 16 or not tensor.is_contiguous():
                if self._form(place, tensor) is not None:
                    self._add(scanner, place, tensor, group[0], tag, scanned)
                continue
            words = group[2] if items > LONG_ITEMS else group[1]
            words += (address, items, tag, records.form_of(tensor, items) | scanned)
            seen[id(tensor)] = (point, version, words, len(words) - 1)
        scanner.scan([(form, words) for form, short, long in groups.values() for words in (short, long) if words])

    def _add(
        self, scanner: "Any", place: "Place", tensor: "Any", form: "Format", tag: int, scanned: int = records.AT_ONCE
    ) -> None:
        try:
            scanner.add(tensor, form, tag, scanned)
        except Unchecked as why:
            self.unchecked(place.path, str(why))

    def _version(self, tensor: "Any") -> "Optional[int]":
        return None if tensor.is_inference() else tensor._version

    def _form(self, place: "Place", tensor: "Any") -> "Optional[Format]":
        """Its format; None, and the reason noted, where it cannot be scanned."""
        form = FORMATS.get(place.dtype) if place.dtype else self._forms.get(tensor.dtype)
        if type(tensor) not in self._plain:
            self.unchecked(place.path, "a tensor of class %s" % type(tensor).__name__)
        elif form is None or form.item_bytes != tensor.element_size():
            self.unchecked(place.path, "dtype %s" % (place.dtype or str(tensor.dtype).rpartition(".")[2]))
        elif tensor.layout != self._torch.strided:
            self.unchecked(place.path, "layout %s" % tensor.layout)
        else:
            return form
        return None

    def _scanner(self, place: "Place", device: "Any") -> "Any":
        scanner = self.scanners.get(device)
        if scanner is not None:
            return scanner
        if device.type not in ("cpu", "cuda"):
            self.unchecked(place.path, "on device %s" % device.type)
            return None
        if device.type == "cuda" and self._torch.cuda.is_current_stream_capturing():
            self.unchecked(place.path, "the first look at %s was during a capture" % device)
            return None
        scanner = scanner_for(device, Clock, lambda text: self._say(ev="note", text=text))
        scanner.every = self._every
        scanner.begin()
        self.scanners[device] = scanner
        if hasattr(scanner, "waiting"):
            self.quick[-1 if device.type == "cpu" else device.index] = scanner
        return scanner

    def _tag(self, order: int, form: "Format", point: int) -> int:
        return order << 32 | form.number << 24 | point

    def _point(self, place: "Place", index: int) -> int:
        point = place.points.get(index)
        if point is None:
            point = place.points[index] = min(self._points_count, POINTS_MAX)
            self._points_count += 1
            self._points.append([point, place.root, place.path, place.class_name, place.role, index, -1])
        return point

    def _note_same(self, place: "Place", index: int, other: int) -> None:
        if (index, other) not in place.same:
            place.same.add((index, other))
            point = self._point(place, index)
            self._points.append([point, place.root, place.path, place.class_name, place.role, index, other])

    def unchecked(self, path: str, reason: str) -> None:
        """Note that something of this module is not scanned, and why."""
        if len(self._reasons) < _REASONS_MAX:
            self._reasons[path, reason] = None

    # -- what was found -----------------------------------------------------------------------

    def drain(self, write: "Callable[[int, Any], None]", all_of_it: bool) -> None:
        """Tell of new points and reasons, and hand over the records made since the last time, by device."""
        points = self._points[:]
        del self._points[: len(points)]
        if points:
            self._say(ev="numerics_points", points=points)
        reasons = list(self._reasons)
        if len(reasons) > self._reasons_told:
            self._say(ev="numerics_unchecked", places=reasons[self._reasons_told :])
            self._reasons_told = len(reasons)
        for device, scanner in list(self.scanners.items()):
            number = -1 if device.type == "cpu" else device.index
            if hasattr(scanner, "memory"):
                if all_of_it:
                    scanner.memory.settle(_PATIENCE_MS)
                scanner.memory.drain(lambda piece, number=number: write(number, piece), all_of_it)
            else:
                made = scanner.take(all_of_it)
                if made:
                    write(number, made)

    def losses(self) -> "dict[str, int]":
        """Scans that could not be made, by reason."""
        scanners = list(self.scanners.values())
        return {
            "no room in the table": sum(scanner.lost for scanner in scanners),
            "first seen during a capture": sum(scanner.unready for scanner in scanners),
        }


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
