"""A small inference engine: prompts of token ids in, token ids out, one by one or all at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.attention.checks import HEAD_DIMS, HEAD_DIMS_TEXT
from spikeprof.kernels.cache import KINDS, make_cache
from spikeprof.kernels.cache.usage import bytes_per_token
from spikeprof.kernels.engine.config import PRESETS, ModelConfig, preset, read_config
from spikeprof.kernels.engine.graph import DecodeGraphs
from spikeprof.kernels.engine.model import make_decoder
from spikeprof.kernels.engine.operators import unfused_operators
from spikeprof.kernels.engine.runner import Runner
from spikeprof.kernels.engine.sampling import Sampling
from spikeprof.kernels.engine.scheduler import Limits, Request, Scheduler
from spikeprof.kernels.engine.weights import Weights, load_weights, random_weights
from spikeprof.kernels.paths import check

_CPU_CACHE_BYTES = 256 << 20
_GPU_CACHE_SHARE = 0.8  # of the memory that is free once the weights are there; activations need the rest

Prompts = Sequence[int] | Sequence[Sequence[int]]


class Streamed(NamedTuple):
    """A token of a prompt: ``prompt`` is its place among those asked for."""

    prompt: int
    token: int


@dataclass(frozen=True, slots=True)
class Generated:
    """What was generated, one entry for each prompt.

    ``tokens`` without the prompt; the stop token, where it ended there, is the last. ``reasons``: "length" or "stop".
    ``ttft_s``: seconds until the first token; ``itl_s``: seconds between tokens. ``paths``: which paths each kernel
    ran on, since the engine was made.
    """

    tokens: list[list[int]]
    reasons: list[str]
    ttft_s: list[float]
    itl_s: list[list[float]]
    paths: Mapping[str, tuple[str, ...]]


class Engine:
    """A decoder, its KV cache and a scheduler. One thread may use it at a time.

    ``model``: a ``ModelConfig`` or the name of a preset, with random weights; or the path of a folder with a
    ``config.json`` and safetensors. ``kv_cache``: a kind of ``make_cache`` ("fp16" means pages in the dtype of the
    activations). ``weights``: "fp32", "fp16", "bf16", "int8". ``device`` "auto": a GPU where there is one.
    ``cache_tokens``: room of the cache in tokens; by default what ``max_batch`` sequences can need, but no more than
    80 % of the GPU's free memory, or 256 MiB on a CPU. ``page_size`` in tokens.
    ``max_delay_s``, ``max_size``: see ``Limits``. ``path``: of the kernels. ``fused`` False takes separate torch
    operators instead of fused kernels, for comparison.

    Raises ValueError for values that cannot work, CheckpointError for a damaged checkpoint.
    """

    def __init__(
        self,
        model: ModelConfig | str | Path,
        *,
        kv_cache: str = "fp16",
        weights: str = "fp16",
        max_seq_len: int = 8192,
        max_batch: int = 64,
        device: str = "auto",
        cuda_graph: bool = False,
        seed: int = 0,
        cache_tokens: int | None = None,
        page_size: int = 16,
        max_delay_s: float = 0.0,
        max_size: int | None = None,
        path: str = "auto",
        fused: bool = True,
    ) -> None:
        _check_sizes(max_seq_len=max_seq_len, max_batch=max_batch, page_size=page_size)
        if cache_tokens is not None:
            _check_sizes(cache_tokens=cache_tokens)
        check(kv_cache in KINDS, f"kv_cache is {kv_cache!r}: it can be {', '.join(KINDS)}")
        device = _device(device)
        # What the cache gives out as one piece: a page, or a whole sequence's row.
        unit = max_seq_len if kv_cache == "contiguous" else page_size
        check(not cuda_graph or torch.device(device).type == "cuda",
              f"cuda_graph is True, but the device is {device}: CUDA graphs need a GPU")  # fmt: skip
        # Not inference mode: whoever uses the runner without it may write the cache, too.
        with torch.no_grad(), _current(device):
            config, loaded = _load(model, weights, device, seed, kv_cache)
            capacity = _capacity(config, loaded, kv_cache, unit, max_seq_len * max_batch, cache_tokens)
            cache = make_cache(
                kv_cache,
                layers=config.layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                capacity_tokens=capacity,
                page_size=page_size,
                max_sequences=max_batch,
                max_tokens=max_seq_len,
                dtype=loaded.dtype,
                device=device,
            )
            operators = None if fused else unfused_operators()
            decoder = make_decoder(config, loaded, max_seq_len, path=path, operators=operators)
            graphs = DecodeGraphs(decoder, cache, max_batch) if cuda_graph else None
        self.config = config
        self.runner = Runner(decoder, cache, graphs)
        self.limits = Limits(max_batch, max_seq_len, capacity, unit, max_delay_s, max_size)
        self.scheduler = Scheduler(self.runner, self.limits)

    @property
    def paths(self) -> Mapping[str, tuple[str, ...]]:
        """Which paths each kernel ran on so far."""
        return {name: tuple(sorted(paths)) for name, paths in sorted(self.runner.decoder.paths.items())}

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_token: int | None = None,
        seed: int = 0,
    ) -> Generated:
        """Generate for one prompt of token ids or a list of them; more than ``max_batch`` take turns.

        The n-th prompt is sampled with ``seed + n``. Raises ValueError for an empty or too long prompt and sampling
        options out of range, IndexError for token ids out of range.
        """
        requests = self._made(prompts, max_new_tokens, Sampling(temperature, top_p, seed), stop_token)
        for _ in self._streamed(requests):
            pass
        return Generated(
            [request.tokens for request in requests],
            [request.state for request in requests],
            [request.token_times_s[0] - request.arrived_s for request in requests],
            [request.itl_s for request in requests],
            self.paths,
        )

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_token: int | None = None,
        seed: int = 0,
    ) -> Iterator[Streamed]:
        """As ``generate``, each token as soon as it is there.

        The prompts are queued when the first token is asked for; closing the iterator cancels what is left.
        """
        requests = self._made(prompts, max_new_tokens, Sampling(temperature, top_p, seed), stop_token)
        return self._streamed(requests)

    def step(self) -> list[Request]:
        """One step of the scheduler, see there: for callers who queue requests themselves."""
        with self.scope():
            return self.scheduler.step()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What steps run in: no gradients, and the engine's GPU as the current one."""
        with torch.inference_mode(), _current(self.runner.decoder.weights.device):
            yield

    def _made(self, prompts: Prompts, max_new_tokens: int, sampling: Sampling, stop_token: int | None) -> list[Request]:
        requests: list[Request] = []
        for number, prompt in enumerate(as_prompts(prompts)):
            own = replace(sampling, seed=sampling.seed + number)
            requests.append(self.scheduler.make_request(prompt, max_new_tokens, own, stop_token))
        return requests

    def _streamed(self, requests: Sequence[Request]) -> Iterator[Streamed]:
        sent = [0] * len(requests)
        for request in requests:
            self.scheduler.add(request)
        try:
            while True:
                for index, request in enumerate(requests):
                    for token in request.tokens[sent[index] :]:
                        sent[index] += 1
                        yield Streamed(index, token)
                if all(request.is_done for request in requests):
                    return
                time.sleep(self.scheduler.due_in_s())
                self.step()
        finally:
            for request in requests:
                self.scheduler.cancel(request)


def as_prompts(prompts: Prompts) -> list[Sequence[int]]:
    """A list of prompts from one prompt or several, lists or tensors. Raises ValueError for an empty list."""
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    try:
        prompts = list(prompts)  # type: ignore[assignment]
    except TypeError:
        raise ValueError(f"prompts is {prompts!r}: it must be a list of token ids, or of such lists") from None
    check(len(prompts) > 0, "prompts is empty: at least one token is needed")
    if isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check(isinstance(size, Integral) and size > 0, f"{name} is {size}: it must be a positive integer")


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError:
        kind, index = "?", None
    check(kind in ("cpu", "cuda"), f"device is {device!r}: it can be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    check(kind == "cpu" or torch.cuda.is_available(), f"device is {device!r}, but torch sees no GPU")
    count = torch.cuda.device_count()
    check(kind == "cpu" or (index or 0) < count, f"device is {device!r}, but torch sees {count} GPUs, counted from 0")
    return device


def _current(device: str | torch.device) -> AbstractContextManager[object]:
    """The GPU as the current one: kernels are launched there, wherever their tensors are."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _load(
    model: ModelConfig | str | Path, precision: str, device: str, seed: int, kind: str
) -> tuple[ModelConfig, Weights]:
    """Sizes and weights; what the kernels cannot take is told before weights are made."""
    if isinstance(model, str) and model not in PRESETS and Path(model).exists():
        model = Path(model)
    if isinstance(model, Path):
        config = read_config(model if model.is_dir() else model.parent)
        _check_head_dim(config, kind)
        return config, load_weights(model, config, precision=precision, device=device)
    config = preset(model) if isinstance(model, str) else model
    check(isinstance(config, ModelConfig), f"model is {model!r}: it can be a ModelConfig, a preset's name or a path")
    _check_head_dim(config, kind)
    return config, random_weights(config, precision=precision, device=device, seed=seed)


def _check_head_dim(config: ModelConfig, kind: str) -> None:
    check(config.head_dim in HEAD_DIMS, f"head_dim is {config.head_dim}: it must be {HEAD_DIMS_TEXT}")
    bytes_per_token(kind, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim)


def _capacity(
    config: ModelConfig, weights: Weights, kind: str, unit: int, most_tokens: int, cache_tokens: int | None
) -> int:
    """Tokens that the cache gets, a multiple of ``unit``."""
    if cache_tokens is None:
        each = bytes_per_token(kind, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim,
                               itemsize=weights.dtype.itemsize)  # fmt: skip
        free = _CPU_CACHE_BYTES
        if weights.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(weights.device)[0] * _GPU_CACHE_SHARE)
        cache_tokens = min(most_tokens, free // each // unit * unit)
        check(cache_tokens > 0, f"a cache may take {free} bytes here, which hold {free // each} tokens, but {unit} are "
              "the fewest that it gives out: take a smaller max_seq_len, or say cache_tokens")  # fmt: skip
    return -(-cache_tokens // unit) * unit
