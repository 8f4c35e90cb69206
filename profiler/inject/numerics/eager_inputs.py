"""Inputs of the modules that may be at fault, copied from the first bad value on, where Python runs in each step.

They are copied asynchronously in each step, until the module gives a bad value again from inputs that were fine. On the
CPU the bad record comes while the module's arguments are still there: they are taken at once.
"""

import sys

from ..events import get_ident
from ..interrupts import is_ours
from .culprits import Candidate
from .inputs import Input, autocast_now
from .mirror import CALLED, Mirror, Refused
from .places import tensors_in
from .roots import Hook

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .places import Place
    from .roots import Root
    from .watch import Numerics

#: Bytes of inputs, over all copies.
BYTES_MAX = 64 << 20

#: Copies that wait for the verdict on their step, and steps after which it is given up.
WAITING_MAX = 4
TRIES_MAX = 1000


class _Target:
    """A module whose inputs are to be kept."""

    def __init__(self, path: str, module: "Callable[[], Any]") -> None:
        self.path, self.module = path, module
        self.over = False
        self.open: list[Input] = []  # copies of calls under way
        self.tries = self.tries_of_bad = 0  # all, and those whose inputs were bad already


class _Waiting:
    """A copy whose verdict is not there yet: ``flags`` are [inputs bad, output bad] in pinned memory."""

    def __init__(self, target: _Target, kept: Input, flags: "Any", done: "Any") -> None:
        self.target, self.kept, self.flags, self.done = target, kept, flags, done


class EagerInputs:
    """Of one watch. Used by the thread that is in a step. ``candidates`` are inputs that can be run again."""

    def __init__(self, numerics: "Numerics") -> None:
        self._numerics, self._torch = numerics, sys.modules["torch"]
        self.candidates: list[Candidate] = []
        self._targets: list[_Target] = []
        self._handles: list[Any] = []
        self._waiting: list[_Waiting] = []
        self._why = ""

    def keep_now(self, path: str, module: "Callable[[], Any]", args: "Any") -> None:
        """Keep the arguments of the call in which the first bad value was seen, if they were fine."""
        try:
            kept = self._copy(args, {}, exact=True)
            if not any(bool(self._is_bad(each, inputs=True)) for each in kept.tensors):
                self.candidates.append(Candidate(path, module, kept))
        except Refused as why:
            self._why = str(why)

    def arm(self, root: "Root", place: "Place", modules: "dict[str, Callable[[], Any]]") -> None:
        """Hook these modules in the place of others."""
        try:
            self._arm(root, place, modules)
        except Exception as error:
            if not is_ours(error, *CALLED):  # of a signal handler of the program's
                raise
            self._give_up(error)

    def go_on(self) -> bool:
        """Whether inputs are still wanted. If not, the hooks are taken out."""
        try:
            self.settle(wait=False)
        except Exception as error:
            if not is_ours(error, *CALLED):  # of a signal handler of the program's
                raise
            self._give_up(error)
        if all(each.over for each in self._targets):
            self.take_out()
        return bool(self._handles)

    def take_out(self) -> None:
        """Take the hooks out."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for target in self._targets:
            target.open.clear()

    def clear(self) -> None:
        """Hold nothing any more."""
        self.candidates.clear()
        self._targets.clear()
        self._waiting.clear()

    def _give_up(self, error: "Exception") -> None:
        self._why = "its inputs could not be kept: %s" % type(error).__name__
        self.take_out()

    def _arm(self, root: "Root", place: "Place", modules: "dict[str, Callable[[], Any]]") -> None:
        self.take_out()
        if place.class_name == "OptimizedModule":  # a hook more in it would have it compiled anew
            self._why = "what torch.compile made of it has no operators to run one by one"
            return
        there = [(_Target(path, way_to), way_to()) for path, way_to in modules.items()]
        self._targets = [target for target, module in there if module is not None]
        for target, module in there:
            if module is None:
                continue
            before = Hook(lambda _, args, kwargs=None, target=target: self._takes(target, args, kwargs or {}))
            after = Hook(lambda _module, _args, output, target=target: self._gave(target, output))
            try:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
            except TypeError:  # torch before 2.0
                handle = module.register_forward_pre_hook(before)
            self._handles += [handle, module.register_forward_hook(after)]
        if root.last is not None:
            root.last()

    def _takes(self, target: _Target, args: "Any", kwargs: "Any") -> None:
        numerics = self._numerics
        if target.over or numerics.thread != get_ident() or not numerics.looking() or numerics.looks.capturing():
            return
        try:
            self.settle(wait=False)
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

    def _gave(self, target: _Target, output: "Any") -> None:
        if self._numerics.thread != get_ident() or not target.open:
            return
        try:
            kind = self._torch.Tensor  # code of other classes may be the program's
            self._await(target, target.open.pop(), [each for each in tensors_in(kind, output) if type(each) is kind])
        except Exception as error:
            if not is_ours(error, *CALLED):
                raise
            self._why, target.over = "its inputs could not be judged: %s" % type(error).__name__, True

    def _copy(self, args: "Any", kwargs: "Any", exact: bool) -> Input:
        torch = self._torch
        tensors: list[Any] = []

        def leaf(tensor: "Any") -> "Any":
            if tensor.layout != torch.strided:
                raise Refused("it takes a tensor of layout %s" % tensor.layout)
            if self._held() + sum(each.nbytes for each in (*tensors, tensor)) > BYTES_MAX:
                raise Refused("its inputs take more than %d MiB" % (BYTES_MAX >> 20))
            tensors.append(tensor.detach().clone())
            return tensors[-1]

        with torch.inference_mode(False):
            mirror = Mirror(leaf)
            args, kwargs = mirror.of(tuple(args)), mirror.of(dict(kwargs))
        device = next((each.device.type for each in tensors), "cpu")
        return Input(args, kwargs, tensors, autocast_now(torch, device), exact)

    def _held(self) -> int:
        kept = [one.kept for one in self.candidates] + [one.kept for one in self._waiting]
        kept += [one for target in self._targets for one in target.open]
        return sum(each.nbytes for one in kept for each in one.tensors)

    # -- verdicts -----------------------------------------------------------------------------

    def _await(self, target: _Target, kept: Input, outputs: "Any") -> None:
        """Ask, on the device, whether the inputs were fine and an output bad."""
        torch = self._torch
        outputs = list(outputs)
        with torch.inference_mode(False):
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

    def settle(self, wait: bool) -> None:
        """Judge the copies whose verdicts are there; ``wait``: all."""
        while self._waiting:
            first = self._waiting[0]
            if wait:
                first.done.synchronize()
            elif not first.done.query():
                return
            self._waiting.pop(0)
            self._judge(first.target, first.kept, *first.flags.tolist())

    def _judge(self, target: _Target, kept: Input, inputs_bad: bool, output_bad: bool) -> None:
        target.tries_of_bad += inputs_bad
        if output_bad and not inputs_bad and not target.over:
            self.candidates.append(Candidate(target.path, target.module, kept))
            for each in self._targets:
                each.over = True

    def why_none(self) -> str:
        """Why no step after the first bad value gave a candidate."""
        if self._why:
            return self._why
        tries = max((each.tries for each in self._targets), default=0)
        if not tries:
            return "no step that runs in Python came after it was noticed"
        if all(each.tries_of_bad >= each.tries for each in self._targets):
            return "in all %d steps after it was noticed, what it took was bad already" % tries
        return "in %d steps after it was noticed it gave no bad value from inputs that were fine" % tries
