"""NVTX without a tool that listens."""

import itertools
from contextlib import contextmanager

_depth = []
_handles = itertools.count(1)


def range_push(msg):
    if not isinstance(msg, str):
        raise TypeError("a message is text")
    _depth.append(msg)
    return len(_depth) - 1


def range_pop():
    if _depth:
        _depth.pop()
    return len(_depth)


def range_start(msg):
    return next(_handles)


def range_end(range_id):
    pass


@contextmanager
def range(msg, *args, **kwargs):
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
