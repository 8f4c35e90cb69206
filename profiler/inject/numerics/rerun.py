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
from .contents import Contents, contents_of, shown
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


class Found:
    """The operator to blame: what went in, what came out."""

    __slots__ = ("before", "inputs", "op", "output", "seen")

    def __init__(
        self, op: "Op", before: int, inputs: "list[dict[str, Any]]", output: "dict[str, Any]", seen: Contents
    ) -> None:
        self.op, self.before, self.inputs, self.output, self.seen = op, before, inputs, output, seen


class Rerun:
    """One run of a tape: once, as what it writes to stays written."""

    def __init__(self, tape: "Tape", inputs: "list[Any]") -> None:
        self._torch = sys.modules["torch"]
        self._tape = tape
        self._kept = {id(each) for each in inputs}
        self._values: dict[int, Any] = {}
        self._known: dict[int, Contents] = {}
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
        every = [self._see(number) for number in sorted(wanted) if number in self._values]
        bad = [seen for seen in every if seen is not None and seen.bad]
        self.gave_bad = bool(bad)
        through = [seen.origin for seen in bad if seen.origin in self._blamed]
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
                seen = self._see(slot)
                if seen is not None and seen.bad and not seen.masked:
                    self.bad_given = "what it takes"

    def _one(self, number: int, op: "Op") -> None:
        """Run an operator, and judge what it gave by what it took."""
        taken = list({slot.number: slot for slot in _slots(op.args, op.kwargs)})
        before = {slot: self._see(slot) for slot in taken}
        values = self._values
        args, kwargs = (
            mapped(lambda each: values[each.number] if isinstance(each, Slot) else each, value)
            for value in (op.args, op.kwargs)
        )
        told = [self._shown(slot, seen) for slot, seen in before.items() if seen is not None][:INPUTS_MAX]
        given = op.function(*args, **kwargs)
        if op.function._schema.name in _UNWRITTEN:
            given.zero_()
        self._keep(op.outputs, given)
        if op.writes:
            self._forget_aliases(op)
        bad = [seen for seen in before.values() if seen is not None and seen.bad]
        for slot in _slots(op.outputs, op.writes):
            seen = self._see(slot.number)
            if seen is not None and seen.bad:
                self._judge(number, op, slot.number, seen, bad, told)

    def _judge(
        self, number: int, op: "Op", slot: int, seen: Contents, before: "list[Contents]", told: "list[dict[str, Any]]"
    ) -> None:
        """Whose are the bad values of an output? ``before`` are those of the inputs that were bad."""
        spoiled = [each for each in before if not each.masked]
        infinite = _infinite(op)
        if spoiled:
            seen.masked, seen.origin = False, min([each.origin for each in spoiled if each.origin >= 0], default=-1)
            if seen.origin < 0 and not self.bad_given:
                self.bad_given = "a weight or buffer of it"
        elif not seen.nan and (before or infinite) and (
            not seen.plus or math.inf in infinite or any(each.plus for each in before)
        ):  # fmt: skip
            seen.masked = True
        else:
            seen.masked, seen.origin = False, number
            if number not in self._blamed:
                self._blamed[number] = Found(op, number, told, self._shown(slot, seen), seen)
        self._marks[self._values[slot].untyped_storage().data_ptr()] = (seen.origin, seen.masked)

    def _keep(self, slots: "Any", given: "Any") -> None:
        if isinstance(slots, (list, tuple)):
            for slot, value in zip(slots, given):  # noqa: B905 (Python 3.9)
                self._keep(slot, value)
        elif isinstance(slots, Slot) and isinstance(given, self._torch.Tensor):
            if slots.number not in self._values:
                self._held += given.numel() * given.element_size()
            self._values[slots.number] = given
            self._known.pop(slots.number, None)

    def _drop(self, slot: int) -> None:
        value = self._values.pop(slot, None)
        self._known.pop(slot, None)
        if value is not None and slot not in self._tape.given:
            self._held -= value.numel() * value.element_size()

    def _forget_aliases(self, op: "Op") -> None:
        """What was seen of tensors in memory that this operator has written to."""
        written = {self._values[slot.number].untyped_storage().data_ptr() for slot in op.writes}
        for slot, value in self._values.items():
            if value.untyped_storage().data_ptr() in written:
                self._known.pop(slot, None)

    # -- what is in them ----------------------------------------------------------------------

    def _see(self, slot: int) -> "Optional[Contents]":
        """What is in the tensor of a slot; None where its numbers cannot be bad."""
        known = self._known.get(slot)
        tensor = self._values.get(slot)  # some operators give nothing where they could
        if known is None and tensor is not None:
            known = contents_of(tensor)
            if known is not None:
                self._known[slot] = known
                mark = self._marks.get(tensor.untyped_storage().data_ptr()) if known.bad else None
                if mark is not None:
                    known.origin, known.masked = mark
        return known

    def _shown(self, slot: int, seen: Contents) -> "dict[str, Any]":
        return shown(self._values[slot], seen)


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
