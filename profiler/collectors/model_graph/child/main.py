"""The child's work in order; every result is a line of JSON in the file it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .factory import Made, Refused, checked, make, one_line


def main(options: dict[str, Any]) -> int:
    """Read and time one model. 0 when there is a graph, 1 when not; why is in the file."""
    with Path(options["result"]).open("w", encoding="utf-8") as file:

        def tell(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")
            file.flush()

        try:
            return _read(options, tell)
        except Refused as error:
            tell(failed=str(error))
            return 1


def _read(options: dict[str, Any], tell: Any) -> int:
    spec = options["factory"]
    sys.argv[:] = [spec]
    tell(stage=f"calling {spec}")
    found = make(spec)
    tell(stage="importing torch")
    made = checked(spec, found)
    from . import nodes, reading, timing

    tell(stage="reading the graph")
    graph, refused = reading.read(made, options["via"])
    if graph is None:
        raise Refused("; ".join(f"torch.{way} refused: {why}" for way, why in refused.items()))
    with reading.quiet():
        described, remarks = nodes.describe(graph)
    devices = timing.devices(made)
    tell(
        graph={
            "via": graph.via,
            "refused": refused,
            "remarks": [*remarks, *_remarks(made)],
            "model": type(made[0]).__name__,
            "torch": reading.torch_version(),
            "device": str(devices[0]) if devices else "cpu",
            "device_name": _device_name(devices),
            "weights_bytes": nodes.memory_bytes([*made[0].parameters(), *made[0].buffers()]),
            "nodes": nodes.rows(graph, described),
        }
    )
    if not options["runs"]:
        return 0
    tell(stage="timing the nodes")
    why = timing.why_not(devices)
    if why:
        tell(not_timed=why)
        return 0
    try:
        with reading.quiet():
            tell(timing=timing.time_nodes(graph, made, options["runs"]))
    except Exception as error:
        tell(not_timed=f"a run of the graph failed: {one_line(error)}")
    return 0


def _remarks(made: Made) -> list[str]:
    return ["the model is in training mode: call its eval() in the factory"] if made[0].training else []


def _device_name(found: list[Any]) -> str:
    import torch

    gpu = next((device for device in found if device.type == "cuda"), None)
    return str(torch.cuda.get_device_name(gpu)) if gpu is not None else ""
