"""A module's operators, run again one by one on an input that was kept: which gave the first bad value.

The tape says what runs; nothing of the program's Python does. What operators write to is written to copies.

An operator is to blame whose output holds NaN or Inf while its inputs were fine. Inf that is there by intention
(``masked_fill(mask, -inf)``, a mask among the inputs) blames nobody as long as it stays what it is: a row that is
masked whole becomes NaN in the softmax, and it is that one which is named. What a bad value came through is followed
to the output, so that one which was masked out again on the way is not mistaken for the cause.
"""

import math
import sys
from contextlib import nullcontext

from ..events import Clock
from . import scan_torch
from .formats import FLOAT, FORMATS
from .mirror import Refused
from .tape import Slot, mapped

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

    from .tape import Op, Tape

#: What the re-run may hold at once, beside what the program holds.
BYTES_MAX = 1 << 30

#: Inputs of an operator that are told of.
INPUTS_MAX = 8


#: Operators that give memory as it is: what is in it means nothing.
_UNWRITTEN = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class Look:
    """What a scan of a tensor saw. ``origin`` is the operator that its bad values come from, -1 = none of the tape."""

    __slots__ = ("amax", "first_bad", "inf", "masked", "nan", "origin", "plus")

    def __init__(self, amax: "Optional[float]", nan: int, inf: int, first_bad: int, plus: bool) -> None:
        self.amax, self.nan, self.inf, self.first_bad = amax, nan, inf, first_bad
        self.plus = plus  # whether +Inf is there
        self.masked = inf > 0 and not nan and not plus  # it was put in by intention, where nothing else is known
        self.origin = -1

    @property
    def bad(self) -> bool:
        """Whether NaN or Inf were there."""
        return self.nan + self.inf > 0


class Found:
    """The operator to blame: what went in, what came out."""

    __slots__ = ("before", "inputs", "look", "op", "output")

    def __init__(
        self, op: "Op", before: int, inputs: "list[dict[str, Any]]", output: "dict[str, Any]", look: Look
    ) -> None:
        self.op, self.before, self.inputs, self.output, self.look = op, before, inputs, output, look


class Rerun:
    """One run of a tape: once, as what it writes to stays written."""

    def __init__(self, tape: "Tape", inputs: "list[Any]") -> None:
        self._torch = sys.modules["torch"]
        self._tape = tape
        self._kept = {id(each) for each in inputs}
        self._values: dict[int, Any] = {}
        self._looks: dict[int, Look] = {}
        self._marks: dict[int, tuple[int, bool]] = {}  # memory -> origin of bad values in it, whether by intention
        self._last: dict[int, int] = {}  # slot -> last operator that needs it
        self._blamed: dict[int, Found] = {}
        self._held = 0
        self.ran = 0
        self.stopped = tape.stopped
        self.bad_given = ""  # what is bad already of what no operator makes
        self.gave_bad = False

    def run(self) -> "Optional[Found]":
        """The operator to blame; None where there is none. Raises what torch raises."""
        torch = self._torch
        for number, op in enumerate(self._tape.ops):
            for slot in _slots(op.args, op.kwargs):
                self._last[slot.number] = number
        wanted = {slot.number for slot in self._tape.outputs or ()}
        with torch.inference_mode(False), torch.no_grad(), self._stream():
            self._give()
            for number, op in enumerate(self._tape.ops):
                if Clock.perf_counter_ns() > self._tape.deadline_ns:
                    self.stopped = "the end of its time"
                    break
                if self._held > BYTES_MAX:
                    self.stopped = "%d MiB that it holds" % (BYTES_MAX >> 20)
                    break
                self._one(number, op)
                self.ran = number + 1
                for slot in _slots(op.args, op.kwargs, op.outputs):
                    if self._last.get(slot.number, -1) <= number and slot.number not in wanted:
                        self._drop(slot.number)
            return self._to_blame(wanted)

    def _to_blame(self, wanted: "set[int]") -> "Optional[Found]":
        looks = [self._look(number) for number in sorted(wanted) if number in self._values]
        bad = [look for look in looks if look is not None and look.bad]
        self.gave_bad = bool(bad)
        through = [look.origin for look in bad if look.origin in self._blamed]
        if through:
            return self._blamed[min(through)]
        if self._tape.outputs is None or self.ran < len(self._tape.ops):  # it did not come to its end
            return self._blamed[min(self._blamed)] if self._blamed else None
        return None

    def _stream(self) -> "Any":
        torch = self._torch
        device = next((each.device for each in self._tape.given.values() if each.is_cuda), None)
        if device is None:
            return nullcontext()
        torch.cuda.synchronize(device)
        return torch.cuda.stream(torch.cuda.Stream(device))

    # -- values -------------------------------------------------------------------------------

    def _give(self) -> None:
        """The tensors that no operator makes; those that are written to as copies, with all that share their memory."""
        given, copies = self._tape.given, {}
        written = {given[slot].untyped_storage().data_ptr() for slot in self._tape.written if slot in given}
        for slot, tensor in given.items():
            self._values[slot] = tensor.detach()
            storage = tensor.untyped_storage()
            where = storage.data_ptr()
            if where in written:
                if where not in copies:
                    self._held += storage.nbytes()
                    if self._held > BYTES_MAX:
                        raise Refused("it writes to more than %d MiB" % (BYTES_MAX >> 20))
                    copies[where] = storage.clone()
                layout = tensor.storage_offset(), tensor.size(), tensor.stride()
                empty = self._torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self._values[slot] = empty.set_(copies[where], *layout)
            if id(tensor) in self._kept:
                look = self._look(slot)
                if look is not None and look.bad and not look.masked:
                    self.bad_given = "what it takes"

    def _one(self, number: int, op: "Op") -> None:
        """Run an operator, and judge what it gave by what it took."""
        taken = list({slot.number: slot for slot in _slots(op.args, op.kwargs)})
        before = {slot: self._look(slot) for slot in taken}
        values = self._values
        args, kwargs = (
            mapped(lambda each: values[each.number] if isinstance(each, Slot) else each, value)
            for value in (op.args, op.kwargs)
        )
        told = [self._shown(slot, look) for slot, look in before.items() if look is not None][:INPUTS_MAX]
        given = op.function(*args, **kwargs)
        if op.function._schema.name in _UNWRITTEN:
            given.zero_()
        self._keep(op.outputs, given)
        if op.writes:
            self._forget_aliases(op)
        bad = [look for look in before.values() if look is not None and look.bad]
        for slot in _slots(op.outputs, op.writes):
            look = self._look(slot.number)
            if look is not None and look.bad:
                self._judge(number, op, slot.number, look, bad, told)

    def _judge(
        self, number: int, op: "Op", slot: int, look: Look, before: "list[Look]", told: "list[dict[str, Any]]"
    ) -> None:
        """Whose are the bad values of an output? ``before`` are the looks at the inputs that were bad."""
        spoiled = [each for each in before if not each.masked]
        infinite = _infinite(op)
        if spoiled:
            look.masked, look.origin = False, min([each.origin for each in spoiled if each.origin >= 0], default=-1)
            if look.origin < 0 and not self.bad_given:
                self.bad_given = "a weight or buffer of it"
        elif not look.nan and (before or infinite) and (
            not look.plus or math.inf in infinite or any(each.plus for each in before)
        ):  # fmt: skip
            look.masked = True
        else:
            look.masked, look.origin = False, number
            if number not in self._blamed:
                self._blamed[number] = Found(op, number, told, self._shown(slot, look), look)
        self._marks[self._values[slot].untyped_storage().data_ptr()] = (look.origin, look.masked)

    def _keep(self, slots: "Any", given: "Any") -> None:
        if isinstance(slots, (list, tuple)):
            for slot, value in zip(slots, given):  # noqa: B905 (Python 3.9)
                self._keep(slot, value)
        elif isinstance(slots, Slot) and isinstance(given, self._torch.Tensor):
            if slots.number not in self._values:
                self._held += given.numel() * given.element_size()
            self._values[slots.number] = given
            self._looks.pop(slots.number, None)

    def _drop(self, slot: int) -> None:
        value = self._values.pop(slot, None)
        self._looks.pop(slot, None)
        if value is not None and slot not in self._tape.given:
            self._held -= value.numel() * value.element_size()

    def _forget_aliases(self, op: "Op") -> None:
        """What was seen of tensors in memory that this operator has written to."""
        written = {self._values[slot.number].untyped_storage().data_ptr() for slot in op.writes}
        for slot, value in self._values.items():
            if value.untyped_storage().data_ptr() in written:
                self._looks.pop(slot, None)

    # -- looks --------------------------------------------------------------------------------

    def _look(self, slot: int) -> "Optional[Look]":
        """What is in the tensor of a slot; None where its numbers cannot be bad."""
        known = self._looks.get(slot)
        tensor = self._values.get(slot)  # some operators give nothing where they could
        if known is None and tensor is not None:
            known = look_at(tensor)
            if known is not None:
                self._looks[slot] = known
                mark = self._marks.get(tensor.untyped_storage().data_ptr()) if known.bad else None
                if mark is not None:
                    known.origin, known.masked = mark
        return known

    def _shown(self, slot: int, look: Look) -> "dict[str, Any]":
        return shown(self._values[slot], look)


def look_at(tensor: "Any") -> "Optional[Look]":
    """What is in a tensor; None where its numbers cannot be bad. Waits for the device."""
    pairs = tensor.is_complex()
    if pairs:
        tensor = sys.modules["torch"].view_as_real(tensor.resolve_conj())
    form = FORMATS.get(str(tensor.dtype).rpartition(".")[2])
    if form is None or form.kind != FLOAT or not tensor.numel():
        return None
    amax, _, nan, inf, _, _, _, first_bad = scan_torch.scan(tensor, form)[:8]
    first_bad = first_bad // 2 if pairs else first_bad
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # FP8 cannot be compared
    return Look(form.value(amax), nan, inf, first_bad, plus=inf > 0 and bool((wide == math.inf).any()))


def shown(tensor: "Any", look: Look) -> "dict[str, Any]":
    """A tensor for the event."""
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype).rpartition(".")[2], "amax": look.amax,
        "nan": look.nan, "inf": look.inf,
    }  # fmt: skip


def _slots(*values: "Any") -> "list[Slot]":
    found: list[Slot] = []

    def add(each: "Any") -> None:
        if isinstance(each, Slot):
            found.append(each)

    mapped(add, values)
    return found


def _infinite(op: "Op") -> "list[float]":
    """The infinite numbers among its arguments."""
    found: list[float] = []

    def see(each: "Any") -> None:
        if isinstance(each, float) and math.isinf(each):
            found.append(each)

    mapped(see, (op.args, op.kwargs))
    return found
