"""The table of published claims: each row is measured where it can be, and says why not otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from spikeprof.kernels.bench import ratios_cache, ratios_decoder, ratios_kernels, ratios_pipe, ratios_serving
from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting

_BY_NAME = {
    ratio.name: ratio
    for module in (ratios_kernels, ratios_cache, ratios_decoder, ratios_pipe, ratios_serving)
    for ratio in module.RATIOS
}
_ORDER = (
    "gelu-dropout", "layout", "paged-cache", "kv-precision", "attention-memory", "decoder-fusion", "request-pipe",
    "padding", "bank-conflicts", "dynamic-batching",
)  # fmt: skip
RATIOS: dict[str, Ratio] = {name: _BY_NAME[name] for name in _ORDER}


def ratios(names: Sequence[str] = ()) -> list[Ratio]:
    """Rows whose name begins with one of ``names``; without names all. Raises ValueError for a name of no row."""
    for name in names:
        if not any(known.startswith(name) for known in RATIOS):
            raise ValueError(f"name is {name!r}: with --ratios it can be {', '.join(RATIOS)}")
    return [ratio for name, ratio in RATIOS.items() if not names or name.startswith(tuple(names))]


def measured(chosen: Sequence[Ratio], setting: Setting) -> Iterator[tuple[Ratio, Ours, bool]]:
    """Each row, what was measured, and whether trying it failed; after a failure the others still run."""
    for ratio in chosen:
        try:
            yield ratio, ratio.measure(setting), False
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            yield ratio, Ours("", "", reason=f"{type(error).__name__}: {first_line}"), True
        finally:
            if setting.is_gpu:
                torch.cuda.empty_cache()


def ratios_table(rows: Sequence[tuple[Ratio, Ours, bool]]) -> Table:
    """Claim, ours, how measured."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=6)
    table.add_column(width=73, overflow="fold")
    for ratio, ours, failed in rows:
        reason = f"{'FAILED' if failed else 'not measured'}: {ours.reason}"
        table.add_row("", Text(ratio.experiment, style="bold"))
        for name, text in (("claim", ratio.claim), ("here", ours.text or reason), ("how", ours.how)):
            if text:
                table.add_row(name, text)
        table.add_row("", "")
    return table


def ratios_json(rows: Sequence[tuple[Ratio, Ours, bool]]) -> list[dict[str, Any]]:
    """The rows and their figures."""
    return [
        {
            "name": ratio.name,
            "experiment": ratio.experiment,
            "claim": ratio.claim,
            "ours": ours.text or None,
            "how": ours.how or None,
            "not_measured": ours.reason or None,
            "failed": failed,
            "figures": dict(ours.figures),
        }
        for ratio, ours, failed in rows
    ]
