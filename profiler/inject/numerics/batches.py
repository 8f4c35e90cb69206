"""What is launched for tensors that waited: rows of the scanners' table, and which of them are the same.

A program does the same step after step. So what became of a batch is kept, with all that it depended on: shapes,
dtypes, how the tensors lie, which of them were written to, which are one and the same. Where all that is as the last
time, which loops in C find out, only addresses are new.
"""

import operator
from array import array
from functools import reduce

from . import records
from .scanner import ALIGNED, ROW_WORDS, Launch, Unchecked

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Optional

    from .formats import Format
    from .looks import Looks
    from .places import Spot
    from .scanner import TritonScanner
    from .waiting import Waiting

    #: A tensor on its way into a launch: whether programs share it, its place in the batch, its row, its shape.
    _Row = tuple[bool, int, list[int], list[int]]

#: Tensors in all batches that are kept.
_KEPT_MAX = 16384

_shape, _dtype, _version = (operator.attrgetter(name) for name in ("shape", "dtype", "_version"))


class Plan:
    """What became of a batch, and all that it depended on."""

    def __init__(self, waiting: "Waiting") -> None:
        self.begin, self.spots = waiting.begin, waiting.spots[:]
        self.shapes: list[Any] = []
        self.dtypes: list[Any] = []
        self.same: list[tuple[int, int]] = []  # tensors that are an earlier one of the batch
        self.sent: list[tuple[int, Spot]] = []  # and those of an earlier batch
        self.launches: list[Launch] = []
        self.scanned: list[list[int]] = []  # for each launch its tensors
        self.others: list[int] = []  # tensors of another device
        self.lasting = True


class Batches:
    """Of one watch."""

    def __init__(self, looks: "Looks") -> None:
        self._looks = looks
        tensor = looks.tensor
        self._address, self._device, self._packed = tensor.data_ptr, tensor.get_device, tensor.is_contiguous
        self._plans: dict[Any, Plan] = {}  # by the first spot and the first shape
        self._kept = 0

    def plan(self, waiting: "Waiting", scanner: "TritonScanner") -> Plan:
        """What is to be launched for what waits."""
        key = waiting.spots[0], waiting.tensors[0].shape
        plan = self._plans.get(key)
        try:
            if plan is not None and self._fits(plan, waiting):
                return plan
        except RuntimeError:  # a tensor without a version, or without memory
            pass
        made = self._made(waiting, scanner)
        if made.lasting:
            self._kept += len(made.spots) - (len(plan.spots) if plan is not None else 0)
            if self._kept > _KEPT_MAX:
                self._plans.clear()
                self._kept = len(made.spots)
            self._plans[key] = made
        return made

    def _fits(self, plan: Plan, waiting: "Waiting") -> bool:
        """Whether all is as the last time; then the addresses in the plan are those of now."""
        tensors = waiting.tensors
        if not (
            waiting.begin == plan.begin
            and waiting.spots == plan.spots
            and list(map(_shape, tensors)) == plan.shapes
            and list(map(_dtype, tensors)) == plan.dtypes
            and all(map(self._packed, tensors))
            and set(map(self._device, tensors)) == {waiting.device}
            and self._are_the_same(plan, waiting)
        ):
            return False
        if not waiting.inference and (None in waiting.versions or list(map(_version, tensors)) != waiting.versions):
            return False
        addresses = list(map(self._address, tensors))
        if reduce(operator.or_, addresses) & (ALIGNED - 1):
            return False
        for launch, scanned in zip(plan.launches, plan.scanned):  # noqa: B905 (Python 3.9)
            launch.rows[::ROW_WORDS] = array("q", [addresses[at] for at in scanned])
        return True

    def _are_the_same(self, plan: Plan, waiting: "Waiting") -> bool:
        """Whether those tensors are one and the same that were it the last time, and no others."""
        tensors, looks = waiting.tensors, self._looks
        ids = set(map(id, tensors))
        if len(ids) + len(plan.same) != len(tensors) or looks.sent_of(ids) != len(plan.sent):
            return False
        versions = waiting.versions or [None] * len(tensors)
        return all(tensors[at] is tensors[earlier] for at, earlier in plan.same) and all(
            looks.sent(tensors[at], versions[at]) is spot for at, spot in plan.sent
        )

    def _made(self, waiting: "Waiting", scanner: "TritonScanner") -> Plan:
        plan, looks = Plan(waiting), self._looks
        changed: set[int] = set()
        forms: dict[int, Format] = {}
        groups: dict[tuple[int, bool], list[_Row]] = {}
        for at in self._not_seen(waiting, plan, changed):
            spot, tensor = waiting.spots[at], waiting.tensors[at]
            form = looks.form(spot.place, tensor)
            if form is None or tensor.get_device() != waiting.device:
                plan.lasting = False
                if form is not None:
                    plan.others.append(at)
                continue
            version = waiting.versions[at] if waiting.versions else None
            if version is not None and tensor._version != version:
                changed.add(at)
            try:
                tag = records.tag_of(waiting.begin + at, form.number, spot.point)
                strided, row, shape = scanner.row_of(tensor, form, tag)
            except (Unchecked, RuntimeError) as why:  # those of torch.func have no memory
                looks.unchecked(spot.place.path, str(why) if isinstance(why, Unchecked) else "a tensor without memory")
                plan.lasting = False
                continue
            wide = scanner.is_wide(tensor.numel(), form, strided)
            forms[form.number] = form
            groups.setdefault((form.number, strided), []).append((wide, at, row, shape))
            plan.lasting = plan.lasting and not strided
        for own in groups.values():
            for _, at, row, _ in own:
                row[-1] |= records.CHANGED if at in changed else records.LATER
        _launch(plan, forms, groups)
        plan.lasting = plan.lasting and not changed
        if plan.lasting:
            plan.shapes, plan.dtypes = list(map(_shape, waiting.tensors)), list(map(_dtype, waiting.tensors))
        return plan

    def _not_seen(self, waiting: "Waiting", plan: Plan, changed: "set[int]") -> "Iterator[int]":
        """Tensors that are none of an earlier one of the step; ``changed`` are those that a later one has changed."""
        looks = self._looks
        seen: dict[int, int] = {}
        versions = waiting.versions or [None] * len(waiting.tensors)
        for at, (spot, tensor, version) in enumerate(zip(waiting.spots, waiting.tensors, versions)):  # noqa: B905
            earlier = seen.get(id(tensor))
            if earlier is not None:
                if versions[earlier] == version and not spot.place.writes_input:
                    looks.note_same(spot, waiting.spots[earlier])
                    plan.same.append((at, earlier))
                    continue
                changed.add(earlier)
            other = looks.sent(tensor, version)
            if other is not None and not spot.place.writes_input:
                looks.note_same(spot, other)
                plan.sent.append((at, other))
                continue
            seen[id(tensor)] = at
            yield at


def _launch(plan: Plan, forms: "dict[int, Format]", groups: "dict[tuple[int, bool], list[_Row]]") -> None:
    """One launch for each format, of strided ones apart: those that programs share come first."""
    for (number, strided), own in groups.items():
        own.sort(key=lambda one: not one[0])
        words = [word for _, _, row, _ in own for word in row]
        shapes = [word for _, _, _, shape in own for word in shape]
        plan.launches.append(Launch(forms[number], strided, sum(one[0] for one in own), words, shapes))
        plan.scanned.append([at for _, at, _, _ in own])


def held(plan: Plan, waiting: "Waiting") -> "list[tuple[Any, Spot, Optional[int], int]]":
    """(tensor, spot, version, tag) of those that were scanned, in order."""
    rows = []
    for launch, scanned in zip(plan.launches, plan.scanned):  # noqa: B905 (Python 3.9)
        for at, tag in zip(scanned, launch.rows[2::ROW_WORDS]):  # noqa: B905
            version = waiting.versions[at] if waiting.versions else None
            rows.append((waiting.tensors[at], waiting.spots[at], version, tag))
    rows.sort(key=lambda row: records.order_of(row[3]))
    return rows
