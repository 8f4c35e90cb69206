"""Short, readable kernel names: what a person would call the kernel, without the C++ template noise.

The full name stays the key everywhere; a short one is for the eye only. Any text is accepted (names come
from other people's files): unbalanced brackets, control characters and megabytes of nesting included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_MAX_CHARS = 8_000  # of a name that are looked at
_MAX_DEPTH = 6  # of template arguments that are looked into
_OPEN, _CLOSE = "<({[", ">)}]"

#: Arguments that tell nothing about the work: how the wrapper finds its operands.
_NOISE = re.compile(
    r"(std::|at::detail::|cuda::std::__4::)?[aA]rray<char ?\*|"
    r"(at::native::)?(memory::)?(Load|Store)With(out)?Cast|.*::StoreWithCast|"
    r"(Trivial)?OffsetCalculator|char ?\*$|unsigned int$|.*::Params$|.*KernelParams$|"
    r"(at::|c10::)?(RestrictPtrTraits|DefaultPtrTraits)$|ncclDevKernelArgsStorage|"
    r"at::native::(\(anonymous namespace\)::)?(FusedOptimizer)?TensorListMetadata"
)
#: Templates that only carry another kernel or functor, and which telling argument that is.
_CARRIERS = {
    "Kernel": 0,
    "Kernel2": 0,
    "device_kernel": 0,
    "gpu_kernel_impl": 0,
    "gpu_kernel_impl_nocast": 0,
    "gpu_index_kernel": 0,
    "AUnaryFunctor": -1,
    "BUnaryFunctor": -1,
    "BinaryFunctor": -1,
    "ReduceOp": 1,
    "func_wrapper_t": 1,
}
_SPELLINGS = (
    (re.compile(r"\b(__half|c10::Half|at::Half|cutlass::half_t|half_t)\b"), "half"),
    (re.compile(r"\b(__nv_bfloat16|__hip_bfloat16|c10::BFloat16|at::BFloat16|cutlass::bfloat16_t)\b"), "bf16"),
    (re.compile(r"\b(?:std::)?integral_constant<\w+, *(\w+)>|\bcute::C<\(?\w*\)?(\w+)>"), r"\1\2"),
    (re.compile(r"\(bool\)1\b"), "true"),
    (re.compile(r"\(bool\)0\b"), "false"),
    (re.compile(r"\((?:unsigned )?(?:int|long|char|short)\)(?=-?\d)"), ""),
    (re.compile(r"\b(\d+)u?l?l?\b(?=[,>)]|$)"), r"\1"),
)
_MANGLED_PREFIX = re.compile(r"_ZN?[KVr]*(?:St|Sa|Ss)?")
_MANGLED_PART = re.compile(r"L?(\d{1,4})")
_LAMBDA = re.compile(r"[{<]?'?lambda|operator\(\)|\(anonymous|<unnamed>|\$_\d")
_LAMBDA_TYPE = re.compile(r"[{<]?'?lambda'?\((?!int[),])([\w:]+)")


def printable(text: str) -> str:
    """The text with control, bidirectional and line-breaking characters made visible and harmless."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in text)


def clip(text: str, width: int, ellipsis: str = "…") -> str:
    """The text in at most ``width`` characters, the middle left out: both ends of a name tell kernels apart."""
    if len(text) <= width:
        return text
    if width <= len(ellipsis):
        return text[: max(width, 0)]
    keep = width - len(ellipsis)
    tail = keep * 2 // 5
    return text[: keep - tail] + ellipsis + (text[-tail:] if tail else "")


@lru_cache(maxsize=4096)
def short_name(name: str, width: int = 60) -> str:
    """One kernel's short name in at most ``width`` characters (at least 8)."""
    text = printable(name[:_MAX_CHARS]).strip()
    if text.startswith("_Z"):
        text = _from_mangled(text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    base, arguments = _essence(_without_signature(text), 0)
    return _fit(base or text or "(no name)", arguments, max(width, 8))


def short_names(names: Sequence[str], width: int = 60) -> list[str]:
    """Short names of a table's rows, told apart by ``#2``, ``#3``, … where two kernels shorten to one."""
    chosen: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        if name in chosen:
            continue
        short, number = short_name(name, width), 1
        while short in taken:
            number += 1
            tag = f" #{number}"
            short = short_name(name, max(width - len(tag), 8)) + tag
        chosen[name] = short
        taken.add(short)
    return [chosen[name] for name in names]


def _from_mangled(text: str) -> str:
    """The last plain identifier of an Itanium-mangled name; enough of C++ to find it, no more."""
    prefix = _MANGLED_PREFIX.match(text)
    at = prefix.end() if prefix else 2
    found = ""
    while part := _MANGLED_PART.match(text, at):
        size = int(part[1])
        word, at = text[part.end() : part.end() + size], part.end() + size
        if word and not word.startswith("_GLOBAL__N_"):
            found = word
    if not found:
        return text
    return found + "<…>" if text[at : at + 1] == "I" else found


def _split(text: str, separator: str) -> list[str]:
    """Split on a separator that is outside all brackets. ``->``, ``operator<`` and the like are no brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if text.startswith("operator", i) and i + 8 < len(text) and text[i + 8] in "<>-=(":
            i += 10 if text[i + 8 : i + 10] in ("()", "<<", ">>", "<=", ">=", "->") else 9
            continue
        if c in _OPEN:
            depth += 1
        elif c in _CLOSE and not (c == ">" and text[i - 1 : i] == "-"):
            depth = max(depth - 1, 0)
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i += len(separator)
            start = i
            continue
        i += 1
    parts.append(text[start:])
    return parts


def _without_signature(text: str) -> str:
    """``void a::b<T>(int, T) const`` -> ``a::b<T>``. A text that is not a C++ signature stays as it is."""
    words = _split(text, " ")
    while len(words) > 1 and (words[-1] in ("const", "&", "&&", "volatile") or words[-1].startswith("[clone")):
        words.pop()
    name = words[-1]
    at = _matching(name) if name.endswith(")") and not name.endswith("operator()") else -1
    if at > 0 and not name[:at].endswith("operator"):
        return name[:at]  # what stands before the name is the type that it returns
    return name if words[0] == "void" else " ".join(words)


def _matching(text: str) -> int:
    """Where the bracket opens that closes at the end of the text, or -1."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        c = text[i]
        if c == ")":
            depth += 1
        elif c == "(":
            depth -= 1
            if depth == 0:
                return i
    return -1


def _essence(text: str, depth: int) -> tuple[str, list[str]]:
    """The last named component of a qualified name, and its telling template arguments, shortened."""
    path = [p.strip() for p in _split(text, "::") if p.strip()]
    named = [p for p in path if not _LAMBDA.match(p)]
    last = _without_signature(named[-1]) if named else text
    element = _LAMBDA_TYPE.match(path[-1]) if path else None
    at = last.find("<")
    if at <= 0 or not last.endswith(">"):
        # PyTorch's element-wise kernels differ in the type that their innermost lambda takes.
        return (f"{last}({element[1].rpartition('::')[2]})" if element and last != text else last), []
    base, inside = last[:at], _split(last[at + 1 : -1], ",")
    if depth >= _MAX_DEPTH:
        return base, ["…"]
    arguments = [a.strip() for a in inside]
    telling = [a for a in arguments if a and not _NOISE.match(a)]
    parts = [_essence(a, depth + 1) for a in telling]
    carried = _CARRIERS.get(base)
    if carried is not None and len(parts) > carried:
        return parts[carried] if parts else (base, [])
    return base, [_joined(b, inner) for b, inner in parts]


def _joined(base: str, arguments: Sequence[str]) -> str:
    return f"{base}<{', '.join(arguments)}>" if arguments else base


def _is_plain(argument: str) -> bool:
    """A number or flag: the first thing to leave out when room is short."""
    return argument in ("true", "false", "…") or argument.lstrip("-").isdigit()


def _fit(base: str, arguments: list[str], width: int) -> str:
    whole = _joined(base, arguments)
    if len(whole) <= width:
        return whole
    types = [a for a in arguments if not _is_plain(a)]
    for count in range(len(types), 0, -1):
        rest = [] if count == len(arguments) else ["…"]
        shorter = _joined(base, types[:count] + rest)
        if len(shorter) <= width:
            return shorter
    if not types or width < 16:
        return clip(base, width)
    # Wrapper and functor share the room; the functor is what tells two element-wise kernels apart.
    functor = types[0]
    room = width - 2
    left = min(len(base), max(room - len(functor), room // 3))
    return f"{base if len(base) <= left else base[: left - 1] + '…'}<{clip(functor, room - left)}>"
