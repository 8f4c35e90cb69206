"""``spikeprof.watch(model)``: what is in the tensors that a model's modules give, scanned on the device while it runs.

    with spikeprof.watch(model) as watched:
        model(inputs)
    for row in watched.stats():
        print(row["module"], row["amax_value"], row["nan_count"], row["inf_count"])

Under ``spikeprof run`` the numbers go into the trace, as with ``--numerics``, and ``stats`` is empty. Elsewhere they
stay here. Nothing waits for the device but ``stats``. Needs torch, which the program has, and nothing else.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from spikeprof.profiler.inject.captures import Captures
from spikeprof.profiler.inject.numerics import records
from spikeprof.profiler.inject.numerics.formats import BY_NUMBER, NIBBLES
from spikeprof.profiler.inject.numerics.watch import ROLES, Numerics

#: Scans that are kept where nobody records; older ones give way.
KEPT_MAX = 1 << 20

_WORDS = struct.Struct(f"<{records.RECORD_WORDS}q")


class Watch:
    """A model that is watched until ``close``, or the end of a ``with``."""

    def __init__(self, numerics: Numerics | None, told: list[dict[str, Any]], agent: Any = None) -> None:
        self._numerics, self._told, self._agent = numerics, told, agent
        self._points: dict[int, tuple[str, str, str]] = {}
        self._same: dict[int, int] = {}  # points that hand on another one's tensor
        self._scales: dict[int, list[Any]] = {}  # see inject/numerics/scales.py
        self._records: deque[bytes] = deque(maxlen=KEPT_MAX)
        self._captures: Captures | None = None
        self._bisected: dict[str, Any] | None = None
        if numerics is not None:
            self._captures = Captures(numerics.capture_began, numerics.capture_ends, numerics.capture_comes)
            self._captures.put_in()

    def __enter__(self) -> Watch:
        """The watch is on already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def look(
        self, name: str, tensor: Any, *, role: str = "kv", dtype: str = "", scale: Any = None, zero_point: Any = None
    ) -> None:
        """Scan a tensor that no module gives, such as pages of a KV cache.

        ``dtype`` says what its bytes are where torch does not know it: int4 for two codes in each byte of a uint8
        tensor. Outside of the model's calls it belongs to the step before.

        ``scale`` of a quantised tensor, x = scale * (code - zero_point), tells what its codes stand for at most, in the
        dtype of the scale, or in FP16 where it is a number. Both may be tensors of any shape that fit one another;
        nothing waits for them. Raises TypeError for a scale or a zero point that is neither.
        """
        kinds = (int, float, getattr(sys.modules.get("torch"), "Tensor", float))
        for given in (scale, zero_point):
            if given is not None and not isinstance(given, kinds):
                raise TypeError(f"scale and zero_point are numbers or tensors, not {type(given).__name__}")
        if zero_point is not None and scale is None:
            raise TypeError("a zero_point needs a scale")
        if self._numerics is not None:
            self._numerics.look_at(name, tensor, role, dtype, scale, zero_point)
        elif self._agent is not None:
            self._agent.look_at(name, tensor, role, dtype, *(() if scale is None else (scale, zero_point)))

    def collect(self) -> None:
        """Take what was found so far out of the ring, which holds 32,768 scans; waits for nothing."""
        self._drain(all_of_it=False)

    def stats(self) -> list[dict[str, Any]]:
        """All scans so far in order of steps and modules: dictionaries with the columns of the table ``tensor_stats``.

        Waits for the GPU. ``t_ns`` is the time of the device's clock, ``amax_value`` and ``smallest_value`` are None
        where there is none.
        """
        self._drain_all()
        every = [_WORDS.unpack(record) for record in self._records]
        every.sort(key=lambda words: (words[records.STEP], records.order_of(words[records.TAG])))
        whole = [words for words in every if records.is_whole(words)]
        self._learn()
        return self._with_scales(
            [self._row(words) for words in whole], [records.point_of(w[records.TAG]) for w in whole]
        )

    def bisect(self) -> dict[str, Any] | None:
        """The operator that gave the first bad value; None where no scan saw one, and under ``spikeprof run``.

        There the trace tells, as of all models.

        Runs the module that it came from once more, on an input that was kept: its Python on tensors without memory,
        then its operators one by one, for at most 5 seconds. For the end of a program: what the module's Python does
        beside computing, such as filling a global cache, it does once more, with tensors that hold nothing. It is run
        once, later calls give the same answer: with ``operator`` and ``file``, ``line`` and ``function`` of its call,
        its ``inputs`` and ``output`` with shape, dtype, amax and counts of NaN and Inf, the index ``first_bad``; or
        else ``why_not``.
        """
        if self._numerics is None:
            return None
        if self._bisected is None:
            self._drain_all()
            self._bisected = self._numerics.bisect()
        return self._bisected

    @property
    def unchecked(self) -> list[tuple[str, str]]:
        """(module, why) of what could not be scanned so far."""
        self._drain(all_of_it=False)
        return [(str(path), str(why)) for event in self._told for path, why in event.get("places", ())]

    @property
    def remarks(self) -> list[str]:
        """Why the watch ended before it was closed, if it did."""
        return [str(event["text"]) for event in self._told if event.get("ev") == "note"]

    def close(self) -> None:
        """Take all hooks out. What was captured into CUDA graphs goes on being scanned."""
        if self._numerics is not None:
            self._numerics.close()
        if self._captures is not None:
            self._captures.take_out()

    def _drain_all(self) -> None:
        torch = sys.modules.get("torch")
        if self._numerics is not None and torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._drain(all_of_it=True)

    def _drain(self, *, all_of_it: bool) -> None:
        if self._numerics is not None:
            self._numerics.drain(self._keep, all_of_it)

    def _keep(self, _device: int, piece: bytes | memoryview) -> None:
        data = bytes(piece)
        size = records.RECORD_BYTES
        self._records.extend(data[at : at + size] for at in range(0, len(data), size))

    def _learn(self) -> None:
        for event in self._told:
            for number, _, path, class_name, role, _, same_as in event.pop("points", ()):
                if same_as < 0:
                    self._points[number] = (path, class_name, role)
                else:
                    self._same[number] = same_as
            self._scales.update((point, scale) for point, *scale in event.pop("scales", ()))

    def _with_scales(self, rows: list[dict[str, Any]], points: list[int]) -> list[dict[str, Any]]:
        """The rows, in order, with what codes stand for: by the next scan of their scale in the step, or the last."""
        scans: dict[int, list[dict[str, Any]]] = {}
        for row, point in zip(rows, points, strict=True):
            scans.setdefault(point, []).append(row)
        for row, point in zip(rows, points, strict=True):
            source, dtype, reaches = self._scales.get(point, (-1, "", 0))
            own = scans.get(source) or scans.get(self._same.get(source, -1), [])
            at = bisect_left(own, _place(row), key=_place)
            at -= at == len(own) or own[at]["step"] != row["step"]
            size, amax = own[at]["amax_value"] if at >= 0 else None, row["amax_value"]
            known = size is not None and (reaches or amax is not None)
            row["real_amax_value"] = (size if reaches else size * amax) if known else None
            row["real_dtype"] = dtype
        return rows

    def _row(self, words: tuple[int, ...]) -> dict[str, Any]:
        tag = words[records.TAG]
        form = BY_NUMBER[records.format_of(tag)]
        path, class_name, role = self._points.get(records.point_of(tag), ("", "", ""))
        found = dict(zip(records.STATISTICS, words[records.FIRST_STATISTIC :], strict=False))
        items, laid_out = words[records.ELEMENTS] // (2 if form.kind == NIBBLES else 1), words[records.LAID_OUT]
        return {
            "step": words[records.STEP],
            "order": records.order_of(tag),
            "module": path,
            "class_name": class_name,
            "role": role,
            "dtype": form.name,
            "elements_count": words[records.ELEMENTS],
            "amax_value": form.value(found["amax"]),
            "smallest_value": form.value(found["smallest"]),
            **{f"{name}_count": found[name] for name in ("nan", "inf", "subnormal", "zero", "saturated")},
            "first_bad_index": found["first_bad"],
            "dimensions_count": records.dimensions_of(laid_out),
            "rows_count": records.rows_of(items, laid_out),
            "bad_rows": found["bad_rows"] % (1 << 64),
            "scanned": records.SCANNED[laid_out & records.WHEN],
            "t_ns": words[records.TIME],
        }


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["step"], row["order"]


def watch(model: Any, *, every: int = 1, modules: Sequence[str] = ("*",), roles: Sequence[str] = ("output",)) -> Watch:
    """Scan what the modules of a ``torch.nn.Module`` give, in every ``every``-th call of it.

    ``modules``: shell patterns of names below ``model``. ``roles``: output, input, weight (once), gradient (of
    outputs). A model that was compiled is watched as a whole: of what is compiled only the result can be seen. Raises
    TypeError for what is no module, ValueError for roles that do not exist.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: spikeprof.watch takes a torch.nn.Module")
    unknown = [role for role in roles if role not in ROLES]
    if unknown or every < 1:
        raise ValueError(f"roles can be {', '.join(ROLES)}, every a number from 1: not {unknown or every}")
    if "_spikeprof" in sys.modules:
        from _spikeprof.hooks import the_agent  # type: ignore[import-not-found]

        agent = the_agent()
        if not hasattr(agent, "look_at"):  # an agent older than this package
            return Watch(None, [])
        agent.watch_model(model, every, tuple(modules), tuple(roles))
        return Watch(None, [], agent)
    told: list[dict[str, Any]] = []
    numerics = Numerics(lambda **event: told.append(event), every, tuple(modules), tuple(roles))
    watched = Watch(numerics, told)
    numerics.attach(model)
    return watched
