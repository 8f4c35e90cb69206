"""CUPTI's callback API: graph nodes as they are created and cloned, and cudaProfilerStart/Stop.

A replayed kernel's record carries the id of the *cloned* node; "cloned from" leads back to the node that
was created at capture. Callbacks fire at capture and instantiation only, never on a launch.
"""

from __future__ import annotations

import ctypes

from . import cbids, cupti
from .events import Clock, RLock

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from .agent import Agent

_NODE_CREATED, _NODE_CLONED = 13, 20
_BATCH = 512


class _ResourceData(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.c_void_p)]


class _GraphData(ctypes.Structure):
    _fields_ = [
        ("graph", ctypes.c_void_p),
        ("original_graph", ctypes.c_void_p),
        ("node", ctypes.c_void_p),
        ("original_node", ctypes.c_void_p),
        ("node_type", ctypes.c_int),
        ("dependency", ctypes.c_void_p),
        ("graph_exec", ctypes.c_void_p),
    ]


class _CallbackData(ctypes.Structure):
    _fields_ = [("site", ctypes.c_int)]  # 0 = entering the call, 1 = leaving it


class Subscription:
    """The process's one CUPTI subscriber, given up whenever a guest needs it."""

    def __init__(self, agent: Agent, follow_range: bool) -> None:
        self._agent = agent
        self._follow_range = follow_range
        self._callback = cupti.CALLBACK_TYPE(self._called)
        agent.interrupts.watch(self._called)
        self._points: list[tuple[int, int]] = []
        if agent.options.graph_nodes:
            self._points += [(cupti.DOMAIN_RESOURCE, _NODE_CREATED), (cupti.DOMAIN_RESOURCE, _NODE_CLONED)]
        if follow_range:
            self._points += [
                (cupti.DOMAIN_RUNTIME_API, cbids.RUNTIME_PROFILER_START),
                (cupti.DOMAIN_RUNTIME_API, cbids.RUNTIME_PROFILER_STOP),
                (cupti.DOMAIN_DRIVER_API, cbids.DRIVER_PROFILER_START),
                (cupti.DOMAIN_DRIVER_API, cbids.DRIVER_PROFILER_STOP),
            ]
        self._nodes: list[list[int]] = []  # [node id, source node id, graph id, unix ns]
        self._nodes_lock = RLock()
        self._held = False

    def start(self) -> None:
        """Subscribe; where another profiler holds the subscription, say so and do without."""
        if self._agent.yielded:  # it may be about to: resume() comes back here
            return
        try:
            self._agent.driver.subscribe(self._callback, self._points)
            self._held = True
        except cupti.CuptiError as error:
            self._agent.spool.event(ev="refused", what={"graph nodes": str(error)})
            if self._follow_range:
                self._agent.set_condition("range", "--capture-range cannot be followed: %s" % error)

    def pause(self) -> None:
        """Give the subscription to a guest."""
        self._write_nodes()
        if self._held:
            self._agent.driver.unsubscribe()
            self._held = False

    def resume(self) -> None:
        """Take it back."""
        self.start()

    def compiler_came(self) -> None:
        """Nothing of this is Python that a compiler could trace."""

    def finish(self) -> None:
        """Write what is left; nothing may call back into an interpreter that is ending."""
        self.pause()

    def _called(self, _user: int | None, domain: int, cbid: int, data: int) -> None:
        try:
            if domain == cupti.DOMAIN_RESOURCE:
                self._node(cbid, data)
            else:
                self._profiler_call(cbid, _CallbackData.from_address(data).site)
        except BaseException as error:
            if not self._agent.interrupts.owe(error):
                self._agent.spool.event(ev="fault", where="graphs", text=str(error))

    def _node(self, cbid: int, data: int) -> None:
        graph = _GraphData.from_address(_ResourceData.from_address(data).descriptor)
        driver = self._agent.driver
        source = driver.graph_node_id(graph.original_node) if cbid == _NODE_CLONED and graph.original_node else 0
        owner = driver.graph_id(graph.graph) if graph.graph else 0
        with self._nodes_lock:
            self._nodes.append([driver.graph_node_id(graph.node), source, owner, Clock.unix_ns()])
            full = len(self._nodes) >= _BATCH
        if full:
            self._write_nodes()

    def _profiler_call(self, cbid: int, site: int) -> None:
        if cbid in (cbids.RUNTIME_PROFILER_START, cbids.DRIVER_PROFILER_START):
            if site == 1:
                self._agent.set_condition("range", None)
        elif site == 0:
            self._agent.set_condition("range", "after cudaProfilerStop")

    def _write_nodes(self) -> None:
        with self._nodes_lock:
            nodes, self._nodes = self._nodes, []
        if nodes:
            self._agent.spool.event(ev="graph_nodes", nodes=nodes)
