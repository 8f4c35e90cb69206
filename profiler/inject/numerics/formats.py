"""Number formats as a scan sees them: magnitudes are integers, compared with a few limits of the format.

Of a floating-point number without its sign the bits grow with the value, so that the largest, the smallest and every
class of values follow from integer comparisons: exactly, in any order, the same on every device.

Limits: IEEE 754 for float16, float32 and float64, bfloat16 as float32 cut to 16 bits; float8_e4m3fn (largest 448, no
infinity, one NaN) and float8_e5m2 (largest 57344) as in "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

import struct

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Optional

#: How elements become magnitudes.
FLOAT, SIGNED, UNSIGNED, NIBBLES = range(4)

#: Of a magnitude that no element can have: nothing is special, nothing infinite.
_NEVER = 1 << 30


class Format:
    """One format. Magnitudes from ``special`` on are NaN, but ``infinity``; from ``largest`` on they are saturated.

    Those below ``normal`` are subnormal, or zero. Of codes (integers) the end codes count as saturated: of signed ones
    ±127 and -128, of unsigned ones 0 and the largest. ``item_bytes`` are those of what is loaded; a byte of NIBBLES
    holds two elements, the lower half first.
    """

    __slots__ = (
        "exponent_bits", "infinity", "item_bytes", "kind", "largest", "mantissa_bits", "name", "normal", "number",
        "special",
    )  # fmt: skip

    def __init__(
        self, number: int, name: str, kind: int, item_bytes: int, limits: "tuple[int, int, int, int]",
        exponent_bits: int = 0, mantissa_bits: int = 0,
    ) -> None:  # fmt: skip
        self.number, self.name, self.kind, self.item_bytes = number, name, kind, item_bytes
        self.special, self.infinity, self.largest, self.normal = limits
        self.exponent_bits, self.mantissa_bits = exponent_bits, mantissa_bits

    @property
    def sign_mask(self) -> int:
        """What takes the sign off the bits of a float."""
        return (1 << (8 * self.item_bytes - 1)) - 1

    @property
    def limit(self) -> float:
        """The largest finite value, or code."""
        return self.value(self.largest) or 0.0

    def value(self, magnitude: int) -> "Optional[float]":
        """The value of a magnitude; None for a negative one, which stands for none."""
        if magnitude < 0:
            return None
        if self.kind != FLOAT:
            return float(magnitude)
        if self.item_bytes == 8:
            return float(struct.unpack("<d", struct.pack("<q", magnitude))[0])
        exponent, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        if exponent == 0:
            return float(fraction * 2.0 ** (1 - bias - self.mantissa_bits))
        return float((1 + fraction / 2**self.mantissa_bits) * 2.0 ** (exponent - bias))


def _ieee(number: int, name: str, item_bytes: int, exponent_bits: int) -> Format:
    mantissa_bits = 8 * item_bytes - 1 - exponent_bits
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    limits = (infinity, infinity, infinity - 1, 1 << mantissa_bits)
    return Format(number, name, FLOAT, item_bytes, limits, exponent_bits, mantissa_bits)


_ALL = (
    _ieee(0, "float16", 2, 5),
    _ieee(1, "bfloat16", 2, 8),
    _ieee(2, "float32", 4, 8),
    _ieee(3, "float64", 8, 11),
    Format(4, "float8_e4m3fn", FLOAT, 1, (0x7F, _NEVER, 0x7E, 0x08), 4, 3),
    _ieee(5, "float8_e5m2", 1, 5),
    Format(6, "int8", SIGNED, 1, (_NEVER, _NEVER, 127, 1)),
    Format(7, "uint8", UNSIGNED, 1, (_NEVER, _NEVER, 255, 1)),
    Format(8, "int4", NIBBLES, 1, (_NEVER, _NEVER, 15, 1)),
)

#: By name: torch's for dtypes, and "int4" for two codes in a byte.
FORMATS = {each.name: each for each in _ALL}

BY_NUMBER = {each.number: each for each in _ALL}
