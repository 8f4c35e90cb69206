"""Places that kernels come from, numbered: what recordings of ours and imported ones have in common.

A stack's line is that of its innermost frame which is no library's: neither torch's, nor Triton's, nor Python's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.schema import TABLES

Ints = npt.NDArray[np.int64]
Frame = tuple[str, int, str]  # file, line, function

#: Files that only carry a program's calls to the GPU. Imported traces cut paths short: torch/nn/modules/linear.py.
_LIBRARY = re.compile(
    r"^<"  # frozen, built-in, generated
    r"|(?:^|/)(?:site|dist)-packages/(?:torch|torchgen|functorch|triton)/"
    r"|(?:^|/)torch/(?:_|nn/|autograd/|cuda/|utils/|fx/|jit/|profiler/|optim/|functional\.py|overrides\.py)"
    r"|(?:^|/)triton/(?:runtime|backends|compiler|language)/"
    r"|/lib(?:64)?/python\d[^/]*/(?!(?:site|dist)-packages/)"
    r"|^(?:threading|contextlib|runpy|functools|asyncio|concurrent|multiprocessing|importlib|selectors|logging)(?:/|\.py)"
    r"|/torchinductor_|(?:^|/)spikeprof/profiler/"
)
_TRITON = re.compile(r"(?:^|/)triton/(?:runtime|backends|compiler)/|(?:^|/)torch/_inductor/runtime/")
#: Frames below a Triton launch that may be C's.
_TRITON_DEPTH = 3

#: Stretches that torch records beside operators: ``## Call CompiledFxGraph … ##``, ``Torch-Compiled Region: 0/0``.
_NO_OPERATOR = re.compile(r"[ #]|^ProfilerStep|^CompiledF")
TRITON = "triton::"


def line_of(frames: Sequence[Frame]) -> Frame:
    """The frame that stands for a stack, innermost first; the innermost where all are libraries'."""
    return next((f for f in frames if not _LIBRARY.search(f[0])), frames[0] if frames else ("", 0, ""))


def by_triton(frames: Sequence[Frame]) -> bool:
    """Whether Triton's Python code launched what was launched there."""
    return any(_TRITON.search(file) for file, _, _ in frames[:_TRITON_DEPTH])


def is_operator(name: str) -> bool:
    """Whether a stretch that torch recorded as an operator is one."""
    return not _NO_OPERATOR.search(name)


def stack_row(rank: int, frames: Sequence[Frame]) -> dict[str, Any]:
    """A row of the table ``stacks`` but for its number."""
    file, line, function = line_of(frames)
    texts = [f"{path}:{number} {name}" for path, number, name in frames]
    return {
        "rank": rank,
        "file": file,
        "line": line,
        "function": function,
        "frames": json.dumps(texts, ensure_ascii=False),
    }


class Numbered(NamedTuple):
    """Distinct combinations: the number of each row's, and one row of each."""

    code: Ints
    first: Ints


def numbered(*columns: npt.NDArray[Any]) -> Numbered:
    """Number the distinct combinations of the columns' values from 0, in order of appearance."""
    code = _encoded(columns[0])
    for column in columns[1:]:
        more = _encoded(column)
        code = _encoded(code * (int(more.max(initial=0)) + 1) + more)
    first = np.empty(int(code.max(initial=-1)) + 1, np.int64)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    return Numbered(code, first)


def _encoded(values: npt.NDArray[Any]) -> Ints:
    return np.asarray(pa.array(values).dictionary_encode().indices, np.int64)


def texts_of(values: Iterable[str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Texts as numbers and the distinct ones."""
    coded = pa.array(values, pa.string()).dictionary_encode()
    return np.asarray(coded.indices, np.int32), coded.dictionary.to_pylist()


class Origins:
    """The rows of the table ``origins`` and the texts in them. Numbers of unknown modules, stacks, operators are -1."""

    def __init__(self) -> None:
        self.ops: dict[str, int] = {}
        self.inputs: dict[tuple[str, str], int] = {("", ""): 0}  # shapes and dtypes
        self._rows: list[tuple[int, int, int, int, int]] = []

    @property
    def count(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def op(self, name: str) -> int:
        """The operator's number, new if needed."""
        return self.ops.setdefault(name, len(self.ops))

    def input(self, shapes: str, dtypes: str) -> int:
        """The number of a combination of shapes and dtypes, new if needed."""
        return self.inputs.setdefault((shapes, dtypes), len(self.inputs))

    def add(self, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Append rows of rank, module, stack, operator, input."""
        self._rows.extend(rows)

    def number(self, columns: Sequence[npt.NDArray[Any]]) -> Ints:
        """The origin of each row of rank, module, stack, operator, input; -1 where nothing but the rank is known."""
        distinct = numbered(*columns)
        place = np.empty(len(distinct.first), np.int64)
        for i, row in enumerate(zip(*(column[distinct.first].tolist() for column in columns), strict=True)):
            known = max(row[1:4]) >= 0
            place[i] = len(self._rows) if known else -1
            if known:
                self._rows.append(row)
        return place[distinct.code]

    def row(self, number: int) -> tuple[int, int, int, int, int]:
        """A row's rank, module, stack, operator and input."""
        return self._rows[number]

    def rows(self) -> Ints:
        """All rows, (origins, 5), as ``row`` gives them."""
        return np.array(self._rows, np.int64).reshape(-1, 5)

    def table(self) -> pa.Table:
        """The table ``origins``."""
        columns = np.array(self._rows, np.int32).reshape(-1, 5).T
        rank, module, stack, op, given = columns
        inputs = [pa.array([pair[i] for pair in self.inputs], pa.string()).take(pa.array(given)) for i in (0, 1)]
        names = pa.DictionaryArray.from_arrays(pa.array(op, mask=op < 0), pa.array(list(self.ops), pa.string()))
        arrays = [pa.array(np.arange(len(rank), dtype=np.int32)), *map(pa.array, (rank, module, stack)), names, *inputs]
        return pa.Table.from_arrays(arrays, schema=TABLES["origins"].arrow)


MATCHES = ("none", "exact", "graph", "position", "signature")


def owner_table(origin: npt.NDArray[Any], match: npt.NDArray[Any], begin: int = 0) -> pa.Table:
    """``kernel_owners`` of the kernels from row ``begin`` on; ``match`` holds places in ``MATCHES``."""
    kinds = pa.DictionaryArray.from_arrays(pa.array(match, pa.int32()), pa.array(MATCHES, pa.string()))
    arrays = [pa.array(np.arange(begin, begin + len(origin))), pa.array(origin, pa.int32()), kinds]
    return pa.Table.from_arrays(arrays, schema=TABLES["kernel_owners"].arrow)
