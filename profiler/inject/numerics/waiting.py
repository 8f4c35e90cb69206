"""Tensors that wait, held, for a common launch: of one stream of one GPU at a time.

This is done for each tensor of each module, and is as little as can be: what all of them are is looked at together when
they are scanned, see batches.py.
"""

from ..interrupts import is_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .places import Spot

#: Tensors that wait for one launch.
TENSORS_MAX = 1024

_NO_STREAM = -1


def _no_stream(_index: int) -> int:
    return 0


class Waiting:
    """What waits. The lists are never replaced."""

    __slots__ = (
        "begin",
        "bytes_max",
        "device",
        "inference",
        "nbytes",
        "spots",
        "stream",
        "stream_of",
        "tensors",
        "versions",
    )

    def __init__(self) -> None:
        self.device = -2  # what Tensor.get_device says of those that wait; none yet
        self.stream = 0
        self.stream_of: Callable[[int], int] = _no_stream
        self.begin = 0  # order of the first
        self.inference = False  # whether tensors made now have no version
        self.nbytes = 0
        self.bytes_max = 0  # kept from being freed, but for what the last one adds
        self.tensors: list[Any] = []
        self.spots: list[Spot] = []
        self.versions: list[Optional[int]] = []  # empty where tensors have none

    @property
    def order(self) -> int:
        """Of the next scan of the step."""
        return self.begin + len(self.tensors)

    def is_of(self, device: int) -> bool:
        """Whether a tensor that the current stream of this device makes can wait with the others."""
        return device == self.device and self.stream_of(device) == self.stream

    def turn_to(self, device: int, stream_of: "Callable[[int], int]", bytes_max: int) -> None:
        """Nothing waits; from now on tensors of the current stream of this device do."""
        self.device, self.stream_of, self.bytes_max = device, stream_of, bytes_max
        self.stream = stream_of(device)

    def turn_away(self) -> None:
        """Of the next tensor the stream is looked at anew, where nothing waits."""
        if not self.tensors:
            self.stream = _NO_STREAM

    def append(self, spot: "Spot", tensor: "Any", version: "Optional[int]") -> bool:
        """Let a tensor wait. True when it is time for a launch."""
        spot.nbytes = tensor.nbytes
        try:
            if not self.inference:
                self.versions.append(version)
            self.tensors.append(tensor)
            self.spots.append(spot)
        except BaseException:  # of a signal handler of the program's
            self.even_out()
            raise
        self.nbytes += spot.nbytes
        return self.nbytes >= self.bytes_max or len(self.tensors) >= TENSORS_MAX

    def even_out(self) -> None:
        """What is not in all lists never came: the next one's place is the same in each."""
        lists: list[list[Any]] = [self.tensors, self.spots, *([] if self.inference else [self.versions])]
        count = min(map(len, lists))
        for each in lists:
            del each[count:]

    def clear(self) -> None:
        """Hold nothing any more."""
        self.begin += len(self.tensors)
        self.nbytes = 0
        self.tensors.clear()
        self.spots.clear()
        self.versions.clear()


def quick(waiting: Waiting, flush: "Callable[[], None]") -> "Callable[[Spot, tuple[Any, ...], Any], bool]":
    """What lets an output wait if it is as large as the last time, and says False if not. ``flush`` raises nothing."""
    tensors, spots, versions = waiting.tensors, waiting.spots, waiting.versions

    def waits(spot: "Spot", args: "tuple[Any, ...]", tensor: "Any") -> bool:
        try:
            for each in args:
                if each is tensor:  # written into, or handed on
                    return False
            nbytes = spot.nbytes
            if tensor.nbytes != nbytes or waiting.stream_of(waiting.device) != waiting.stream:
                return False
            version = None if waiting.inference else tensor._version
            other = spot.same_as
            if (
                other is not None  # a module hands on what its last one gave
                and spots
                and spots[-1] is other
                and tensors[-1] is tensor
                and (version is None or versions[-1] == version)
            ):
                return True
            if version is not None:
                versions.append(version)
            tensors.append(tensor)
            spots.append(spot)
            waiting.nbytes = nbytes = waiting.nbytes + nbytes
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_ours(error):
                return False  # the tensor has no version, or no memory
            waiting.even_out()  # a signal handler of the program's raised it
            raise
        if nbytes >= waiting.bytes_max or len(tensors) >= TENSORS_MAX:
            flush()
        return True

    return waits
