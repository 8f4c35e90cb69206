"""Tensors that wait, held, for a common launch: of one stream of one GPU at a time.

What is done for each tensor of each module lies here, as short as it can be: of an output that has the shape and dtype
of the last one of its module everything but its address and its place in the order is known.
"""

from . import records

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .formats import Format

#: Tensors that wait for one launch, and the bytes that they keep from being freed, but for what the last one adds.
TENSORS_MAX = 1024
BYTES_MAX = 32 << 20

#: Of a row of a scanner's table: address, items, order << 32 | format << 24 | point, how it lies and when it is
#: scanned.
ROW_WORDS = 4
_TAG, _LAID_OUT = 2, 3


class Spot:
    """One of a module's tensors, and what was the same of it the last time."""

    __slots__ = ("dtype", "items", "laid_out", "nbytes", "point", "rows", "same_as", "shape", "tag")

    def __init__(self, point: int) -> None:
        self.point = point
        self.shape: Any = None  # of tensors that lie as they are; None: nothing is known yet
        self.dtype: Any = None
        self.items = self.nbytes = self.tag = 0
        self.laid_out = 0  # and when it is scanned
        self.rows: list[int] = []  # of its group
        self.same_as: Optional[Spot] = None  # of which it handed on the tensor


#: Of modules that were never seen.
NEW = Spot(-1)


class Group:
    """What goes into one launch: rows of the table, of tensors that many programs share, and of those that have one."""

    __slots__ = ("form", "narrow", "narrow_shapes", "strided", "wide", "wide_shapes")

    def __init__(self, form: "Format", strided: bool) -> None:
        self.form, self.strided = form, strided
        self.wide: list[int] = []
        self.narrow: list[int] = []
        self.wide_shapes: list[int] = []  # of those that are strided
        self.narrow_shapes: list[int] = []

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.wide or self.narrow)

    def clear(self) -> None:
        """Forget all; the lists stay the same, as spots know them."""
        for each in (self.wide, self.narrow, self.wide_shapes, self.narrow_shapes):
            each.clear()


def _no_stream(_index: int) -> int:
    return 0


class Waiting:
    """What waits. The lists and the dictionary are never replaced."""

    def __init__(self) -> None:
        self.device = -2  # what Tensor.get_device says of those that wait; none yet
        self.stream = 0
        self.stream_of: Callable[[int], int] = _no_stream
        self.order = 0  # of the next scan of the step
        self.inference = False  # whether tensors made now have no version
        self.nbytes = 0
        self.held: list[tuple[Any, Spot, Optional[int], int]] = []  # tensor, spot, version, tag
        self.seen: dict[int, tuple[Any, Spot, Optional[int], int]] = {}  # the same by id
        self.groups: dict[tuple[int, bool], Group] = {}
        self.last: Any = None  # tensor
        self.last_spot: Optional[Spot] = None
        self.last_version: Optional[int] = None

    def is_of(self, device: int) -> bool:
        """Whether a tensor that the current stream of this device makes can wait with the others."""
        return device == self.device and self.stream_of(device) == self.stream

    def turn_to(self, device: int, stream_of: "Optional[Callable[[int], int]]") -> None:
        """Nothing waits; from now on tensors of the current stream of this device do."""
        self.device, self.stream_of = device, stream_of or _no_stream
        self.stream = self.stream_of(device)

    def group(self, form: "Format", strided: bool) -> Group:
        """The one for tensors of this form."""
        key = form.number, strided
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(form, strided)
        return group

    def append(self, spot: Spot, tensor: "Any", version: "Optional[int]", address: int) -> bool:
        """Let a tensor wait of which the spot knows all else. True when it is time for a launch."""
        tag = self.order << 32 | spot.tag
        self.order += 1
        spot.rows += (address, spot.items, tag, spot.laid_out)
        waits = (tensor, spot, version, tag)
        self.seen[id(tensor)] = waits
        self.held.append(waits)
        self.last, self.last_spot, self.last_version = tensor, spot, version
        self.nbytes += spot.nbytes
        return self.nbytes >= BYTES_MAX or len(self.held) >= TENSORS_MAX

    def changed(self, waits: "tuple[Any, Spot, Optional[int], int]") -> None:
        """Note that this one was written to while it waited."""
        tag = waits[3]
        for group in self.groups.values():
            for rows in (group.wide, group.narrow):
                tags = rows[_TAG::ROW_WORDS]
                if tag in tags:
                    at = ROW_WORDS * tags.index(tag) + _LAID_OUT
                    rows[at] = rows[at] & ~records.WHEN | records.CHANGED

    def clear(self) -> None:
        """Hold nothing any more."""
        self.held.clear()
        self.seen.clear()
        self.last = self.last_spot = None
        self.nbytes = 0
        for group in self.groups.values():
            group.clear()


def quick(waiting: Waiting, flush: "Callable[[], None]") -> "Callable[[Spot, tuple[Any, ...], Any], bool]":
    """What lets an output wait if all is as the last time, and says False if not. Faults are the caller's."""
    held, seen = waiting.held, waiting.seen

    def waits(spot: Spot, args: "tuple[Any, ...]", tensor: "Any") -> bool:
        if (
            tensor is waiting.last  # a module hands on what its last one gave
            and spot.same_as is waiting.last_spot
            and (waiting.last_version is None or tensor._version == waiting.last_version)
        ):
            return True
        for each in args:
            if each is tensor:
                return False
        device = waiting.device
        if (
            tensor.shape != spot.shape
            or tensor.get_device() != device
            or waiting.stream_of(device) != waiting.stream
            or tensor.dtype is not spot.dtype
            or not tensor.is_contiguous()
        ):
            return False
        number, address = id(tensor), tensor.data_ptr()
        if address & 15 or number in seen:
            return False
        version = None
        if not waiting.inference:
            try:
                version = tensor._version
            except RuntimeError:  # an inference tensor
                pass
        order = waiting.order
        waiting.order = order + 1
        tag = order << 32 | spot.tag
        spot.rows += (address, spot.items, tag, spot.laid_out)
        seen[number] = each = (tensor, spot, version, tag)
        held.append(each)
        waiting.last, waiting.last_spot, waiting.last_version = tensor, spot, version
        waiting.nbytes = nbytes = waiting.nbytes + spot.nbytes
        if nbytes >= BYTES_MAX or len(held) >= TENSORS_MAX:
            flush()
        return True

    return waits
