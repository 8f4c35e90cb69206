"""The agent's parts: what follows steps, launches, captures and tensors, each for itself."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Protocol

    from .agent import Agent
    from .attribution import Attribution
    from .numerics.part import NumericsPart

    class _Part(Protocol):
        def start(self) -> None: ...
        def pause(self) -> None: ...
        def resume(self) -> None: ...
        def finish(self) -> None: ...
        def forget(self) -> None: ...
        def compiler_came(self) -> None: ...


class Parts:
    """Those of one process. None is there before CUDA is used, but for numerics."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._parts: list[_Part] = []
        self.attribution: Attribution | None = None
        self.numerics: NumericsPart | None = None

    def each(self, what: str) -> None:
        """Call this of all, in order."""
        for part in self._parts:
            getattr(part, what)()

    def start(self) -> None:
        """Make those that were asked for, and have them begin."""
        from . import graphs, guests, steps

        agent, options = self._agent, self._agent.options
        follow = options.capture_range and not guests.watch_cudart(agent, sys.modules.get("torch"))
        if options.graph_nodes or follow or options.attribute_steps:
            subscription = graphs.Subscription(agent, follow)
            if options.attribute_steps:
                from .attribution import Attribution

                self.attribution = Attribution(agent, subscription)
                subscription.windows = self.attribution.windows
                self._parts.append(self.attribution)  # it must let go before the subscription does
            self._parts.append(subscription)
        if options.clean_steps:
            self._parts.insert(0, steps.Steps(agent))  # it must know of a step before the launches do
        self._parts = [part for part in self._parts if part is not self.numerics]
        if options.numerics_every:
            self._parts.append(self._numerics_part())
        guests.hide_from_dynamo()
        self.each("start")

    def tick(self) -> None:
        """Now and then, in the agent's thread."""
        if self.attribution is not None:
            self.attribution.tick()
        if self.numerics is not None:
            self.numerics.tick()

    def settle(self) -> None:
        """Let launches that call back come to their end: libcupti 13.0 does not bear a switch in the middle of one."""
        if self.attribution is not None:
            self.attribution.windows.close()
            self.attribution.windows.settle()

    def watch_numerics(self, *models: object) -> None:
        """Begin to scan without CUDA: the models given, or any."""
        from . import guests

        is_new = self.numerics is None
        numerics = self._numerics_part(*models)
        if is_new:
            if self._agent.inherited:
                return
            self._parts.append(numerics)
        guests.hide_from_dynamo()
        numerics.start()

    def _numerics_part(self, *models: object) -> NumericsPart:
        from .numerics.part import NumericsPart

        if self.numerics is None:
            self.numerics = NumericsPart(self._agent, models)
        return self.numerics
