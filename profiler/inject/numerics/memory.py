"""The memory that scans and the agent's thread share: a table of what is to be scanned, a ring of what was found.

Both lie in pinned host memory, which the GPU reads and writes by itself: no copy, no call of CUDA, nothing waits for
anything. Rows of the table that graphs use are theirs for good; the others go round, and come free when the scan has
said so. A ring that is full is written over: the tickets tell how many records were lost.
"""

import ctypes
import sys
from array import array

from .records import RECORD_BYTES, RECORD_WORDS

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Records: a second of decode steps of a 7B model. A power of two.
RING_RECORDS = 32768

#: Rows of scans that are launched directly, and of those in CUDA graphs.
PASSING_ROWS = 8192
LASTING_ROWS = 24576

_ONE = 8  # bytes of a word

#: All of it, for as long as the process lives: CUDA graphs may go on writing into it, and torch's allocator knows
#: nothing of scans under way. What nobody uses any more is used again.
_kept: "list[Memory]" = []


class Memory:
    """Of one GPU. ``table_words``, ``shape_words`` and ``scratch_words`` are those of a row; see scan_triton.py."""

    def __init__(self, torch: "Any", device: "Any", table_words: int, shape_words: int, scratch_words: int) -> None:
        rows = PASSING_ROWS + LASTING_ROWS
        pinned = device.type == "cuda"

        with torch.inference_mode(False), torch.no_grad():
            self.table, self.shapes = words_for(device, rows, table_words), words_for(device, rows, shape_words)
            self.finished, self.ring = words_for(device, rows), words_for(device, RING_RECORDS, RECORD_WORDS)
            # Step and tickets so far, programs that are done, the last bad step: no step has begun.
            self.state = torch.tensor([-1, 0, 0, 0], dtype=torch.int64, device=device)
            self.scratch = torch.zeros(rows, scratch_words, dtype=torch.int64, device=device)
            self.scratch[:, 0] = -1
            self.scratch[:, 1] = self.scratch[:, 7] = (1 << 63) - 1
        if pinned:
            torch.cuda.synchronize(device)  # other streams will use it, too
        self._table_words, self._shape_words = table_words, shape_words
        self._table, self._shapes, self._finished, self._ring = map(
            words_of, (self.table, self.shapes, self.finished, self.ring)
        )
        self._finished[:] = array("q", [1]) * rows
        self._busy = array("q", [0]) * rows
        self._passing, self._lasting = 0, PASSING_ROWS
        self.written = 0  # tickets that the file has, or that are lost
        self._settled = 0  # tickets that were there at the last look
        self.device = device
        self.idle = False  # whether its scanner has gone
        if pinned:
            _kept.append(self)

    def take_over(self) -> bool:
        """Whether another scanner may have it from now on: not where graphs use it, or scans are under way."""
        if not self.idle or self._lasting > PASSING_ROWS or 0 in self._finished[:PASSING_ROWS].tolist():
            return False
        self.idle = False
        self.written = self._settled = self._newest(max(self.written, self._settled))
        return True

    def begin_anew(self) -> None:
        """No step has begun, and tickets start at 0: what was found so far is nobody's. No scan may be under way."""
        self.state[0], self.state[1], self.state[3] = -1, 0, 0
        self._ring[:] = array("q", bytes(RING_RECORDS * RECORD_BYTES))
        self.written = self._settled = 0

    def reserve(self, count: int, lasting: bool) -> int:
        """The first of ``count`` rows in a row; -1 where none are free."""
        if lasting:
            row = self._lasting
            if row + count > PASSING_ROWS + LASTING_ROWS:
                return -1
            self._lasting += count
            return row
        row = self._passing if self._passing + count <= PASSING_ROWS else 0
        if 0 in self._finished[row : row + count].tolist():
            return -1
        self._passing = row + count
        self._finished[row : row + count] = self._busy[:count]
        return row

    def fill(self, row: int, words: "array[int]", shapes: "array[int]") -> None:
        """Write rows of the table from ``row`` on, and their shapes, where they have some."""
        begin = row * self._table_words
        self._table[begin : begin + len(words)] = words
        if shapes:
            begin = row * self._shape_words
            self._shapes[begin : begin + len(shapes)] = shapes

    def drain(self, take: "Callable[[memoryview], object]", all_of_it: bool = False) -> None:
        """Hand over new records in one or two pieces: those that were there at the last look already, or all."""
        first = self._ring[self.written % RING_RECORDS * RECORD_WORDS] - 1
        if first > self.written:  # lapped; leave some room, as it goes on
            self.written = self._newest(first) - RING_RECORDS + RING_RECORDS // 8
            self._settled = max(self._settled, self.written)
        newest = self._newest(max(self.written, self._settled))
        until = newest if all_of_it else self._settled
        self._settled = newest
        while self.written < until:
            begin = self.written % RING_RECORDS
            count = min(until - self.written, RING_RECORDS - begin)
            take(self._ring[begin * RECORD_WORDS : (begin + count) * RECORD_WORDS].cast("B"))
            self.written += count

    def _newest(self, known: int) -> int:
        """How many tickets were given out, as the ring tells: doubling, then halving."""

        def there(ticket: int) -> bool:
            return self._ring[ticket % RING_RECORDS * RECORD_WORDS] > ticket

        if not there(known):
            return known
        step = 1
        while step < RING_RECORDS and there(known + step):
            step *= 2
        low, high = step // 2, min(step, RING_RECORDS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if there(known + middle) else (low, middle)
        return known + low + 1

    def settle(self, patience_ms: int) -> None:
        """Wait for scans that are under way, a little: the program is about to end."""
        pause = ctypes.CDLL(None).usleep  # time.sleep may be the program's own
        for _ in range(patience_ms):
            if 0 not in self._finished[:PASSING_ROWS].tolist():
                return
            pause(1000)

    @property
    def nbytes(self) -> int:
        """Host memory, pinned."""
        return sum(each.numel() * _ONE for each in (self.table, self.shapes, self.finished, self.ring))


def memory_for(torch: "Any", device: "Any", table_words: int, shape_words: int, scratch_words: int) -> "Memory":
    """Memory that another scanner of this GPU has left, or new."""
    for each in _kept:
        if each.device == device and each.take_over():
            return each
    return Memory(torch, device, table_words, shape_words, scratch_words)


def words_for(device: "Any", *sizes: int) -> "Any":
    """A tensor of zeros, int64, on the host, which this device reads and writes by itself."""
    torch = sys.modules["torch"]
    return torch.zeros(*sizes, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def words_of(tensor: "Any") -> memoryview:
    """The memory of a tensor of int64 on the host."""
    count = tensor.numel()
    return memoryview((ctypes.c_int64 * count).from_address(tensor.data_ptr())).cast("B").cast("q")


assert RING_RECORDS * RECORD_BYTES <= 8 << 20
