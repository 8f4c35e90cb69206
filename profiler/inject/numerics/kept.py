"""The inputs of the module that gave the first bad value: kept, so that its operators can be run again at the end.

Nothing is kept until a record tells of a bad value. Then the inputs of that one module, and of the one around it, are
copied in each step, asynchronously, until the module gives a bad value again from inputs that were fine. On the CPU the
record comes while the module's arguments are still there: they are taken at once. In CUDA graphs see keeping.py.
"""

import sys

from ..events import get_ident
from ..interrupts import is_ours
from . import records
from .culprits import Candidate, culprits, held
from .inputs import Input, autocast_now
from .looks import tensors_in
from .mirror import CALLED, Mirror, Refused
from .roots import Hook

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .looks import Place
    from .roots import Root
    from .watch import Numerics

#: Bytes of inputs, over all copies.
BYTES_MAX = 64 << 20

#: Copies that wait for the verdict on their step, and steps after which it is given up.
WAITING_MAX = 4
TRIES_MAX = 1000

#: Looks at what is drained after the first bad value: one of an earlier module may come a little later.
_LATE_LOOKS = 2

_GONE = "the model was gone by the end"

_NAN, _INF = (records.FIRST_STATISTIC + records.STATISTICS.index(name) for name in ("nan", "inf"))


class Target:
    """A module whose inputs are to be kept."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.over = False
        self.open: list[Any] = []  # copies of calls under way
        self.tries = 0


class _Waiting:
    """A copy whose verdict is not there yet: ``flags`` are [inputs bad, output bad] in pinned memory."""

    def __init__(self, target: Target, kept: Input, flags: "Any", done: "Any") -> None:
        self.target, self.kept, self.flags, self.done = target, kept, flags, done


class Keeper:
    """Of one watch. ``saw`` and ``look`` may be called by any thread, the rest by the one that is in a step."""

    def __init__(self, numerics: "Numerics") -> None:
        self._numerics, self._torch = numerics, sys.modules["torch"]
        self.busy = False  # whether the next step has something to do for us
        self.fresh = False  # whether the first bad value was seen in the call that is just ending
        self.key: Optional[tuple[int, int]] = None  # step and order of the first bad scan
        self.place: Optional[Place] = None
        self.candidates: list[Candidate] = []
        self._culprits: dict[str, Callable[[], Any]] = {}  # by path, the innermost first
        self._targets: list[Target] = []
        self._handles: list[Any] = []
        self._armed: Optional[tuple[int, int]] = None  # the key that it was armed for
        self._waiting: list[_Waiting] = []
        self._bytes = 0
        self._late = _LATE_LOOKS
        self._why = ""
        self._told = False

    # -- the first bad value ------------------------------------------------------------------

    def look(self, piece: "Any") -> None:
        """Look for the first bad record among those that were drained."""
        if self.key is not None:
            if not self._late:
                return
            self._late -= 1
        words = memoryview(piece).cast("B").cast("q")
        size = records.RECORD_WORDS
        for found in (words[_NAN::size].tolist(), words[_INF::size].tolist()):
            if any(found):
                for at, count in enumerate(found):
                    if count:
                        self.saw(words[at * size + records.STEP], words[at * size + records.TAG])

    def saw(self, step: int, tag: int, now: bool = False) -> None:
        """A bad record. ``now``: its module is just ending, in this thread."""
        key = step, records.order_of(tag)
        if self._told or (self.key is not None and key >= self.key):
            return
        place = self._numerics.looks.places.get(records.point_of(tag))
        if place is not None:
            try:
                modules = culprits(self._numerics.model(place.root), place)
                self._culprits = {path: held(module) for path, module in modules}
            except Exception as error:
                if not is_ours(error):
                    raise
                self._why = "its module cannot be told: %s" % type(error).__name__
            self.key, self.place = key, place
            self.fresh = now
            self.busy = True

    def keep_now(self, place: "Place", args: "Any") -> None:
        """The first bad value is in what this module is just giving: its arguments, but for those by keyword."""
        self.fresh = False
        module = self._culprits.get(place.path)
        if place is not self.place or place.role != "output" or place.writes_input or module is None:
            return
        try:
            kept = self._copy(args, {}, exact=True)
            inputs = [each for each in kept.tensors if self._is_bad(each, inputs=True) is not None]
            if not any(bool(self._is_bad(each, inputs=True)) for each in inputs):
                self.candidates.append(Candidate(place.path, module, kept))
        except Refused as why:
            self._why = str(why)

    # -- from now on --------------------------------------------------------------------------

    def begins(self, root: "Root") -> None:
        """A step begins in this thread."""
        place = self.place
        if place is None or place.root != root.number or self._numerics.looks.capturing():
            return
        try:
            if self._armed != self.key:
                self._arm(root, place)
            self._settle(wait=False)
            if all(each.over for each in self._targets):
                self.take_out()
        except Exception as error:
            if not is_ours(error, *CALLED):  # of a signal handler of the program's
                raise
            self._why = "its inputs could not be kept: %s" % type(error).__name__
            self.take_out()

    def take_out(self) -> None:
        """Take the hooks out."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for target in self._targets:
            target.open.clear()
        self.busy = False

    def _arm(self, root: "Root", place: "Place") -> None:
        self.take_out()
        self._armed, self.busy = self.key, True
        if place.class_name == "OptimizedModule":  # a hook more in it would have it compiled anew
            self._why = "what torch.compile made of it has no operators to run one by one"
            return
        there = [(path, module()) for path, module in self._culprits.items()]
        self._targets = [Target(path) for path, module in there if module is not None]
        modules = [module for _, module in there if module is not None]
        for target, module in zip(self._targets, modules):  # noqa: B905 (Python 3.9)
            before = Hook(lambda _, args, kwargs=None, target=target: self._takes(target, args, kwargs or {}))
            after = Hook(lambda _module, _args, output, target=target: self._gave(target, output))
            try:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
            except TypeError:  # torch before 2.0
                handle = module.register_forward_pre_hook(before)
            self._handles += [handle, module.register_forward_hook(after)]
        if root.last is not None:
            root.last()

    def _takes(self, target: Target, args: "Any", kwargs: "Any") -> None:
        numerics = self._numerics
        if target.over or numerics.thread != get_ident() or not numerics.looking() or numerics.looks.capturing():
            return
        try:
            self._settle(wait=False)
            if len(self._waiting) < WAITING_MAX and not target.over:
                target.tries += 1
                target.open.append(self._copy(args, kwargs, exact=False))
                target.over = target.tries >= TRIES_MAX
        except Refused as why:
            self._why, target.over = str(why), True
        except Exception as error:
            if not is_ours(error, *CALLED):  # of a signal handler of the program's
                raise
            self._why, target.over = "its inputs could not be copied: %s" % type(error).__name__, True

    def _gave(self, target: Target, output: "Any") -> None:
        if self._numerics.thread != get_ident() or not target.open:
            return
        try:
            self._await(target, target.open.pop(), tensors_in(self._torch.Tensor, output))
        except Exception as error:
            if not is_ours(error, *CALLED):
                raise
            self._why, target.over = "its inputs could not be judged: %s" % type(error).__name__, True

    def _copy(self, args: "Any", kwargs: "Any", exact: bool) -> Input:
        torch = self._torch
        tensors: list[Any] = []

        def leaf(tensor: "Any") -> "Any":
            size = tensor.numel() * tensor.element_size()
            if tensor.layout != torch.strided:
                raise Refused("it takes a tensor of layout %s" % tensor.layout)
            if self._held() + size + sum(each.numel() * each.element_size() for each in tensors) > BYTES_MAX:
                raise Refused("its inputs take more than %d MiB" % (BYTES_MAX >> 20))
            tensors.append(tensor.detach().clone())
            return tensors[-1]

        with torch.inference_mode(False), torch.no_grad():
            mirror = Mirror(leaf)
            args, kwargs = mirror.of(tuple(args)), mirror.of(dict(kwargs))
        device = next((each.device.type for each in tensors), "cpu")
        return Input(args, kwargs, tensors, autocast_now(torch, device), exact)

    def _held(self) -> int:
        kept = [one.kept for one in self.candidates] + [one.kept for one in self._waiting]
        kept += [one for target in self._targets for one in target.open]
        return sum(each.numel() * each.element_size() for one in kept for each in one.tensors)

    # -- verdicts -----------------------------------------------------------------------------

    def _await(self, target: Target, kept: Input, outputs: "Any") -> None:
        """Ask, on the device, whether the inputs were fine and an output bad."""
        torch = self._torch
        outputs = list(outputs)
        with torch.inference_mode(False), torch.no_grad():
            device = next((each.device for each in outputs), None)
            verdict = []
            for tensors, inputs in ((kept.tensors, True), (outputs, False)):
                flags = [self._is_bad(each.detach(), inputs) for each in tensors if each.device == device]
                flags = [each for each in flags if each is not None]
                verdict.append(torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=device))
            found = torch.stack(verdict)
            if not found.is_cuda:
                self._judge(target, kept, *found.tolist())
                return
            flags = torch.empty(2, dtype=torch.bool, device="cpu", pin_memory=True)
            flags.copy_(found, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            self._waiting.append(_Waiting(target, kept, flags, done))

    def _is_bad(self, tensor: "Any", inputs: bool) -> "Any":
        """Whether NaN or Inf are in it, as a tensor; -Inf alone may be a mask in inputs. None where none can be."""
        if not tensor.is_floating_point() or not tensor.numel():
            return None
        if tensor.element_size() == 1:  # FP8 cannot be compared
            tensor = tensor.float()
        if inputs:
            return (tensor.isnan() | (tensor == float("inf"))).any()
        return (~self._torch.isfinite(tensor)).any()

    def _settle(self, wait: bool) -> None:
        while self._waiting:
            first = self._waiting[0]
            if wait:
                first.done.synchronize()
            elif not first.done.query():
                return
            self._waiting.pop(0)
            self._judge(first.target, first.kept, *first.flags.tolist())

    def _judge(self, target: Target, kept: Input, inputs_bad: bool, output_bad: bool) -> None:
        if output_bad and not inputs_bad and not target.over:
            self.candidates.append(Candidate(target.path, self._culprits[target.path], kept))
            for each in self._targets:
                each.over = True

    # -- at the end ---------------------------------------------------------------------------

    def tell(self) -> "Optional[dict[str, Any]]":
        """What is known of the operator: see bisect.py; None where nothing was bad. Runs operators, the first time."""
        key, place = self.key, self.place
        if key is None or place is None or self._told:
            return None
        from .bisect import bisect  # not before: most programs need none of it

        self._told = True
        self.take_out()
        told: dict[str, Any] = {
            "step": key[0], "order": key[1], "module": place.path, "class_name": place.class_name, "role": place.role,
        }  # fmt: skip
        reasons = []
        if place.role not in ("output", "input"):
            reasons.append("only of what modules give and take in their forward operators are run again")
        else:
            try:
                self._settle(wait=True)
            except Exception as error:
                reasons.append("the device failed: %s" % type(error).__name__)
            for candidate in (*self._from_graphs(), *self.candidates):
                module = candidate.module()
                found = {"why_not": _GONE} if module is None else bisect(module, candidate.kept)
                told.update(found, rerun=candidate.path, exact=candidate.kept.exact)
                if not found["why_not"]:
                    break
                reasons.append(found["why_not"])
            if not any(not candidate.kept.exact for candidate in self.candidates):
                reasons.append(self._why or self._nothing())
        told["why_not"] = "" if told.get("operator") else "; ".join(dict.fromkeys(reasons))
        self.candidates.clear()
        self._targets.clear()
        self._culprits.clear()
        return told

    def _from_graphs(self) -> "list[Candidate]":
        """What replays of CUDA graphs have kept of the module that gave the first bad value."""
        place, found = self.place, []
        try:
            for store in self._numerics.keeping.stores.values():
                kept = store.found() if store is not None else None
                if kept is None or place is None or kept.place is not place:
                    continue
                self._why = kept.why
                for path, inputs in ((place.path, kept.own), (kept.path_around, kept.around)):
                    if inputs is not None and path is not None:
                        inputs.exact = (kept.step, kept.order) == self.key
                        module = self._culprits.get(path)
                        if module is None:
                            self._why = _GONE
                        else:
                            found.append(Candidate(path, module, inputs))
        except Exception as error:
            self._why = "what a CUDA graph kept could not be read: %s" % type(error).__name__
        return found

    def _nothing(self) -> str:
        tries = max((each.tries for each in self._targets), default=0)
        if not tries:
            return "no step that runs in Python came after it was noticed"
        return "in %d steps after it was noticed it gave no bad value from inputs that were fine" % tries
