"""The record that a scan writes: sixteen 64-bit words, and what the file of them looks like.

Words: ticket + 1, step, order << 32 | point, nanoseconds, elements, then the statistics in the order of ``STATISTICS``,
and last the exclusive or of all others with ``SEAL``: a record that was read while it was written is known by it.
"""

import struct

RECORD_WORDS = 16
RECORD_BYTES = 8 * RECORD_WORDS
(TICKET, STEP, TAG, TIME, ELEMENTS) = range(5)

#: Magnitudes are bits, see formats.py. Of no finite value, of none that is not zero, of no bad element: -1.
STATISTICS = ("amax", "smallest", "nan", "inf", "subnormal", "zero", "saturated", "first_bad")
FIRST_STATISTIC = 5
SCANNED_AS = 13  # AT_ONCE … CHANGED
SEALED = 15
SEAL = 0x5349_5A4E

#: When a tensor was scanned: as soon as its module ended, a little later, or later and after it had been written again.
AT_ONCE, LATER, CHANGED = range(3)

#: The file: frames of a header and whole records of one device (-1 = the CPU).
FRAME_MAGIC = 0x314D554E4B495053  # "SPIKNUM1" little endian
FRAME_HEADER = struct.Struct("<QQqq")  # magic, payload bytes, unix ns, device
SUFFIX = ".num"

_WORDS = struct.Struct("<%dq" % RECORD_WORDS)


def pack(ticket: int, step: int, tag: int, when_ns: int, elements: int, statistics: "list[int]", scanned: int) -> bytes:
    """One record, as the kernel writes it."""
    words = [ticket + 1, step, tag, when_ns, elements, *statistics, scanned, 0]
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
