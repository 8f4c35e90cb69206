from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spikeprof.profiler.collectors.pierce import replies as replies_module
from spikeprof.profiler.collectors.pierce.replies import (
    EMPTY,
    ERROR,
    NIL,
    SOME,
    Reply,
    ReplyParser,
    only_lines,
    only_strings,
)
from spikeprof.profiler.collectors.pierce.resp import (
    ARG_BYTES_MAX,
    ARGS_MAX,
    LINE_BYTES_MAX,
    Command,
    RequestParser,
    only_gets,
)

WANTED = frozenset((b"GET", b"MGET"))


def commands_of(data: bytes, cuts: list[int]) -> tuple[list[Command], RequestParser]:
    """What a parser makes of the data in pieces, ends counted from its beginning."""
    parser, found, done = RequestParser(WANTED), [], 0
    for piece in _pieces(data, cuts):
        found += [(args, end + done) for args, end in parser.feed(piece)]
        done += len(piece)
    return found, parser


def replies_of(data: bytes, cuts: list[int]) -> tuple[list[Reply], ReplyParser]:
    parser, found, done = ReplyParser(), [], 0
    for piece in _pieces(data, cuts):
        found += [reply._replace(end=reply.end + done) for reply in parser.feed(piece)]
        done += len(piece)
    return found, parser


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(at)]


CUTS = st.lists(st.integers(0, 1 << 20), max_size=12)

# -- commands ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from([b"GET", b"get", b"MGET", b"SET"]), st.lists(st.binary(max_size=40), max_size=4)),
        min_size=1,
        max_size=6,
    ),
    CUTS,
)
def test_commands_cut_anywhere(commands: list[tuple[bytes, list[bytes]]], cuts: list[int]) -> None:
    data, wanted = b"", []
    for name, args in commands:
        words = [name, *args]
        data += b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        wanted.append((words if name.upper() in WANTED else [name], len(data)))
    found, parser = commands_of(data, cuts)
    assert found == wanted
    assert parser.idle
    assert not parser.broken


def test_an_argument_that_is_too_long_is_stepped_over() -> None:
    long = b"x" * (ARG_BYTES_MAX + 1)
    data = b"*3\r\n$4\r\nMGET\r\n$%d\r\n%b\r\n$1\r\nk\r\n*1\r\n$4\r\nPING\r\n" % (len(long), long)
    for cuts in ([], [30], list(range(0, len(data), 100))):
        found, parser = commands_of(data, cuts)
        assert [args for args, _ in found] == [[b"MGET", None, b"k"], [b"PING"]]
        assert parser.idle


def test_a_huge_value_is_not_held() -> None:
    parser = RequestParser(WANTED)
    parser.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\n")
    for _ in range(512):
        assert parser.feed(b"x" * (1 << 20)) == []
        assert len(parser._tail) == 0
    assert parser.feed(b"\r\n") == [([b"SET"], 2)]


def test_bytes_within_a_long_string_can_be_stepped_over() -> None:
    commands, replies = RequestParser(WANTED), ReplyParser()
    commands.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n")
    replies.feed(b"$100000\r\n")
    for parser in (commands, replies):
        assert parser.step_over(100_001)
        assert not parser.step_over(1)  # this one may end the string
        assert len(parser.feed(b"\n")) == 1
        assert not parser.step_over(1)


def test_arguments_beyond_the_bound_are_one_none() -> None:
    data = b"*%d\r\n$4\r\nMGET\r\n" % (ARGS_MAX + 10) + b"$1\r\nk\r\n" * (ARGS_MAX + 9)
    (args, end), *others = commands_of(data, [])[0]
    assert (len(args), args[-1], end, others) == (ARGS_MAX + 1, None, len(data), [])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"PING\r\n", [b"PING"]),
        (b"  get   key:1  \n", [b"get", b"key:1"]),
        (b"get 'a b'\r\n", [b"get", b"a b"]),
        (b'get "a b"\r\n', [b"get", b"a b"]),
        (b'get "a\\x00b"\r\n', [b"get", None]),  # an escape is not undone
    ],
)
def test_inline_commands(line: bytes, words: list[bytes | None]) -> None:
    for cuts in ([], [2], [len(line) - 1]):
        assert commands_of(line, cuts)[0] == [(words, len(line))]


def test_what_is_no_command_gets_no_reply_either() -> None:
    found, parser = commands_of(b"\r\n*0\r\n*-1\r\n   \r\nPING\r\n", [])
    assert [args for args, _ in found] == [[b"PING"]]
    assert parser.idle


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"*x\r\n", "invalid multibulk length"),
        (b"*1_0\r\n", "invalid multibulk length"),  # Python's int() would take it
        (b"*1\r\n:3\r\n", "expected '$', got ':'"),
        (b"*1\r\n$-5\r\n", "invalid bulk length"),
        (b"*1\r\n$ 1\r\n", "invalid bulk length"),
        (b"x" * (LINE_BYTES_MAX + 1), "more than 65536 bytes"),
    ],
)
def test_malformed_commands(data: bytes, reason: str) -> None:
    found, parser = commands_of(b"PING\r\n" + data, [])
    assert [args for args, _ in found] == [[b"PING"]]
    assert reason in parser.broken
    assert parser.feed(b"PING\r\n") == []


@given(st.binary(max_size=300), CUTS)
def test_no_bytes_break_the_parsers(data: bytes, cuts: list[int]) -> None:
    for found, _ in (commands_of(data, cuts), replies_of(data, cuts)):
        assert all(0 <= one[1 if isinstance(one[0], list) else 2] <= len(data) for one in found)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.binary(max_size=5))
def test_the_short_way_for_gets_agrees_or_declines(keys: list[bytes], other: bytes) -> None:
    data = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys)
    found = only_gets(data)
    assert found == keys or (found is None and any(b"\r" in key or b"\n" in key for key in keys))
    found = only_gets(data + other)
    assert found is None or not other


# -- replies -----------------------------------------------------------------------------------------------------------


def summary(reply: Reply) -> object:
    flags = None if reply.items is None else list(reply.items.flags)
    return chr(reply.kind), reply.value, flags


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"+OK\r\n", ("+", 2, None)),
        (b"-ERR no\r\n", ("-", 6, None)),
        (b":-12\r\n", (":", -12, None)),
        (b"$-1\r\n", ("$", -1, None)),
        (b"$0\r\n\r\n", ("$", 0, None)),
        (b"$4\r\n\r\n\r\n\r\n", ("$", 4, None)),
        (b"*-1\r\n", ("*", -1, None)),
        (b"*0\r\n", ("*", 0, [])),
        (b"*3\r\n$1\r\na\r\n$-1\r\n:0\r\n", ("*", 3, [SOME, NIL, EMPTY])),
        (b"*2\r\n*2\r\n$-1\r\n$1\r\na\r\n-ERR\r\n", ("*", 2, [SOME, ERROR])),
        (b"_\r\n", ("_", -1, None)),
        (b"#t\r\n", ("#", 1, None)),
        (b"#f\r\n", ("#", 0, None)),
        (b",1.5\r\n", (",", 3, None)),
        (b"(123456789012345678901234567890\r\n", ("(", 30, None)),
        (b"!5\r\nERR x\r\n", ("!", 5, None)),
        (b"=7\r\ntxt:abc\r\n", ("=", 7, None)),
        (b"%2\r\n+a\r\n:1\r\n+b\r\n_\r\n", ("%", 2, [SOME, SOME, SOME, NIL])),
        (b"~2\r\n:1\r\n:2\r\n", ("~", 2, [SOME, SOME])),
        (b">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n", (">", 2, [SOME, SOME])),
        (b"|1\r\n+ttl\r\n:3\r\n$1\r\nv\r\n", ("$", 1, None)),  # an attribute goes with what follows
        (b"*2\r\n|1\r\n+ttl\r\n:3\r\n$1\r\nv\r\n_\r\n", ("*", 2, [SOME, NIL])),
        (b"$?\r\n;4\r\nHell\r\n;1\r\no\r\n;0\r\n", ("$", 5, None)),
        (b"*?\r\n:1\r\n$-1\r\n.\r\n", ("*", 2, [SOME, NIL])),
        (b"%?\r\n+a\r\n:1\r\n+b\r\n:2\r\n.\r\n", ("%", 2, [SOME, SOME, SOME, SOME])),
        (b"*2\r\n$?\r\n;2\r\nab\r\n;0\r\n*?\r\n.\r\n", ("*", 2, [SOME, EMPTY])),
    ],
)
def test_every_type_cut_everywhere(data: bytes, wanted: object) -> None:
    stream = data + b"+PONG\r\n" + data
    for cuts in [[], list(range(len(stream))), *([cut] for cut in range(len(stream)))]:
        found, parser = replies_of(stream, cuts)
        assert [summary(reply) for reply in found] == [wanted, ("+", 4, None), wanted]
        assert [reply.end for reply in found] == [len(data), len(data) + 7, len(stream)]
        assert parser.idle


_SCALARS = st.one_of(
    st.binary(max_size=100).map(lambda text: (b"$%d\r\n%b\r\n" % (len(text), text), SOME)),
    st.just((b"$-1\r\n", NIL)),
    st.integers(-3, 3).map(lambda number: (b":%d\r\n" % number, SOME if number else EMPTY)),
    st.just((b"-ERR\r\n", ERROR)),
)
_REPLIES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=5).map(
        lambda items: (b"*%d\r\n" % len(items) + b"".join(data for data, _ in items), SOME if items else EMPTY)
    ),
    max_leaves=20,
)


@given(st.lists(_REPLIES, min_size=1, max_size=5), CUTS)
def test_nested_replies_cut_anywhere(replies: list[tuple[bytes, int]], cuts: list[int]) -> None:
    array = b"*%d\r\n" % len(replies) + b"".join(data for data, _ in replies)
    (reply,), parser = replies_of(array, cuts)
    assert reply.items is not None
    assert list(reply.items.flags) == [flag for _, flag in replies]
    assert (reply.end, parser.idle) == (len(array), True)


def test_what_tells_replies_apart_is_kept() -> None:
    (reply,), _ = replies_of(b"*3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:7\r\n", [9])
    assert reply.items is not None
    assert (reply.items.head, reply.items.last) == (b"unsubscribe", 7)


def test_long_lines_and_strings_are_not_held() -> None:
    line = b"+" + b"x" * (3 * LINE_BYTES_MAX) + b"\r\n"
    found, parser = replies_of(line + b":1\r\n", [*range(0, len(line), 10_000), len(line) - 1])
    assert [(chr(reply.kind), reply.text[:2]) for reply in found] == [("+", b"xx"), (":", b"1")]
    parser = ReplyParser()
    parser.feed(b"$536870912\r\n")
    for _ in range(512):
        assert parser.feed(b"x" * (1 << 20)) == []
        assert len(parser._tail) == 0
    assert [summary(reply) for reply in parser.feed(b"\r\n")] == [("$", 536870912, None)]


def test_flags_of_endless_arrays_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_module, "ITEMS_MAX", 10)
    (reply,), _ = replies_of(b"*100\r\n" + b"$1\r\na\r\n" * 50 + b":1\r\n" * 50, [])
    assert reply.items is not None
    assert (reply.value, len(reply.items.flags)) == (100, 10)


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 200 OK\r\n", b"$x\r\n", b"$3\r\nabcd\r\n", b";3\r\n", b".\r\n", b":1x\r\n"]
)
def test_what_is_no_reply(data: bytes) -> None:
    found, parser = replies_of(b"+OK\r\n" + data, [])
    assert len(found) == 1
    assert parser.broken


def test_the_short_ways_know_both_nils_and_count_lines() -> None:
    assert only_strings(b"_\r\n$1\r\na\r\n$-1\r\n$0\r\n\r\n") == [False, True, False, True]
    assert only_lines(b"+OK\r\n:1\r\n+\r\n") == 3
    for data in (b"+OK\r\n-ERR\r\n", b"+OK", b"+OK\r\n$-1\r\n", b"", b"+a\nb\r\n"):
        assert only_lines(data) == 0


@given(st.lists(st.one_of(st.none(), st.binary(max_size=12)), min_size=1, max_size=6), st.binary(max_size=4))
@example([None], b"_\r\n")
def test_the_short_way_for_strings_agrees_or_declines(values: list[bytes | None], other: bytes) -> None:
    data = b"".join(b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    found = only_strings(data)
    wanted = [value is not None for value in values]
    assert found == wanted or (found is None and any(value and (b"\r" in value or b"\n" in value) for value in values))
    # Of up to four bytes that follow, only RESP3's nil is a reply of its own.
    more = {b"": [], b"_\r\n": [False]}.get(other)
    assert only_strings(data + other) in (None, *([] if more is None else [wanted + more]))
