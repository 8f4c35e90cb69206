"""What storing keys and values in fewer bits costs and saves: one model, one text, one cache of each kind.

The text is read token by token through the cache, as decode does: every token but the first is guessed from those
before it. *Attention error*: while the plain cache is in place, the same keys and values also go into the others, and
what attention reads from each is held against what it reads from the plain one, ||o' - o|| / ||o|| over all tokens of
a layer; nothing adds up from layer to layer. *Perplexity*: exp of the mean loss with the cache in place, errors of all
layers together. *Saved*: bytes of a token, scales and zero points included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spikeprof.kernels.cache import KVCache, Plan, Usage, bytes_per_token, make_cache
from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.runner import Runner
from spikeprof.kernels.paths import Attended, check

PLAIN = "fp16"  # pages in the dtype of the activations, which is FP32 on a CPU
#: In this order in tables: FP16 keys with INT8 values, the other way round, both in 8 bits, both in 4.
KINDS = ("int8-values", "int8-keys", "int8", "int4")

MOST_TOKENS = 4096  # of a file
CHUNK = 128  # tokens whose logits are there at once
_SEQUENCE = -1  # a name that no request has
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Precision:
    """One kind of cache on one text. ``saved_share``, the errors and the change are against the plain cache."""

    kind: str
    bytes_per_token: int
    saved_share: float
    attention_error: float  # mean over layers
    worst_layer_error: float
    perplexity: float
    perplexity_change_share: float


def compare(engine: Engine, text: Sequence[int], kinds: Sequence[str] = KINDS) -> list[Precision]:
    """The plain cache first, then each kind, by the engine's model. Its own cache is not used.

    Kinds that the model's heads do not allow are left out. Raises ValueError for a text of less than two tokens, and
    for ids that the model does not have.
    """
    config = engine.config
    check(len(text) >= 2, f"the text has {len(text)} tokens: two at least are needed")
    wrong = next((token for token in text if not 0 <= token < config.vocabulary), None)
    check(wrong is None, f"the text holds the id {wrong}: the model has those from 0 to {config.vocabulary - 1}")
    kept = [kind for kind in kinds if kind != "int4" or config.head_dim % 32 == 0]
    with engine.scope(), torch.no_grad():
        caches = {kind: _cache(engine, kind, len(text)) for kind in (PLAIN, *kept)}
        compared = _Compared(caches[PLAIN], {kind: caches[kind] for kind in kept})
        plain = _perplexity(engine, compared, text)
        found = {PLAIN: plain}
        for kind in kept:
            found[kind] = _perplexity(engine, _cache(engine, kind, len(text)), text)
        errors = compared.errors()
    size = {kind: _bytes(engine, kind) for kind in found}
    return [
        Precision(
            kind,
            size[kind],
            1 - size[kind] / size[PLAIN],
            sum(errors[kind]) / len(errors[kind]) if kind in errors else 0.0,
            max(errors.get(kind, [0.0])),
            perplexity,
            perplexity / plain - 1,
        )
        for kind, perplexity in found.items()
    ]


def read_tokens(path: Path) -> list[int]:
    """Ids from a file: whole numbers with blanks, commas or line ends between, or a JSON list of them.

    Raises ValueError for a file that cannot be read, or that holds anything else.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no text; write ids of tokens, with blanks or commas between") from None
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    strange = next((word for word in words if not re.fullmatch(r"[0-9]{1,9}", word, re.ASCII)), None)
    check(strange is None, f"{path}: {(strange or '')[:20]!r} is no id of a token; write whole numbers, with blanks or "
          "commas between")  # fmt: skip
    check(len(words) >= 2, f"{path}: holds {len(words)} ids: two at least are needed")
    return [int(word) for word in words]


def table_text(rows: Sequence[Precision], dtype: str) -> str:
    """The rows as lines of at most 73 columns; ``dtype`` is that of the plain cache."""
    lines = [f"{'cache':<12} {'bytes/token':>11} {'saved':>7} {'attention':>10} {'worst layer':>12} {'perplexity':>16}"]
    for row in rows:
        if row.kind == PLAIN:
            rest = f"{'':>7} {'':>10} {'':>12} {row.perplexity:>16,.3f}"
        else:
            change = f"{100 * row.perplexity_change_share:+.2f} %"
            rest = f"{100 * row.saved_share:>5.1f} % {100 * row.attention_error:>8.2f} % "
            rest += f"{100 * row.worst_layer_error:>10.2f} % {change:>16}"
        lines.append(f"{dtype if row.kind == PLAIN else row.kind:<12} {row.bytes_per_token:>11,} {rest}")
    return "\n".join(lines)


def figures(rows: Sequence[Precision]) -> dict[str, float]:
    """All numbers by name, for JSON."""
    found: dict[str, float] = {}
    for row in rows:
        found[f"{row.kind}_bytes_per_token"] = row.bytes_per_token
        found[f"{row.kind}_perplexity"] = row.perplexity
        if row.kind != PLAIN:
            found[f"{row.kind}_model_saved_share"] = row.saved_share
            found[f"{row.kind}_attention_error_share"] = row.attention_error
            found[f"{row.kind}_worst_layer_error_share"] = row.worst_layer_error
            found[f"{row.kind}_perplexity_change_share"] = row.perplexity_change_share
    return found


def _bytes(engine: Engine, kind: str) -> int:
    config = engine.config
    sizes = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    return bytes_per_token(kind, **sizes, itemsize=engine.runner.decoder.weights.dtype.itemsize)


def _cache(engine: Engine, kind: str, tokens: int) -> KVCache:
    config, weights = engine.config, engine.runner.decoder.weights
    return make_cache(
        kind, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim,
        capacity_tokens=-(-tokens // _PAGE) * _PAGE, page_size=_PAGE, max_sequences=1, max_tokens=tokens,
        dtype=weights.dtype, device=weights.device,
    )  # fmt: skip


def _perplexity(engine: Engine, cache: KVCache, text: Sequence[int]) -> float:
    """Every token but the first is guessed from those before it, read through the cache."""
    runner = Runner(engine.runner.decoder, cache)
    guesses = runner.prefill([_SEQUENCE], [text[:1]])
    loss, at = _loss(guesses, text[1:2]), 1
    while at < len(text) - 1:
        chunk = text[at : min(at + CHUNK, len(text) - 1)]
        loss += _loss(runner.extend([_SEQUENCE], [len(chunk)], chunk), text[at + 1 : at + 1 + len(chunk)])
        at += len(chunk)
    return math.exp(loss / (len(text) - 1))


def _loss(logits: Tensor, wanted: Sequence[int]) -> float:
    target = torch.tensor(wanted, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum"))


class _Compared:
    """A ``KVCache`` that is the plain one, while others take the same keys and values and are read beside it.

    All have pages of one size, and are asked for the same: one plan is right for all of them.
    """

    def __init__(self, plain: KVCache, others: Mapping[str, KVCache]) -> None:
        self._plain, self._others = plain, dict(others)
        self._sums: dict[tuple[str, int], list[float]] = {}

    def errors(self) -> dict[str, list[float]]:
        """By kind, ||o' - o|| / ||o|| of each layer."""
        found: dict[str, list[float]] = {}
        for (kind, _), (apart, whole) in sorted(self._sums.items()):
            found.setdefault(kind, []).append(math.sqrt(apart / whole) if whole else 0.0)
        return found

    def _all(self) -> Iterator[KVCache]:
        yield self._plain
        yield from self._others.values()

    def begin(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        """See ``KVCache``."""
        return next(iter([cache.begin(sequence, tokens) for cache in self._all()]))

    def fork(self, parent: int, child: int) -> None:
        """See ``KVCache``."""
        for cache in self._all():
            cache.fork(parent, child)

    def plan(self, new: Sequence[tuple[int, int]]) -> Plan:
        """See ``KVCache``."""
        return next(iter([cache.plan(new) for cache in self._all()]))

    def blank_plan(self, batch: int) -> Plan:
        """See ``KVCache``."""
        return self._plain.blank_plan(batch)

    def append(self, layer: int, plan: Plan, keys: Tensor, values: Tensor, *, path: str = "auto") -> str:
        """See ``KVCache``."""
        return next(iter([cache.append(layer, plan, keys, values, path=path) for cache in self._all()]))

    def attend(self, layer: int, plan: Plan, q: Tensor, *, window: int | None = None, path: str = "auto") -> Attended:
        """See ``KVCache``."""
        plain = self._plain.attend(layer, plan, q, window=window, path=path)
        exact = plain.out.double()
        for kind, cache in self._others.items():
            apart = cache.attend(layer, plan, q, window=window, path=path).out.double() - exact
            sums = self._sums.setdefault((kind, layer), [0.0, 0.0])
            sums[0] += float(apart.square().sum())
            sums[1] += float(exact.square().sum())
        return plain

    def gather(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """See ``KVCache``."""
        return self._plain.gather(layer, sequence)

    def length(self, sequence: int) -> int:
        """See ``KVCache``."""
        return self._plain.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """See ``KVCache``."""
        for cache in self._all():
            cache.truncate(sequence, length)

    def evict(self, sequence: int) -> None:
        """See ``KVCache``."""
        for cache in self._all():
            cache.evict(sequence)

    def usage(self) -> Usage:
        """See ``KVCache``."""
        return self._plain.usage()
