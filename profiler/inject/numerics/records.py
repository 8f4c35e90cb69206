"""The record that a scan writes: sixteen 64-bit words, and what the file of them looks like.

Words: ticket + 1, step, tag (``tag_of``), nanoseconds, elements, then the statistics in the order of ``STATISTICS``,
how the tensor lay and when it was scanned (``form_of``), and last the exclusive or of all others with ``SEAL``: a
record that was read while it was written is known by it.

A row is what lies at one index of the leading dimension, of tensors with two dimensions and more. ``bad_rows`` has a
bit for each row with NaN or Inf: bit r for row r, of more than 64 rows bit r * 64 // rows.
"""

import struct

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

RECORD_WORDS = 16
RECORD_BYTES = 8 * RECORD_WORDS
(TICKET, STEP, TAG, TIME, ELEMENTS) = range(5)

#: Magnitudes are bits, see formats.py. Of no finite value, of none that is not zero, of no bad element: -1.
STATISTICS = ("amax", "smallest", "nan", "inf", "subnormal", "zero", "saturated", "first_bad", "bad_rows")
FIRST_STATISTIC = 5
LAID_OUT = 14  # when it was scanned, dimensions << 2, items of a row << 8; 0 items: rows are not told apart
SEALED = 15
SEAL = 0x5349_5A4E

#: When a tensor was scanned: as soon as its module ended, a little later, or later and after it had been written again.
AT_ONCE, LATER, CHANGED = range(3)
WHEN = 3  # these bits of the word
SCANNED = ("at_once", "later", "changed")  # their names in ``tensor_stats``

POINTS_MAX = (1 << 24) - 1

ROWS_MAX = 64  # with a bit of their own
DIMENSIONS_SHIFT, ROW_SHIFT = 2, 8
_DIMENSIONS_MAX = (1 << (ROW_SHIFT - DIMENSIONS_SHIFT)) - 1

#: The file: frames of a header and whole records of one device (-1 = the CPU).
FRAME_MAGIC = 0x324D554E4B495053  # "SPIKNUM2" little endian
FRAME_HEADER = struct.Struct("<QQqq")  # magic, payload bytes, unix ns, device
SUFFIX = ".num"

_WORDS = struct.Struct("<%dq" % RECORD_WORDS)


def tag_of(order: int, form: int, point: int) -> int:
    """Which scan of its step it is, of which format (by number), and of what: the word ``TAG``."""
    return order << 32 | form << 24 | point


def order_of(tag: "Any") -> "Any":
    """Which scan of its step it is, from the word ``TAG``; also of many, as the next two."""
    return tag >> 32


def format_of(tag: "Any") -> "Any":
    """The number of the format."""
    return tag >> 24 & 0xFF


def point_of(tag: "Any") -> "Any":
    """What was scanned."""
    return tag & POINTS_MAX


def form_of(tensor: "Any", items: int) -> int:
    """How a tensor of so many items lies, without when it is scanned: the word ``LAID_OUT``."""
    dimensions = tensor.dim()
    if dimensions < 2 or not items:
        return int(min(dimensions, _DIMENSIONS_MAX) << DIMENSIONS_SHIFT)
    return int(items // tensor.size(0) << ROW_SHIFT | min(dimensions, _DIMENSIONS_MAX) << DIMENSIONS_SHIFT)


def dimensions_of(laid_out: "Any") -> "Any":
    """Dimensions of a tensor, or of many, from the word ``LAID_OUT``."""
    return laid_out >> DIMENSIONS_SHIFT & _DIMENSIONS_MAX


def rows_of(items: int, laid_out: int) -> int:
    """Rows of a tensor of so many items; 0 where they are not told apart."""
    row = laid_out >> ROW_SHIFT
    return items // row if row else 0


def pack(
    ticket: int, step: int, tag: int, when_ns: int, elements: int, statistics: "list[int]", laid_out: int
) -> bytes:
    """One record, as the kernel writes it."""
    words = [ticket + 1, step, tag, when_ns, elements, *statistics, laid_out]
    seal = SEAL
    for word in words:
        seal ^= word
    return _WORDS.pack(*words, seal)


def is_whole(words: "tuple[int, ...]") -> bool:
    """Whether the words of a record belong together."""
    seal = SEAL
    for word in words:
        seal ^= word
    return seal == 0 and words[TICKET] > 0
