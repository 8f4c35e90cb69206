"""A small causal language model with random weights: one prefill, then a decode loop. Nothing is downloaded.

    python examples/infer.py --batch 8 --mode eager
    spikeprof run -- python examples/infer.py --batch 8 --mode graph

The model is Llama's architecture: from Hugging Face transformers when that is installed (eager mode), else the plain
torch decoder below. In graph mode one decode step is captured as a CUDA graph over a static KV cache and replayed.

Standard output gets two lines: a checksum of the generated token ids, and tokens/s, TTFT and the median ITL.
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
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = 64
GROUP = 4  # query heads per key-value head
VOCABULARY = 32000


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding over a KV cache of fixed length."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = hidden // HEAD_DIM, hidden // HEAD_DIM // GROUP
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, self.kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(hidden, self.kv_heads * HEAD_DIM, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Tensor, positions: Tensor, seen: int | None) -> Tensor:
        """``x`` [batch, new, hidden] at ``positions`` [new]; ``cache`` [2, batch, kv_heads, length, head_dim].

        ``seen`` is how much of the cache is valid after this call; None = read it all behind a mask, with shapes
        that do not depend on the position, as a CUDA graph needs.
        """
        batch, new, hidden = x.shape
        q = rotate(self.q(x).view(batch, new, self.heads, HEAD_DIM).transpose(1, 2), rotary)
        k = rotate(self.k(x).view(batch, new, self.kv_heads, HEAD_DIM).transpose(1, 2), rotary)
        v = self.v(x).view(batch, new, self.kv_heads, HEAD_DIM).transpose(1, 2)
        cache[0].index_copy_(2, positions, k)
        cache[1].index_copy_(2, positions, v)
        keys, values = cache[0], cache[1]
        mask = None
        if seen is None:
            mask = torch.arange(cache.shape[3], device=x.device) <= positions[:, None]
        else:
            keys, values = keys[:, :, :seen], values[:, :, :seen]
        out = F.scaled_dot_product_attention(
            q,
            keys.repeat_interleave(GROUP, 1),
            values.repeat_interleave(GROUP, 1),
            attn_mask=mask,
            is_causal=mask is None and new > 1,
        )
        return self.o(out.transpose(1, 2).reshape(batch, new, hidden))


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as Llama has it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., hidden]."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind a norm and a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 8 // 3 // 64 * 64
        self.attention_norm, self.mlp_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Tensor, positions: Tensor, seen: int | None) -> Tensor:
        """See ``Attention.forward``."""
        x = x + self.attention(self.attention_norm(x), rotary, cache, positions, seen)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The model with its KV cache of ``batch`` sequences of at most ``length`` tokens."""

    def __init__(self, layers: int, hidden: int, batch: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        kv_heads = hidden // HEAD_DIM // GROUP
        self.register_buffer("cache", torch.zeros(layers, 2, batch, kv_heads, length, HEAD_DIM))
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.register_buffer("rotary", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, ids: Tensor, positions: Tensor, seen: int | None) -> Tensor:
        """``ids`` [batch, new] at ``positions`` [new] -> logits [batch, vocabulary] of the last one."""
        x = self.embedding(ids)
        rotary = self.rotary[:, positions]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x = block(x, rotary, cache, positions, seen)
        return self.head(self.norm(x[:, -1]))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding: ``x`` [batch, heads, new, head_dim], ``rotary`` [cos and sin, new, head_dim]."""
    low, high = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-high, low], -1) * rotary[1]


#: Makes the first token of a prompt [batch, 1], and then the next one from the last.
Prefill = Callable[[Tensor], Tensor]
Decode = Callable[[Tensor], Tensor]


def plain_eager(model: Decoder) -> tuple[Prefill, Decode]:
    """The plain torch decoder, launched kernel by kernel."""
    state = {"seen": 0}

    def step(ids: Tensor) -> Tensor:
        begin, state["seen"] = state["seen"], state["seen"] + ids.shape[1]
        positions = torch.arange(begin, state["seen"], device=ids.device)
        return model(ids, positions, state["seen"]).argmax(-1, keepdim=True)

    def prefill(prompt: Tensor) -> Tensor:
        state["seen"] = 0
        return step(prompt)

    return prefill, step


def plain_graph(model: Decoder, batch: int) -> tuple[Prefill, Decode]:
    """Prefill launched kernel by kernel; the decode step captured once and replayed."""
    eager_prefill, _ = plain_eager(model)
    device = next(model.parameters()).device
    ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position = torch.zeros(1, dtype=torch.long, device=device)

    def step() -> None:
        ids.copy_(model(ids, position, None).argmax(-1, keepdim=True))
        position.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazy initialisation must not happen inside the capture
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def prefill(prompt: Tensor) -> Tensor:
        ids.copy_(eager_prefill(prompt))
        position.fill_(prompt.shape[1])
        return ids.clone()

    def decode(_: Tensor) -> Tensor:
        graph.replay()
        return ids.clone()

    return prefill, decode


def transformers_eager(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[Prefill, Decode]:
    """Hugging Face's Llama with the same sizes and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = options.hidden // HEAD_DIM
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP,
        max_position_embeddings=options.prompt + options.tokens,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    # The argument and the attribute have the same name; it became "cache" in transformers 5.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    state: dict[str, object] = {}

    def step(ids: Tensor) -> Tensor:
        out = model(input_ids=ids, use_cache=True, **{name: state.get("cache")})
        state["cache"] = getattr(out, name)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def prefill(prompt: Tensor) -> Tensor:
        state.clear()
        return step(prompt)

    return prefill, step


def generate(prefill: Prefill, decode: Decode, prompt: Tensor, tokens: int, stream: bool) -> tuple[Tensor, list[float]]:
    """Token ids [batch, tokens], and the seconds at which each was there, from the start.

    With ``stream`` every token is brought to the host before the next step, as a server that streams does. Without,
    the host runs ahead, and only the last time says when the GPU was done.
    """
    synchronize(prompt.device)
    start = time.perf_counter()
    out, times = [], []
    token = prompt
    for number in range(tokens):
        token = prefill(token) if number == 0 else decode(token)
        out.append(token)
        if stream or number == tokens - 1:
            token.tolist()
        times.append(time.perf_counter() - start)
    return torch.cat(out, 1), times


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program with code 2 for values that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt (128)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each (64)")
    parser.add_argument("--layers", type=int, default=16, help="layers (16)")
    parser.add_argument(
        "--hidden", type=int, default=1024, help=f"hidden size, a multiple of {HEAD_DIM * GROUP} (1024)"
    )
    parser.add_argument("--mode", choices=("eager", "graph"), default="eager")
    parser.add_argument("--impl", choices=("auto", "transformers", "torch"), default="auto", help="which decoder")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu")
    parser.add_argument("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto")
    parser.add_argument("--repeat", type=int, default=1, help="generations to time, after one that is not (1)")
    parser.add_argument("--no-stream", action="store_true", help="leave tokens on the GPU until the end: no ITL")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args(arguments)
    for name in ("batch", "prompt", "tokens", "layers", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.hidden < 1 or options.hidden % (HEAD_DIM * GROUP):
        parser.error(f"--hidden must be a multiple of {HEAD_DIM * GROUP}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.mode == "graph" and not options.device.startswith("cuda"):
        parser.error("--mode graph needs a CUDA device")
    if options.impl == "auto":
        found = options.mode == "eager" and importlib.util.find_spec("transformers") is not None
        options.impl = "transformers" if found else "torch"
    if options.impl == "transformers" and options.mode == "graph":
        parser.error("--mode graph works with --impl torch only")
    return options


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    """Generate, and print the two lines."""
    options = parsed(arguments)
    device = torch.device(options.device)
    default = "float16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, default if options.dtype == "auto" else options.dtype)
    # cuDNN plans its attention anew for every length of the cache, 50 ms a token: not what is to be seen here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    prompt = torch.randint(VOCABULARY, (options.batch, options.prompt)).to(device)
    if options.impl == "transformers":
        prefill, decode = transformers_eager(options, device, dtype)
    else:
        model = Decoder(options.layers, options.hidden, options.batch, options.prompt + options.tokens)
        model = model.to(device=device, dtype=dtype).eval()
        prefill, decode = plain_graph(model, options.batch) if options.mode == "graph" else plain_eager(model)

    generate(prefill, decode, prompt, min(options.tokens, 4), True)  # first-time costs stay out of the figures
    runs = [generate(prefill, decode, prompt, options.tokens, not options.no_stream) for _ in range(options.repeat)]
    ids = runs[-1][0].cpu()
    totals_s = [times[-1] for _, times in runs]
    figures = {
        "tokens_per_s": options.batch * options.tokens / statistics.median(totals_s),
        "ttft_ms": None,
        "itl_median_ms": None,
        **{name: getattr(options, name) for name in ("batch", "prompt", "tokens", "layers", "hidden", "mode", "impl")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    if not options.no_stream:
        gaps_s = [b - a for _, times in runs for a, b in itertools.pairwise(times)]
        figures["ttft_ms"] = statistics.median(times[0] for _, times in runs) * 1e3
        figures["itl_median_ms"] = statistics.median(gaps_s) * 1e3 if gaps_s else None
    print(f"checksum {zlib.crc32(ids.numpy().tobytes()):08x}")
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
