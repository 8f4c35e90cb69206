"""A small causal language model with random weights: prefill, then decode.

    python examples/infer.py --batch 8 --mode eager
    spikeprof run -- python examples/infer.py --batch 8 --mode graph
    python examples/infer.py --preset tiny --device cpu

Nothing is downloaded. The model is Llama's architecture: from Hugging Face
transformers when that is installed (eager mode), else the engine of
``spikeprof.kernels``. In graph mode one decode step is captured as a CUDA graph
and replayed.

Standard output gets two lines: a checksum of the generated token ids, and
tokens/s, TTFT and the median ITL.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from spikeprof.kernels.arguments import device_named
from spikeprof.kernels.cache import KINDS
from spikeprof.kernels.engine import PRESETS, Engine, ModelConfig

HEAD_DIM = 64
GROUP = 4  # query heads per key-value head
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Tokens = Iterator[list[int]]  # one for each sequence, step by step


class EngineModel:
    """The reference engine: fused kernels, paged KV cache, optionally a CUDA graph of the decode step."""

    def __init__(self, options: argparse.Namespace, config: ModelConfig) -> None:
        self.engine = Engine(
            config,
            kv_cache=options.kv_cache,
            weights=options.weights,
            max_seq_len=options.prompt + options.tokens,
            max_batch=options.batch,
            device=options.device,
            cuda_graph=options.mode == "graph",
            fused=not options.separate,
        )

    def steps(self, prompts: list[list[int]], tokens: int) -> Tokens:
        """Tokens of all sequences, as soon as each has its next one on the host."""
        made: list[list[int]] = [[] for _ in prompts]
        sent = 0
        for one in self.engine.stream(prompts, tokens):
            made[one.prompt].append(one.token)
            if min(map(len, made)) > sent:
                yield [sequence[sent] for sequence in made]
                sent += 1


class TransformersModel:
    """Hugging Face's Llama with the same sizes and random weights."""

    def __init__(self, options: argparse.Namespace, config: ModelConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            tie_word_embeddings=config.tied,
            max_position_embeddings=options.prompt + options.tokens,
        )
        torch.manual_seed(0)
        self.device = options.device
        self.model = LlamaForCausalLM(sizes).to(device=options.device, dtype=DTYPES[options.weights]).eval()
        # The argument and the attribute have the same name; it became "cache" in transformers 5.
        self.name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def steps(self, prompts: list[list[int]], tokens: int) -> Tokens:
        """Tokens of all sequences, brought to the host before the next step, as a server that streams does."""
        ids, cache = torch.tensor(prompts, device=self.device), None
        for _ in range(tokens):
            out = self.model(input_ids=ids, use_cache=True, **{self.name: cache})
            cache = getattr(out, self.name)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            yield ids[:, 0].tolist()


def generate(
    model: EngineModel | TransformersModel, prompts: list[list[int]], tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Tokens step by step, and the seconds from the start at which each step's were there."""
    start = time.perf_counter()
    steps, times = [], []
    for step in model.steps(prompts, tokens):
        steps.append(step)
        times.append(time.perf_counter() - start)
    return steps, times


def sizes(options: argparse.Namespace) -> ModelConfig:
    """The preset, with layers and hidden size replaced where they are given."""
    config = PRESETS[options.preset]
    if options.layers:
        config = replace(config, layers=options.layers)
    if options.hidden:
        heads = options.hidden // HEAD_DIM
        config = replace(
            config,
            hidden=options.hidden,
            heads=heads,
            kv_heads=heads // GROUP,
            head_dim=HEAD_DIM,
            intermediate=options.hidden * 8 // 3 // 64 * 64,
        )
    return config


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program with code 2 for values that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt (128)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each (64)")
    parser.add_argument("--preset", choices=PRESETS, default="240m", help="sizes of the model (240m)")
    parser.add_argument("--layers", type=int, help="layers, instead of the preset's")
    parser.add_argument("--hidden", type=int, help=f"hidden size, a multiple of {HEAD_DIM * GROUP}, likewise")
    parser.add_argument("--mode", choices=("eager", "graph"), default="eager", help="of decode (eager)")
    parser.add_argument("--impl", choices=("auto", "transformers", "engine"), default="auto", help="which decoder")
    parser.add_argument("--separate", action="store_true", help="separate torch operators, not the engine's fused ones")
    parser.add_argument(
        "--kv-cache", choices=KINDS, default="fp16", metavar="KIND",
        help=f"of the engine: {', '.join(KINDS)} (fp16: pages, in the weights' dtype)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--weights", choices=("auto", *DTYPES, "int8"), default="auto", help="fp16 on a GPU, else fp32")
    parser.add_argument("--repeat", type=int, default=1, help="generations to time, after one that is not (1)")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args(arguments)
    for name in ("batch", "prompt", "tokens", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.layers is not None and options.layers < 1:
        parser.error("--layers must be at least 1")
    if options.hidden is not None and (options.hidden < 1 or options.hidden % (HEAD_DIM * GROUP)):
        parser.error(f"--hidden must be a multiple of {HEAD_DIM * GROUP}")
    try:
        options.device = str(device_named(options.device))
    except ValueError as error:
        parser.error(str(error))
    if options.mode == "graph" and not options.device.startswith("cuda"):
        parser.error("--mode graph needs a CUDA device")
    if options.weights == "auto":
        options.weights = "fp16" if options.device.startswith("cuda") else "fp32"
    plain = (options.mode, options.kv_cache, options.separate) == ("eager", "fp16", False) and options.weights in DTYPES
    if options.impl == "auto":
        found = plain and importlib.util.find_spec("transformers") is not None
        options.impl = "transformers" if found else "engine"
    if options.impl == "transformers" and not plain:
        parser.error("--mode graph, --kv-cache, --separate and --weights int8 work with --impl engine only")
    if options.impl == "transformers" and importlib.util.find_spec("transformers") is None:
        parser.error("--impl transformers: transformers is not installed; --impl engine needs nothing else")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Generate, and print the two lines."""
    options = parsed(arguments)
    config = sizes(options)
    try:
        model = (TransformersModel if options.impl == "transformers" else EngineModel)(options, config)
    except ValueError as error:
        print(f"infer.py: error: {error}", file=sys.stderr)
        return 2
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocabulary, (options.batch, options.prompt), generator=source).tolist()
    generate(model, prompts, min(options.tokens, 4))  # first-time costs stay out of the figures
    runs = [generate(model, prompts, options.tokens) for _ in range(options.repeat)]
    gaps_s = [after - before for _, times in runs for before, after in itertools.pairwise(times)]
    asked = ("batch", "prompt", "tokens", "preset", "mode", "impl", "weights")
    figures = {
        "tokens_per_s": options.batch * options.tokens / statistics.median(times[-1] for _, times in runs),
        "ttft_ms": statistics.median(times[0] for _, times in runs) * 1e3,
        "itl_median_ms": statistics.median(gaps_s) * 1e3 if gaps_s else None,
        **{name: getattr(options, name) for name in asked},
        "parameters": config.parameters_count,
        "device": torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
    }
    if options.impl == "engine":
        figures["paths"] = {name: list(paths) for name, paths in model.engine.paths.items()}
    print(f"checksum {zlib.crc32(json.dumps(runs[-1][0]).encode()):08x}")
    print(json.dumps(figures) if options.json else summary(figures))
    return 0


def summary(figures: dict[str, object]) -> str:
    """The figures for people; what was not measured is left out."""
    parts = [f"{figures['tokens_per_s']:.1f} tokens/s"]
    for key, label in (("ttft_ms", "TTFT"), ("itl_median_ms", "median ITL")):
        if figures[key] is not None:
            parts.append(f"{label} {figures[key]:.3f} ms")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
