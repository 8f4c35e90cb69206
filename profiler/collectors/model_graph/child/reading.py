"""The model as a graph: by torch.export, else by torch.fx."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .factory import Made, one_line, place

_SENTENCE = re.compile(r"(?<=[^\d\s])\.(?=\s|$)")


class Graph:
    """A graph that can be run node by node.

    ``flat`` are the values of its placeholders, ``needs_shapes`` says that its nodes do not know theirs yet,
    ``refused`` what each way that was tried before said.
    """

    def __init__(self, via: str, module: Any, flat: list[Any], needs_shapes: bool, refused: dict[str, str]) -> None:
        self.via, self.module, self.flat, self.needs_shapes, self.refused = via, module, flat, needs_shapes, refused

    @property
    def nodes(self) -> list[Any]:
        """The nodes in order, without the checks of inputs that torch.export adds."""
        return [n for n in self.module.graph.nodes if not is_guard(n)]


def torch_version() -> str:
    """The version that reads."""
    return str(torch.__version__)


def is_guard(node: Any) -> bool:
    """Whether the node only checks that inputs are like those of the export."""
    return node.op == "call_module" and str(node.target).startswith("_guards")


def read(made: Made, via: str) -> tuple[Graph | None, dict[str, str]]:
    """The graph by the way asked for (``auto``: export, else fx), and what each way that failed said."""
    refused: dict[str, str] = {}
    for way in ("export", "fx") if via == "auto" else (via,):
        try:
            with torch.no_grad(), quiet():
                made_by = _exported if way == "export" else _traced
                return made_by(made, dict(refused)), refused
        except Exception as error:
            refused[way] = _first_sentence(error)
    return None, refused


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch prints, warns and logs: what it says of a refusal is in the exception."""
    if os.environ.get("SPIKEPROF_DEBUG"):
        yield
        return
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _first_sentence(error: Exception) -> str:
    """What the exception says first, and the line of the model that it is about."""
    said = _SENTENCE.split(one_line(error), maxsplit=1)[0]
    return said + place(error, [str(Path(torch.__file__).parent)])


def _exported(made: Made, refused: dict[str, str]) -> Graph:
    model, args, kwargs = made
    program = torch.export.export(model, args, kwargs, strict=False)
    flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
    return Graph("export", program.module(), flat, False, refused)


def _traced(made: Made, refused: dict[str, str]) -> Graph:
    model, args, kwargs = made
    module = fx.symbolic_trace(model)
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    flat: list[Any] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target).lstrip("*")
        if str(node.target).startswith("*"):
            raise TypeError(f"forward takes {node.target}: its arguments cannot be told apart")
        if name not in bound.arguments and not node.args:
            raise TypeError(f"no value for the argument {name}")
        flat.append(bound.arguments[name] if name in bound.arguments else node.args[0])
    return Graph("fx", module, flat, True, refused)
