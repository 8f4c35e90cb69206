"""Theoretical rates of NVLink and PCIe in one direction, each with the source that it rests on.

*Payload* of NVLink is what data sheets state: the rate of all links of a GPU in both directions, divided by twice
their number. The *line* rate, which the driver states per link, is what the wires carry, error correction included:
26.5625 GB/s for the 25 GB/s of NVLink 4. PCIe is lanes × transfers per second × the efficiency of the line code;
packet headers take more of it, so that no copy reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second in one direction, None when unknown; ``source`` says where from, or why not."""

    bytes_per_s: float | None
    source: str


#: NVML_NVLINK_VERSION_* of nvml.h: NVML numbers minor versions, too, so that its 6 is NVLink 4.
_GENERATION_OF_NVML = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}

#: Generation -> (payload of one link in one direction, the data sheet that it follows from).
_NVLINK = {
    1: (20e9, "P100 data sheet: 160 GB/s both ways over 4 links"),
    2: (25e9, "V100 data sheet: 300 GB/s both ways over 6 links"),
    3: (25e9, "A100 data sheet: 600 GB/s both ways over 12 links"),
    4: (25e9, "H100 data sheet: 900 GB/s both ways over 18 links"),
    5: (50e9, "B200 data sheet: 1800 GB/s both ways over 18 links"),
}
#: How far a stated line rate may lie from the payload: codes add up to 6.25 %; below it the links run slower.
_LINE_OVER_PAYLOAD = (0.97, 1.07)

#: Generation -> (transfers per second and lane, bits of data, in bits on the line): PCI Express base specification.
_PCIE = {
    1: (2.5e9, 8, 10),
    2: (5e9, 8, 10),
    3: (8e9, 128, 130),
    4: (16e9, 128, 130),
    5: (32e9, 128, 130),
    6: (64e9, 242, 256),
}


def nvlink_generation(nvml_version: int) -> int:
    """The generation behind what ``nvmlDeviceGetNvLinkVersion`` answers; 0 = unknown."""
    return _GENERATION_OF_NVML.get(nvml_version, 0)


def nvlink_rate(generation: int, links_count: int, line_bytes_per_s: float | None) -> Rate:
    """Payload of so many NVLinks together; ``line_bytes_per_s`` is what the driver states of one link, if it does.

    A GPU whose links run slower than its generation's data-centre parts (GA102: 14 GB/s) gets the driver's number.
    """
    payload, sheet = _NVLINK.get(generation, (None, ""))
    line = f"NVML states {line_bytes_per_s / 1e9:.6g} GB/s on the line" if line_bytes_per_s else ""
    usual = payload and (
        line_bytes_per_s is None
        or _LINE_OVER_PAYLOAD[0] * payload <= line_bytes_per_s <= _LINE_OVER_PAYLOAD[1] * payload
    )
    if payload and usual:
        notes = "; ".join(part for part in (sheet, line) if part)
        return Rate(links_count * payload, f"{links_count} x {payload / 1e9:g} GB/s of payload a link ({notes})")
    if line_bytes_per_s:
        return Rate(links_count * line_bytes_per_s, f"{links_count} x the rate of a link ({line})")
    return Rate(None, "the driver tells neither the generation nor the speed of the NVLinks")


def pcie_rate(generation: int, lanes_count: int | None) -> Rate:
    """What PCIe of this generation and width carries in one direction after the line code."""
    if generation not in _PCIE or not lanes_count:
        return Rate(None, "the driver does not tell the generation and width of PCIe")
    transfers, data, line = _PCIE[generation]
    source = f"PCIe {generation} x{lanes_count}: {lanes_count} lanes x {transfers / 1e9:g} GT/s x {data}/{line}"
    return Rate(lanes_count * transfers / 8 * data / line, f"{source} (PCIe base specification)")
