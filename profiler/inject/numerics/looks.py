"""Tensors on their way from a module to a scanner: which wait, which are the same, which cannot be scanned and why."""

import sys
import weakref

from ..events import Clock
from .batches import Batches, held
from .formats import FORMATS
from .places import NEW, Spot
from .records import POINTS_MAX, tag_of
from .scanner import Unchecked
from .scanners import scanner_for
from .unseen import is_traced
from .waiting import Waiting

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .formats import Format
    from .places import Place

#: Reasons why something is not checked that are kept.
_REASONS_MAX = 2000

#: References to an element of a list, as ``map`` sees them, where nobody else has one.
_OWN_REFERENCES = max(map(sys.getrefcount, [object()]))

#: Wait for scans under way at the end.
_PATIENCE_MS = 50


class Looks:
    """The tensors of one step, and the scanners of all devices. Used by one thread at a time, but for ``drain``."""

    def __init__(self, say: "Callable[..., None]", every: int) -> None:
        torch = sys.modules["torch"]
        self.torch, self._say, self._every = torch, say, every
        self.tensor = torch.Tensor
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._forms: dict[Any, Format] = {
            getattr(torch, name): form for name, form in FORMATS.items() if hasattr(torch, name) and name != "int4"
        }
        self._steps = 0  # so far
        self.scanners: dict[Any, Any] = {}  # by device
        self.quick: dict[int, Any] = {}  # those for which tensors may wait, by what ``Tensor.get_device`` says
        self.waiting = Waiting()
        self._batches = Batches(self)
        self._sent: dict[int, tuple[Any, Optional[int], Spot]] = {}  # id -> weak reference, version, spot
        #: Hears of scans that were launched: device, what was held for them, stream.
        self.launched: Optional[Callable[[int, list[tuple[Any, Spot, Optional[int], int]], int], None]] = None
        self._points: list[list[Any]] = []  # yet to be told
        self.places: dict[int, Place] = {}  # by point
        self.saw_bad: Callable[..., None] = lambda *_, **__: None  # hears at once of bad values on the CPU
        self._points_count = 0
        self.reasons: dict[tuple[str, str], None] = {}
        self._reasons_told = 0

    def begin(self) -> None:
        """A step begins; what waits of one that never ended is given up."""
        self.drop()
        self._steps += 1
        self.waiting.begin = 0
        self.waiting.inference = self.torch.is_inference_mode_enabled()
        for scanner in self.scanners.values():
            scanner.begin()

    def outside(self) -> None:
        """What comes is of no step."""
        if not self.waiting.tensors:
            self.waiting.inference = self.torch.is_inference_mode_enabled()

    def capturing(self) -> bool:
        """Whether the step is captured instead of run."""
        return any(scanner.capturing() for scanner in self.scanners.values())

    def drop(self) -> int:
        """Give up what waits; how many tensors that are."""
        dropped = len(self.waiting.tensors)
        self.waiting.clear()
        self._sent.clear()
        return dropped

    # -- tensors ------------------------------------------------------------------------------

    def see(self, place: "Place", index: int, tensor: "Any") -> None:
        """Scan a tensor now, or let it wait."""
        form = self.form(place, tensor)
        if not self.is_plain(tensor):  # whose code may be the program's
            return
        version, waiting = self._version(tensor), self.waiting
        spot = self._spot(place, index)
        scanner: Any = self._scanner(place, tensor.device) if form is not None else None
        if form is None or scanner is None:
            return
        number = tensor.get_device()
        if not place.dtype and number in self.quick:
            if not waiting.is_of(number):
                self.flush()
                waiting.turn_to(number, scanner.stream_of, scanner.held_bytes())
            if waiting.append(spot, tensor, version):
                self.flush()
            return
        before = self.sent(tensor, version)
        if before is not None and not place.writes_input:
            self.note_same(spot, before)
            return
        self.flush()
        try:
            scanner.add(tensor, form, tag_of(waiting.begin, form.number, spot.point))
        except Unchecked as why:
            self.unchecked(place.path, str(why))
        waiting.begin += 1
        self._sent[id(tensor)] = (weakref.ref(tensor), version, spot)

    def sent(self, tensor: "Any", version: "Optional[int]") -> "Optional[Spot]":
        """Whose tensor it is, if it was scanned in this step and not written to since."""
        sent = self._sent.get(id(tensor))
        return sent[2] if sent is not None and sent[0]() is tensor and sent[1] == version else None

    def any_sent(self, tensors: "Any") -> bool:
        """Whether any of these was scanned in this step, with a batch before; those that have gone are forgotten."""
        if not self._sent:
            return False
        for key in [key for key, (reference, _, _) in self._sent.items() if reference() is None]:
            del self._sent[key]
        return bool(self._sent) and not self._sent.keys().isdisjoint(map(id, tensors))

    def flush(self, ends: bool = False) -> None:
        """Scan what waits; ``ends``: nothing more comes in this step."""
        waiting, others = self.waiting, []
        if waiting.tensors:
            try:
                scanner = self.quick[waiting.device]
                plan = self._batches.plan(waiting, scanner)
                scanner.scan(plan.launches, waiting.stream)
                if self.launched is not None:
                    self.launched(waiting.device, held(plan, waiting), waiting.stream)
                others = [(waiting.spots[at], waiting.tensors[at]) for at in plan.others]
                if not ends:
                    self._remember(waiting)
            finally:
                waiting.clear()
            for spot, tensor in others:
                self.see(spot.place, spot.index, tensor)
        if ends:
            self._sent.clear()
            if others:
                self.flush(ends=True)

    def _remember(self, waiting: Waiting) -> None:
        """Those of what was scanned that others hold, too, and may hand on."""
        for at, count in enumerate(map(sys.getrefcount, waiting.tensors)):
            if count > _OWN_REFERENCES:
                tensor, version = waiting.tensors[at], waiting.versions[at] if waiting.versions else None
                if self.sent(tensor, version) is None:
                    self._sent[id(tensor)] = (weakref.ref(tensor), version, waiting.spots[at])

    def _version(self, tensor: "Any") -> "Optional[int]":
        return None if tensor.is_inference() else tensor._version

    def form(self, place: "Place", tensor: "Any") -> "Optional[Format]":
        """Its format; None, and the reason noted, where it cannot be scanned."""
        if not self.is_plain(tensor):
            self.unchecked(place.path, "a tensor of class %s" % type(tensor).__name__)
            return None
        form = FORMATS.get(place.dtype) if place.dtype else self._forms.get(tensor.dtype)
        if tensor.is_nested:
            self.unchecked(place.path, "a nested tensor")
        elif form is None or form.item_bytes != tensor.element_size():
            self.unchecked(place.path, "dtype %s" % (place.dtype or str(tensor.dtype).rpartition(".")[2]))
        elif tensor.layout != self.torch.strided:
            self.unchecked(place.path, "layout %s" % tensor.layout)
        else:
            return form
        return None

    def is_plain(self, tensor: "Any") -> bool:
        """Whether it is of torch's own class."""
        return type(tensor) in self._plain

    def format_of(self, tensor: "Any") -> "Optional[Format]":
        """That of a dtype, where it is known."""
        return self._forms.get(tensor.dtype)

    def _scanner(self, place: "Place", device: "Any") -> "Any":
        scanner = self.scanners.get(device)
        if scanner is not None:
            return scanner
        if device.type not in ("cpu", "cuda"):
            self.unchecked(place.path, "on device %s" % device.type)
            return None
        if device.type == "cuda" and self.torch.cuda.is_current_stream_capturing():
            self.unchecked(place.path, "the first look at %s was during a capture" % device)
            return None
        scanner = scanner_for(device, Clock, lambda text: self._say(ev="note", text=text))
        scanner.every = self._every
        scanner.saw_bad = self.saw_bad
        scanner.begin(max(self._steps, 1))  # devices number steps alike, whenever they are used first
        self.scanners[device] = scanner
        if hasattr(scanner, "stream_of"):
            self.quick[-1 if device.type == "cpu" else device.index] = scanner
        return scanner

    def point(self, place: "Place") -> int:
        """The point of a place that has one tensor."""
        return self._spot(place, 0).point

    def _spot(self, place: "Place", index: int) -> "Spot":
        while len(place.spots) <= index:
            place.spots.append(NEW)
        spot = place.spots[index]
        if spot is NEW:
            spot = place.spots[index] = Spot(place, index, min(self._points_count, POINTS_MAX))
            self._points_count += 1
            self.places[spot.point] = place
            self._points.append([spot.point, place.root, place.path, place.class_name, place.role, index, -1])
        return spot

    def note_same(self, spot: "Spot", other: "Spot") -> None:
        """Note whose tensor this one handed on."""
        place = spot.place
        spot.same_as = other
        if (spot.index, other.point) not in place.same:
            place.same.add((spot.index, other.point))
            names = [place.root, place.path, place.class_name, place.role]
            self._points.append([spot.point, *names, spot.index, other.point])

    def unchecked(self, path: str, reason: str) -> None:
        """Note that something of this module is not scanned, and why."""
        if len(self.reasons) < _REASONS_MAX:
            self.reasons[path, reason] = None

    def traced(self) -> bool:
        """Whether torch.jit.trace records what is done now, which is noted: what we do would be in its graph."""
        if is_traced():
            self.unchecked("", "calls that torch.jit.trace recorded")
            return True
        return False

    # -- what was found -----------------------------------------------------------------------

    def drain(self, write: "Callable[[int, Any], None]", all_of_it: bool) -> None:
        """Tell of new points and reasons, and hand over the records made since the last time, by device."""
        points = self._points[:]
        del self._points[: len(points)]
        if points:
            self._say(ev="numerics_points", points=points)
        reasons = list(self.reasons)
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
