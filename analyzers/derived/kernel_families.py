"""What a kernel's name says of its work: one node of the graph, several, or data moved.

The rules stand in ``kernel_families.toml``, each with where the names were seen.

Names that Inductor makes list the *kinds* of operators that it fused, each once: two additions are one ``add``. So the
number of operators is a lower bound. Views among them move nothing and count as none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple

#: What becomes of a kernel. ``fused`` and ``library_fused`` do the work of several nodes of the graph in one launch.
VERDICTS = ("fused", "library_fused", "single", "copy", "unknown")
FUSED = ("fused", "library_fused")

#: Kinds of work that one kernel can do together with its neighbour's; products only in front, as an epilogue.
CHAINED = ("pointwise", "copy", "norm", "reduction")
#: Kinds that fusing is about. Single products, convolutions, sorts and communication are none of its failures.
FUSIBLE = (*CHAINED, "gather")

_MOST_CHARS = 2_000  # of a name that are looked at
_SEPARATORS = re.compile(r"[<(]")


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel does, by its name. ``operators``: those that the name lists, views left out.

    ``part``: not the whole of an operator, so that the operator's shapes do not tell what it reads and writes.
    """

    verdict: str
    kind: str
    reason: str
    operators: tuple[str, ...] = ()
    part: bool = False

    @property
    def does(self) -> str:
        """Its operators in one word or a few; its kind where they are not known."""
        return "+".join(self.operators) or self.kind

    @property
    def is_fused(self) -> bool:
        """Whether it does the work of several nodes."""
        return self.verdict in FUSED

    @property
    def is_fusible(self) -> bool:
        """Whether it is fused, or of a kind that fusing is about."""
        return self.is_fused or self.kind in FUSIBLE


UNKNOWN = Work("unknown", "other", "its name is of no known family")


@lru_cache(maxsize=8192)
def work_of(name: str) -> Work:
    """What a kernel of this name does; ``UNKNOWN`` for a name that says nothing."""
    rules, name = _rules(), name[:_MOST_CHARS]
    if found := rules.inductor.match(name):
        return _inductor(found["what"], found["operators"])
    words = () if rules.generated.search(name) else tuple(_words(_base(name), rules.plain, strangers=False))
    if len(words) > 1:
        kind = _main_kind([rules.plain[word] for word in words])
        return Work("fused", kind, f"its name says {_listed(words)}", words)
    for pattern, work in rules.families:
        if pattern.search(name):
            return work if work.is_fused else replace(work, operators=_aten(name))
    if words:
        return Work("single", rules.plain[words[0]], f"its name says {words[0]} alone", words)
    return UNKNOWN


def of_operator(name: str) -> Work:
    """What a kernel does that was launched by the named operator (``aten::mul``), of which it is taken for one node."""
    operator = name.removeprefix("aten::")
    if operator == name:
        return UNKNOWN
    kinds = _rules().words
    kind = kinds.get(operator) or kinds.get(operator.removesuffix("_")) or ""
    if kind in ("", "view", "other"):
        return UNKNOWN
    return Work("copy" if kind == "copy" else "single", kind, f"launched by {name}, one node of the graph", (operator,))


def _inductor(what: str, text: str) -> Work:
    rules = _rules()
    named = tuple(dict.fromkeys(_words(text, rules.words, strangers=True)))
    operators = tuple(word for word in named if rules.words.get(word) != "view")
    kinds = [rules.words.get(word, "other") for word in operators]
    kind = rules.inductor_kinds[what]
    if not operators:
        return Work("unknown", kind, "Inductor names no operator in it", operators)
    if len(operators) > 1:
        return Work("fused", kind, f"Inductor joined {_listed(operators)}", operators)
    verdict = "copy" if kinds == ["copy"] else "single"
    return Work(verdict, kind, f"Inductor made it for {operators[0]} alone", operators)


def _aten(name: str) -> tuple[str, ...]:
    """The operator that the name of one of ATen's kernels says, if it does."""
    rules = _rules()
    if not rules.aten.search(name):
        return ()
    found = next((found[1] for pattern in rules.aten_operators if (found := pattern.search(name))), "")
    found = found.lower().removesuffix("_cuda")
    return (rules.called.get(found, found),) if found else ()


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _main_kind(kinds: list[str]) -> str:
    """The kind of a kernel that does several: that which bounds what it can be joined to."""
    order = ("attention", "gemm", "conv", "norm", "reduction")
    return next((kind for kind in order if kind in kinds), "pointwise")


def _base(name: str) -> str:
    """The function's own name, without its namespace, template arguments and parameters."""
    head = _SEPARATORS.split(name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return head.rpartition("::")[2].rpartition(" ")[2].lower()


def _words(text: str, known: Mapping[str, str], *, strangers: bool) -> Iterator[str]:
    """The operators that a name lists between underscores, the longest match each; runs of others as one, if asked."""
    parts, at, strange = text.split("_"), 0, []
    longest = _rules().longest
    while at < len(parts):
        ends = range(min(len(parts), at + longest), at, -1)
        end = next((end for end in ends if "_".join(parts[at:end]) in known), 0)
        if not end:
            if not parts[at].isdigit():
                strange.append(parts[at])
            at += 1
            continue
        if strangers and any(strange):
            yield "_".join(strange)
        strange = []
        yield "_".join(parts[at:end])
        at = end
    if strangers and any(strange):
        yield "_".join(strange)


class _Rules(NamedTuple):
    families: list[tuple[re.Pattern[str], Work]]
    words: Mapping[str, str]
    plain: Mapping[str, str]
    longest: int  # parts between underscores of the longest word
    generated: re.Pattern[str]
    inductor: re.Pattern[str]
    inductor_kinds: Mapping[str, str]
    aten: re.Pattern[str]
    aten_operators: list[re.Pattern[str]]
    called: Mapping[str, str]


@cache
def _rules() -> _Rules:
    file = resources.files("spikeprof.analyzers.derived").joinpath("kernel_families.toml")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    words, plain = (_by_word(data[table]) for table in ("words", "plain"))
    return _Rules(
        [_family(entry) for entry in data["families"]],
        words,
        plain,
        max(word.count("_") for word in (*words, *plain)) + 1,
        re.compile(data["generated"]["pattern"]),
        re.compile(data["inductor"]["pattern"]),
        data["inductor"]["kinds"],
        re.compile(data["aten"]["pattern"]),
        [re.compile(pattern) for pattern in data["aten"]["operators"]],
        data["aten"]["called"],
    )


def _family(entry: Mapping[str, Any]) -> tuple[re.Pattern[str], Work]:
    work = Work(entry["verdict"], entry["kind"], entry["reason"])
    return re.compile(entry["pattern"]), replace(work, part=entry.get("part", False))


def _by_word(table: Mapping[str, list[str]]) -> dict[str, str]:
    return {word: kind for kind, words in table.items() for word in words}
