"""The first bad value: which scan saw it, which module gave it, and at the end of the program the operator in it.

Until a record tells of one, nothing is done but to look at what is drained. From then on the inputs of that module, and
of the one around it, are kept (eager_inputs.py, in CUDA graphs graph_inputs.py), and run again at the end (bisect.py).
"""

from ..interrupts import is_ours
from . import records
from .culprits import Candidate, culprits, way_to
from .eager_inputs import EagerInputs

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .places import Place
    from .roots import Root
    from .watch import Numerics

#: Looks at what is drained after the first bad value: one of an earlier module may come a little later.
_LATE_LOOKS = 2

_GONE = "the model was gone by the end"

_NAN, _INF = (records.FIRST_STATISTIC + records.STATISTICS.index(name) for name in ("nan", "inf"))


class FirstBad:
    """Of one watch. ``saw`` and ``look`` may be called by any thread, the rest by the one that is in a step."""

    def __init__(self, numerics: "Numerics") -> None:
        self._numerics = numerics
        self._inputs = EagerInputs(numerics)
        self.key: Optional[tuple[int, int]] = None  # step and order of its scan
        self._place: Optional[Place] = None
        self._modules: dict[str, Callable[[], Any]] = {}  # that may be at fault, by path, the innermost first
        self.busy = False  # whether the next step has something to do for us
        self.fresh = False  # whether it was seen in the call that is just ending
        self._armed: Optional[tuple[int, int]] = None  # the key whose inputs are kept
        self._late = _LATE_LOOKS
        self._why = ""
        self._told = False

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
                self._modules = {path: way_to(module) for path, module in modules}
            except Exception as error:
                if not is_ours(error):
                    raise
                self._why = "its module cannot be told: %s" % type(error).__name__
            self.key, self._place = key, place
            self.fresh = now
            self.busy = True

    def keep_now(self, place: "Place", args: "Any") -> None:
        """It is in what this module is just giving: keep what it took, but for arguments by keyword."""
        self.fresh = False
        module = self._modules.get(place.path)
        if place is self._place and place.role == "output" and not place.writes_input and module is not None:
            self._inputs.keep_now(place.path, module, args)

    def begins(self, root: "Root") -> None:
        """A step begins in this thread: see to it that inputs are kept, as long as any are wanted."""
        key, place = self.key, self._place
        if place is None or place.root != root.number or self._numerics.looks.capturing():
            return
        if self._armed != key:
            self._armed = key
            self._inputs.arm(root, place, self._modules)
        if not self._inputs.go_on() and self._armed == self.key:
            self.busy = False

    def take_out(self) -> None:
        """Take the hooks out."""
        self._inputs.take_out()
        self.busy = False

    def tell(self) -> "Optional[dict[str, Any]]":
        """What is known of the operator: see bisect.py; None where nothing was bad. Runs operators, the first time."""
        key, place = self.key, self._place
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
                self._inputs.settle(wait=True)
            except Exception as error:
                reasons.append("the device failed: %s" % type(error).__name__)
            eager = self._inputs.candidates
            for candidate in (*self._from_graphs(place), *eager):
                module = candidate.module()
                found = {"why_not": _GONE} if module is None else bisect(module, candidate.kept)
                told.update(found, rerun=candidate.path, exact=candidate.kept.exact)
                if not found["why_not"]:
                    break
                reasons.append(found["why_not"])
            if all(candidate.kept.exact for candidate in eager):
                reasons.append(self._why or self._inputs.why_none())
        told["why_not"] = "" if told.get("operator") else "; ".join(dict.fromkeys(reasons))
        self._inputs.clear()
        self._modules.clear()
        return told

    def _from_graphs(self, place: "Place") -> "list[Candidate]":
        """What replays of CUDA graphs have kept of the module that gave it."""
        found = []
        try:
            for store in self._numerics.graph_inputs.stores.values():
                kept = store.found() if store is not None else None
                if kept is None or kept.place is not place:
                    continue
                self._why = kept.why
                for path, inputs in ((place.path, kept.own), (kept.path_around, kept.around)):
                    if inputs is not None and path is not None:
                        inputs.exact = (kept.step, kept.order) == self.key
                        module = self._modules.get(path)
                        if module is None:
                            self._why = _GONE
                        else:
                            found.append(Candidate(path, module, inputs))
        except Exception as error:
            self._why = "what a CUDA graph kept could not be read: %s" % type(error).__name__
        return found
