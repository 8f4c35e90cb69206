"""What is in the pages of a quantised KV cache: the codes of every token that a step writes, with their scales.

    python examples/watch_pages.py --kv-cache int4
    spikeprof run --numerics -- python examples/watch_pages.py

The engine of ``spikeprof.kernels`` generates for two prompts with random weights. Modules give no pages, so the program
hands them to ``watched.look`` itself: here after each ``append``, the new tokens of a layer's keys and values. A cache
looked at as a whole would show what its empty pages hold, too.

Standard output gets one line: how many tensors were looked at, and the largest number that any of their codes can stand
for; under ``spikeprof run`` that the numbers are in the trace.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import spikeprof
from spikeprof.kernels.cache import Quantised
from spikeprof.kernels.engine import Engine
from spikeprof.profiler.watching import Watch

PROMPTS = [[1, 2, 3, 4] * 8, [5, 6, 7]]


def look_at_pages(cache: Any, watched: Watch) -> None:
    """Look at what each ``append`` to a paged cache writes, on the device: [tokens, kv_heads, head_dim]."""
    append = cache.append

    def append_and_look(layer: int, plan: Any, keys: Any, values: Any, **options: Any) -> Any:
        path = append(layer, plan, keys, values, **options)
        pages = cache.pages(layer, plan)
        page, offset = plan.slots // pages.page_size, plan.slots % pages.page_size
        for name, stored in (("keys", pages.keys), ("values", pages.values)):
            if isinstance(stored, Quantised):
                codes, scale, zero = (part[page, :, offset] for part in (stored.values, stored.scale, stored.zero))
                packed = "int4" if stored.bits == 4 else ""
                watched.look(f"layers.{layer}.{name}", codes, dtype=packed, scale=scale, zero_point=zero)
            else:
                watched.look(f"layers.{layer}.{name}", stored[page, :, offset])
        return path

    cache.append = append_and_look


def main(arguments: list[str] | None = None) -> int:
    """Generate, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-cache", choices=("fp16", "int8", "int4"), default="int8", help="how it is stored (int8)")
    parser.add_argument("--tokens", type=int, default=8, help="to generate for each prompt (8)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    options = parser.parse_args(arguments)
    engine = Engine(
        "tiny", kv_cache=options.kv_cache, max_seq_len=32 + options.tokens, max_batch=2, device=options.device
    )
    with spikeprof.watch(engine.runner.decoder.network) as watched:
        look_at_pages(engine.runner.cache, watched)
        engine.generate(PROMPTS, options.tokens)
        looked_at = [row for row in watched.stats() if row["role"] == "kv"]
    if not looked_at:
        print("the numbers are in the trace")
        return 0
    most = max(looked_at, key=lambda row: row["real_amax_value"] or row["amax_value"] or 0)
    largest = most["real_amax_value"] or most["amax_value"]
    print(f"{len(looked_at)} tensors of {most['dtype']}, the largest number at most {largest:.3g} in {most['module']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
