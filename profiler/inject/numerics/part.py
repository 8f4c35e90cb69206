"""Numerics as a part of the agent: watches the models that the program calls, writes what was found to a file."""

from __future__ import annotations

import atexit
import os
import sys

from .. import ENV_CONTROL
from ..captures import Captures
from ..events import Clock, RLock, SignalsHeld, above_standard
from ..interrupts import is_from_handler
from . import records

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

    from ..agent import Agent
    from .watch import Numerics

#: Steps after which models of a class never seen before are not looked for any more.
_SEARCH_STEPS = 64

#: Where no thread of ours does it, a step that ends after so long writes what was found.
_OWN_SECONDS = 0.5

_COMPILER = "torch.compile is used: only what compiled models give is watched from then on, not what is in models"


class NumericsPart:
    """Life of the watch: from the import of torch to the end, or until something is compiled.

    A program that uses no GPU gets no thread of ours: what was found is written where a step of the program's ends.
    """

    def __init__(self, agent: Agent, models: tuple[Any, ...] = ()) -> None:
        self._agent = agent
        self._models = models  # asked for by name; without any, all are watched
        self._numerics: Numerics | None = None
        self._captures: Captures | None = None
        self._compiled: tuple[Any, Any, Any] | None = None  # class, our __init__, its own
        self._searching = 0
        self._narrowed = False  # to models seen so far
        self._told = False  # that the watch has begun
        self._began = self._looked = Clock.monotonic()
        self._supervisor = os.environ.get(ENV_CONTROL, "")
        self._bytes = 0
        self._drains = RLock()
        self._over = False

    def start(self) -> None:
        """Begin to look for models; once more, where CUDA is used for the first time since."""
        try:
            if self._numerics is None:
                self._start()
            elif (self._searching or self._narrowed) and self._compiled is None and not self._over:
                self._search()
            if self._agent.activated and self._numerics is not None:
                self._tell()
        except Exception as error:  # of ours: the rest of the recording goes on
            self._say(ev="note", text="numerics are not checked: %s: %s" % (type(error).__name__, error))

    def _start(self) -> None:
        options = self._agent.options
        if "torch" not in sys.modules:
            self._say(ev="note", text="numerics need torch: nothing is checked")
            return
        from .watch import Numerics  # which asks what this torch can do

        numerics = self._numerics = Numerics(
            self._say, options.numerics_every, tuple(options.numerics_modules), tuple(options.numerics_roles),
            told_of_compiler=not self._agent.compiler_used,
        )  # fmt: skip
        if self._models:
            for model in self._models:
                numerics.attach(model)
            self._models = ()
        else:
            self._search()
        numerics.after_step = self._after_step
        self._captures = Captures(numerics.capture_began, numerics.capture_ends, numerics.capture_comes)
        self._captures.put_in()
        # Before torch's own, which takes the operators that are written in Python away.
        atexit.register(self._at_exit)

    def _search(self) -> None:
        """Hear of models of any class, for some steps."""
        if self._narrowed:
            self._agent.calls.release(self)
        if (self._searching and not self._narrowed) or self._agent.calls.want(self):
            self._searching, self._narrowed = _SEARCH_STEPS, False
        else:
            self._follow_compiled()

    def _tell(self) -> None:
        """That the watch has begun: of a program without CUDA when a model is called first."""
        if not self._told:
            self._told = True
            self._agent.take_leave_in_workers()
            self._agent.spool.events.hello()
            self._say(ev="numerics", every=self._agent.options.numerics_every)

    def _after_step(self) -> None:
        """Where nobody else does it: write what was found, and see whether it is to go on."""
        if self._over or self._agent.has_thread:
            return
        try:
            self._tell()
            now = Clock.monotonic()
            if now - self._looked >= _OWN_SECONDS:
                self._looked = now
                with SignalsHeld():
                    self._look(now)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._over = True
            self._say(ev="note", text="numerics are not checked any more: %s: %s" % (type(error).__name__, error))
            self._take_out()

    def _look(self, now: float) -> None:
        most = self._agent.options.max_seconds
        ended = "--max-seconds %g reached" % most if most and now - self._began >= most else ""
        if self._supervisor and not os.path.exists(self._supervisor):
            ended = "the supervisor is gone"
        if ended:
            self._say(ev="note", text="numerics: %s" % ended)
            self.finish()
        else:
            self._drain(all_of_it=False)

    def attach(self, model: Any) -> None:
        """Watch a model that the program names."""
        if self._numerics is not None:
            self._numerics.attach(model)

    def look_at(self, name: str, tensor: Any, role: str, dtype: str, scale: Any, zero_point: Any) -> None:
        """Scan a tensor that the program names."""
        if self._numerics is not None and not self._over:
            self._numerics.look_at(name, tensor, role, dtype, scale, zero_point)

    def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See calls.py."""
        if self._numerics is not None:
            self._numerics.step_begins(module, args, kwargs)
        if self._searching:
            self._searching -= 1
            if not self._searching:
                self._narrowed = True
                self._agent.calls.narrow(self)

    def step_ends(self) -> None:
        """The hooks of the model tell."""

    def tick(self) -> None:
        """Write what was found: called by the agent's thread."""
        if self._numerics is not None and not self._over:
            self._drain(all_of_it=False)

    def pause(self) -> None:
        """Scans need no CUPTI; but where recording is over for good, this is too."""
        if self._agent.stopped:
            self.finish()

    def resume(self) -> None:
        """See pause."""

    def compiler_came(self) -> None:
        """No hook may end up in a compiled frame: those of a compiled model as a whole do not."""
        if self._numerics is not None and not self._numerics.closed:
            self._numerics.compiler_came()
            self._follow_compiled()

    def finish(self) -> None:
        """Take the hooks out and write the rest."""
        if self._numerics is None or self._over:
            return
        self._take_out()
        self._drain(all_of_it=True)
        self._over = True
        losses = {reason: count for reason, count in self._numerics.losses().items() if count}
        self._say(ev="numerics_ended", losses=losses)

    def _at_exit(self) -> None:
        """The program has ended, but for what it does at exit itself."""
        if self._numerics is None or self._agent.inherited:
            return
        with SignalsHeld():
            if not self._over:
                self._drain(all_of_it=True)
            if self._numerics.first_bad.key is not None:
                self._agent.aside(self.tell_operator)

    def tell_operator(self) -> None:
        """Run the module that gave the first bad value again, once, and tell of the operator."""
        if self._numerics is None:
            return
        try:
            told = self._numerics.bisect()
            if told is not None:
                self._say(ev="numerics_operator", **told)
        except Exception as error:
            self._say(ev="note", text="operators were not run again: %s: %s" % (type(error).__name__, error))

    def forget(self) -> None:
        """In a forked child: nothing of the parent's is watched, and its GPU memory is not ours."""
        if self._numerics is not None:
            self._numerics.forked()
            self._take_out()
        self._numerics = None

    def _take_out(self) -> None:
        self._agent.calls.release(self)
        if self._captures is not None:
            self._captures.take_out()
        if self._compiled is not None:
            owner, ours, original = self._compiled
            if owner.__init__ is ours:
                owner.__init__ = original
            self._compiled = None
        if self._numerics is not None:
            self._numerics.close()

    def _follow_compiled(self) -> None:
        """Watch every model that is compiled from now on."""
        self._say(ev="note", text=_COMPILER)
        owner = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
        if owner is None or self._compiled is not None:
            return
        original, part = owner.__init__, self

        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if part._numerics is not None and not part._numerics.closed:
                part._numerics.attach(module)

        init.__wrapped__ = original  # type: ignore[attr-defined]
        owner.__init__ = init
        self._compiled = (owner, init, original)

    def _say(self, **fields: Any) -> None:
        self._agent.spool.event(**fields)

    def _drain(self, all_of_it: bool) -> None:
        assert self._numerics is not None
        try:
            with self._drains:
                self._numerics.drain(self._write, all_of_it)
        except Exception as error:  # of ours: the rest of the recording goes on
            self._over = True
            self._numerics.fault(error)

    def _write(self, device: int, piece: Any) -> None:
        """One frame. The file is opened for it alone: the program may close whatever it finds open."""
        limit = self._agent.options.max_bytes
        if self._over:
            return
        if limit and self._bytes + records.FRAME_HEADER.size + len(piece) > limit:
            room = max(limit - self._bytes - records.FRAME_HEADER.size, 0)
            piece = piece[: room // records.RECORD_BYTES * records.RECORD_BYTES]
            self._over = True
            self._say(ev="note", text="numerics: --max-bytes %d reached" % limit)
            self._take_out()
            if not len(piece):
                return
        header = records.FRAME_HEADER.pack(records.FRAME_MAGIC, len(piece), Clock.unix_ns(), device)
        try:
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            file = above_standard(os.open(self._agent.spool.events.stem + records.SUFFIX, flags, 0o600))
            try:
                self._bytes += os.writev(file, [header, piece])
            finally:
                os.close(file)
        except OSError as error:
            self._over = True
            self._say(ev="note", text="numerics could not be written: %s" % os.strerror(error.errno or 0))
            self._take_out()
