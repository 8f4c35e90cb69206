"""A forward that runs once more for us reaches neither the program's output nor its logs, and replays no CUDA graph."""

import sys

from ..events import get_ident

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional


class Stopped(BaseException):
    """Recording ends here. No ``Exception``: the program must not catch it on the way."""


class Quiet:
    """While a forward runs for us, in this thread: nothing reaches the program's output, logs or CUDA graphs."""

    def __init__(self, torch: "Any") -> None:
        self._torch, self._thread = torch, get_ident()
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """Put it in."""
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            stream = getattr(sys, name, None)
            if stream is not None:
                self._put(sys, name, _Muffled(stream, self._thread))
        logging = sys.modules.get("logging")
        if logging is not None:
            self._put(logging.Logger, "handle", self._here(logging.Logger.handle, lambda: None))
        graph = getattr(getattr(self._torch, "cuda", None), "CUDAGraph", None)
        if graph is not None and hasattr(graph, "replay"):
            self._put(graph, "replay", self._here(graph.replay, self._refuse_replay))
        fast = getattr(getattr(self._torch.backends, "mha", None), "get_fastpath_enabled", None)
        if fast is not None and fast():  # one operator for a whole layer would not tell where in it
            self._torch.backends.mha.set_fastpath_enabled(False)
            self._undo.append(lambda: self._torch.backends.mha.set_fastpath_enabled(True))

    def __exit__(self, *_: object) -> None:
        """Take it out."""
        for undo in reversed(self._undo):
            undo()

    def _put(self, owner: "Any", name: str, ours: "Any") -> None:
        before = owner.__dict__.get(name)
        setattr(owner, name, ours)

        def undo() -> None:
            if owner.__dict__.get(name) is not ours:
                return
            if before is None and isinstance(owner, type):
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def _here(self, original: "Any", instead: "Callable[[], Any]") -> "Any":
        def call(*args: "Any", **kwargs: "Any") -> "Any":
            return instead() if get_ident() == self._thread else original(*args, **kwargs)

        return call

    @staticmethod
    def _refuse_replay() -> None:
        raise Stopped("a CUDA graph that it replays")


class _Muffled:
    """A stream that takes nothing from one thread."""

    def __init__(self, stream: "Any", thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: "Any") -> "Optional[int]":
        return len(text) if get_ident() == self._thread else self._stream.write(text)

    def writelines(self, lines: "Any") -> None:
        if get_ident() != self._thread:
            self._stream.writelines(lines)

    @property
    def buffer(self) -> "Any":
        return _Muffled(self._stream.buffer, self._thread)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._stream, name)
