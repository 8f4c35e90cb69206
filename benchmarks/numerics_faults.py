"""Ten numerical faults, put into one small FP16 model: who finds which, and what looking costs.

    python benchmarks/numerics_faults.py [--device cpu] [--json]

Held against each other: ``spikeprof.watch`` with the analyzer ``overflow``; Hugging Face's ``DebugUnderflowOverflow``
(transformers' debug hooks; left out where transformers is not installed); ``torch.autograd.detect_anomaly`` around
forward and backward. *Found* means that it says so and names the right module, *seen* that it only says so. Times are
medians of steps of the sound model, in turns with the step that nobody watches.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import spikeprof
from spikeprof.analyzers.overflow import Overflow
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import Manifest, Trace

LAYERS, HIDDEN, TOKENS, STEPS = 6, 128, 32, 22
ROUNDS = 9

#: Tokens and hidden size of the model that is timed.
TIMED = {"cuda": (512, 1024), "cpu": (64, 256)}

Change = Callable[[Tensor, int], Tensor]


class Spot(nn.Module):
    """Hands on what it gets, or what ``change`` makes of it in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Change | None = None
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        self.step += 1
        return x if self.change is None else self.change(x, self.step - 1)


class Layer(nn.Module):
    """A norm, a feed-forward network, a place for a fault, INT8 codes of the result beside the stream."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.spot, self.codes = Spot(), Spot()
        self.codes.change = lambda x, _: quantised(x, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        x = x + self.spot(self.down(torch.relu(self.up(self.norm(x)))))
        self.codes(x.detach())
        return x


def quantised(x: Tensor, scale: float) -> Tensor:
    """Symmetric INT8 codes."""
    return torch.clamp(torch.round(x.float() / scale), -128, 127).to(torch.int8)


def model_on(device: str, hidden: int = HIDDEN) -> nn.Sequential:
    """A sound model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(hidden) for _ in range(LAYERS))).to(device, torch.float16)


def put(value: float, at: int, first_step: int = 0) -> Change:
    """A change of one element from a step on."""

    def change(x: Tensor, step: int) -> Tensor:
        if step < first_step:
            return x
        flat = x.flatten().clone()
        flat[at] = value
        return flat.view_as(x)

    return change


def _large_weight(model: Any) -> None:
    model[3].down.weight.data.fill_(6e4)


def _bad_weight(model: Any) -> None:
    model[3].up.weight.data[5, 7] = math.nan


def _spot(layer: int, change: Change) -> Callable[[Any], None]:
    return lambda model: setattr(model[layer].spot, "change", change)


def _codes(model: Any) -> None:
    model[5].codes.change = lambda x, _: quantised(x, 0.002)


#: name -> (what makes it, the module that is to be named)
FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "weights too large: Inf": (_large_weight, "3.down"),
    "0 / 0 in a module": (_spot(2, lambda x, _: (x - x) / (x - x).norm()), "2.spot"),
    "one NaN among 4,096 elements": (_spot(4, put(math.nan, 1_234)), "4.spot"),
    "Inf in the last element": (_spot(1, put(math.inf, -1)), "1.spot"),
    "NaN in a weight": (_bad_weight, "3.up"),
    "NaN from the twentieth step on": (_spot(2, put(math.nan, 3, 20)), "2.spot"),
    "amax 61,000, all finite": (_spot(4, put(61_000.0, 11)), "4.spot"),
    "INT8 codes cut off": (_codes, "5.codes"),
    "squares that become subnormal and zero": (_spot(2, lambda x, _: (x * 1e-3) ** 2), "2.spot"),
    "NaN in a gradient, none in forward": (_spot(4, lambda x, _: x * (x * 0).abs().sqrt() + x), "4.spot"),
}


def by_spikeprof(model: Any, x: Tensor) -> list[str]:
    """The modules that findings name."""
    with spikeprof.watch(model, roles=("output", "gradient")) as watched:
        for _ in range(STEPS):
            model(x).float().sum().backward()
        return [finding.scope["module"] for finding in findings(watched.stats())]


def findings(rows: list[dict[str, Any]]) -> Any:
    """What the analyzer says of scans."""
    import pyarrow as pa

    spec = TABLES["tensor_stats"].arrow
    columns = {name: [{"rank": 0}.get(name, row.get(name)) for row in rows] for name in spec.names}
    for name in ("amax_value", "smallest_value", "real_amax_value"):
        columns[name] = [math.nan if value is None else value for value in columns[name]]
    arrays = [
        pa.array(columns[field.name], pa.string()).dictionary_encode()
        if pa.types.is_dictionary(field.type)
        else pa.array(columns[field.name], field.type)
        for field in spec
    ]
    trace = Trace(Manifest("spikeprof", 0, 0), {"tensor_stats": pa.table(arrays, schema=spec)})
    return run_one(trace, Overflow()).findings


def by_transformers(model: Any, x: Tensor) -> list[str]:
    """The module of the last frame that it prints."""
    from transformers.debug_utils import DebugUnderflowOverflow

    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.inference_mode():
        DebugUnderflowOverflow(model)
        try:
            for _ in range(STEPS):
                model(x)
        except ValueError:
            heads = [line.split() for line in said.getvalue().splitlines() if line.startswith(" " * 18)]
            return [heads[-1][0]] if heads else [""]
    return []


def by_anomaly(model: Any, x: Tensor) -> list[str]:
    """It names functions of autograd and a line, not modules."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                for _ in range(STEPS):
                    model(x).float().sum().backward()
    except RuntimeError:
        return [""]
    return []


TOOLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "spikeprof": by_spikeprof,
    "transformers": by_transformers,
    "detect_anomaly": by_anomaly,
}


def verdict(named: list[str], wanted: str) -> str:
    """``found``, ``seen`` (another module, or none, is named) or ``no``."""
    return "found" if wanted in named else "seen" if named else "no"


def costs(device: str, tools: list[str]) -> dict[str, float]:
    """Step with the tool over step without, medians of alternating blocks."""
    tokens, hidden = TIMED[device]
    x = torch.randn(tokens, hidden, device=device).half()
    found = {}
    for tool in tools:
        plain, watched = model_on(device, hidden), model_on(device, hidden)
        steps = [_step(plain, x, tool == "detect_anomaly", False), _step(watched, x, tool == "detect_anomaly", True)]
        if tool == "spikeprof":
            handle = spikeprof.watch(watched)
        elif tool == "transformers":
            from transformers.debug_utils import DebugUnderflowOverflow

            with contextlib.redirect_stdout(io.StringIO()):
                DebugUnderflowOverflow(watched)
        ratios = []
        for _ in range(ROUNDS):
            times = [_seconds(step, device) for step in steps]
            ratios.append(times[1] / times[0])
            if tool == "spikeprof":
                handle.collect()
        found[tool] = statistics.median(ratios[2:])
    return found


def _step(model: Any, x: Tensor, backward: bool, anomaly: bool) -> Callable[[], None]:
    def inference() -> None:
        with torch.inference_mode():
            model(x)

    def training() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(anomaly):
                model(x).float().sum().backward()

    return training if backward else inference


def _seconds(step: Callable[[], None], device: str, count: int = 5) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def main() -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-cost", action="store_true", help="time nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)  # small products in FP16: threads would wait for one another
    tools = list(TOOLS)
    try:
        import transformers  # noqa: F401
    except ImportError:
        tools.remove("transformers")
        print("transformers is not installed: its hooks are left out", file=sys.stderr)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).half().to(options.device)
    found: dict[str, dict[str, str]] = {}
    for name, (put_in, wanted) in FAULTS.items():
        found[name] = {}
        for tool in tools:
            model = model_on(options.device)
            put_in(model)
            found[name][tool] = verdict(TOOLS[tool](model, x), wanted)
    sound = {tool: TOOLS[tool](model_on(options.device), x) for tool in tools}
    report = {
        "device": options.device,
        "found": found,
        "sound_model": sound,
        "cost_ratio": {} if options.no_cost else costs(options.device, tools),
    }
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"{'fault':<40}" + "".join(f"{tool:>16}" for tool in tools))
    for name, row in found.items():
        print(f"{name:<40}" + "".join(f"{row[tool]:>16}" for tool in tools))
    print(f"{'a sound model: alarms':<40}" + "".join(f"{len(sound[tool]):>16}" for tool in tools))
    if report["cost_ratio"]:
        print(
            f"{'step with it, of one without':<40}" + "".join(f"{report['cost_ratio'][tool]:>15.2f}x" for tool in tools)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
