"""What is launched for tensors that waited: rows of the scanners' table, and which of them are the same.

A program does the same step after step. So what became of a batch is kept, with all that it depended on: shapes,
dtypes, how the tensors lie, which of them were written to, which are one and the same. Where all that is as the last
time, only addresses are new. That is asked of all tensors in a few calls: torch's compiler has one for it.
"""

import operator
from array import array

from ..interrupts import is_from_handler, is_ours
from . import records
from .scanner import ALIGNED, ITEMS, ROW_WORDS, Launch, Unchecked

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Optional

    from .formats import Format
    from .looks import Looks
    from .places import Spot
    from .scanner import TritonScanner
    from .waiting import Waiting

    #: A tensor on its way into a launch: its place in the batch, its row, its shape.
    _Row = tuple[int, list[int], list[int]]

#: Tensors in all batches that are kept.
_KEPT_MAX = 16384

#: Lowest bytes of addresses that are aligned, and how many bytes an address has. Hosts of GPUs are little endian.
_ALIGNED = bytes(range(0, 256, ALIGNED))
_ADDRESS = 8

_version, _is_nested = operator.attrgetter("_version"), operator.attrgetter("is_nested")


class Plan:
    """What became of a batch, and all that it depended on."""

    def __init__(self, waiting: "Waiting") -> None:
        self.begin, self.spots = waiting.begin, waiting.spots[:]
        #: Whether tensors are all different ones, and of these classes, dtypes, devices, sizes and strides.
        self.fits: Callable[..., bool] = _never
        self.chosen: Callable[[list[Any]], Any] = tuple  # those of a batch that are scanned, in this order
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
        self._address = looks.tensor.data_ptr
        self._plans: dict[Any, Plan] = {}  # by the first spot and bytes of the first tensor
        self._kept = 0

    def plan(self, waiting: "Waiting", scanner: "TritonScanner") -> Plan:
        """What is to be launched for what waits."""
        key = waiting.spots[0], waiting.tensors[0].nbytes
        plan = self._plans.get(key)
        try:
            if plan is not None and self._fits(plan, waiting):
                return plan
        except RuntimeError as error:  # a tensor without a version, or without memory
            if not is_ours(error):  # of a signal handler of the program's
                raise
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
        if waiting.begin != plan.begin or waiting.spots != plan.spots:
            return False
        own = plan.chosen(waiting.tensors)
        # The check asks for sizes and strides, and ends the process where there are none; an address only raises.
        if True in map(_is_nested, own):
            return False
        addresses = list(map(self._address, own))
        if not (plan.fits(*own) and _are_there(own, addresses) and self._are_the_same(plan, waiting, own)):
            return False
        versions = waiting.versions
        if not waiting.inference and (None in versions or list(map(_version, waiting.tensors)) != versions):
            return False
        now, begin = array("q", addresses), 0
        if now.tobytes()[::_ADDRESS].translate(None, _ALIGNED):  # something is left of those that are not
            return False
        for launch, scanned in zip(plan.launches, plan.scanned):  # noqa: B905 (Python 3.9)
            end = begin + len(scanned)
            launch.rows[::ROW_WORDS] = now[begin:end]
            begin = end
        return True

    def _are_the_same(self, plan: Plan, waiting: "Waiting", own: "Any") -> bool:
        """Whether those that were an earlier tensor are it again, and no others one of an earlier batch."""
        tensors, looks = waiting.tensors, self._looks
        any_sent = looks.any_sent(own)
        if any_sent or plan.sent:
            versions = waiting.versions or [None] * len(tensors)
            if any_sent and any(
                looks.sent(tensors[at], versions[at]) is not None and not waiting.spots[at].place.writes_input
                for scanned in plan.scanned
                for at in scanned
            ):
                return False
            if not all(looks.sent(tensors[at], versions[at]) is spot for at, spot in plan.sent):
                return False
        return not plan.same or all(tensors[at] is tensors[earlier] for at, earlier in plan.same)

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
                if not is_ours(why):  # of a signal handler of the program's
                    raise
                looks.unchecked(spot.place.path, str(why) if isinstance(why, Unchecked) else "a tensor without memory")
                plan.lasting = False
                continue
            forms[form.number] = form
            groups.setdefault((form.number, strided), []).append((at, row, shape))
            plan.lasting = plan.lasting and not strided
        for own in groups.values():
            for at, row, _ in own:
                row[-1] |= records.CHANGED if at in changed else records.LATER
        _launch(plan, forms, groups)
        plan.lasting = plan.lasting and not changed
        if plan.lasting:
            plan.chosen = _getter([at for scanned in plan.scanned for at in scanned])
            plan.fits = check_of(looks.torch, plan.chosen(waiting.tensors))
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


def check_of(torch: "Any", tensors: "Any") -> "Callable[..., bool]":
    """Whether as many tensors are all different ones, and of the same classes, dtypes, devices, sizes and strides.

    That is what torch's compiler asks of the inputs of what it has compiled; where this torch has it in another form,
    the same is asked of one tensor after the other.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(each.shape) for each in tensors],
            dynamic_dims_strides=[list(each.stride()) for each in tensors],
        )
        if guards.check(*tensors):
            return guards.check  # type: ignore[no-any-return]
    except Exception as error:
        if is_from_handler(error):
            raise
    known = _described(tensors)
    return lambda *others: len(set(map(id, others))) == len(others) and _described(others) == known


def _described(tensors: "Any") -> "list[Any]":
    return [(type(each), each.shape, each.dtype, each.device, each.stride()) for each in tensors]


def _are_there(tensors: "Any", addresses: "list[int]") -> bool:
    """Whether all have memory, or need none."""
    return all(addresses) or not any(
        each.numel() and not address
        for each, address in zip(tensors, addresses)  # noqa: B905 (Python 3.9)
    )


def _never(*_: object) -> bool:
    return False


def _getter(places: "list[int]") -> "Callable[[list[Any]], Any]":
    """These elements of a list."""
    if len(places) == 1:
        (only,) = places
        return lambda values: (values[only],)
    return operator.itemgetter(*places) if places else lambda _: ()


def _launch(plan: Plan, forms: "dict[int, Format]", groups: "dict[tuple[int, bool], list[_Row]]") -> None:
    """One launch for each format, of strided ones apart."""
    for (number, strided), own in groups.items():
        own.sort(key=lambda one: -one[1][ITEMS])
        words = [word for _, row, _ in own for word in row]
        shapes = [word for _, _, shape in own for word in shape]
        plan.launches.append(Launch(forms[number], strided, words, shapes))
        plan.scanned.append([at for at, _, _ in own])


def held(plan: Plan, waiting: "Waiting") -> "list[tuple[Any, Spot, Optional[int], int]]":
    """(tensor, spot, version, tag) of those that were scanned, in order."""
    rows = []
    for launch, scanned in zip(plan.launches, plan.scanned):  # noqa: B905 (Python 3.9)
        for at, tag in zip(scanned, launch.rows[2::ROW_WORDS]):  # noqa: B905
            version = waiting.versions[at] if waiting.versions else None
            rows.append((waiting.tensors[at], waiting.spots[at], version, tag))
    rows.sort(key=lambda row: records.order_of(row[3]))
    return rows
