"""CUPTI's callback API: graph nodes as they are created and cloned, cudaProfilerStart/Stop, launches for a while.

A replayed kernel's record carries the id of the *cloned* node; "cloned from" leads back to the node that
was created at capture. These callbacks fire at capture and instantiation only, never on a launch; those of launches
are on in the windows of windows.py.
"""

from __future__ import annotations

import ctypes
import gc
import sys

from . import cbids, cupti
from .events import Clock, RLock, get_ident
from .interrupts import hold_garbage

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import FrameType

    from .agent import Agent
    from .windows import Windows

_NODE_CREATED, _NODE_CLONED = 13, 20
_BATCH = 512
_THREAD_BITS = 0xFFFFFFFF


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
        self.windows: Windows | None = None
        self._nodes: list[tuple[int, ...]] = []  # node, source node, graph, unix ns, module, stack, thread
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
            self._held = False
            self._agent.driver.unsubscribe()

    def resume(self) -> None:
        """Take it back."""
        self.start()

    def compiler_came(self) -> None:
        """Nothing of this is Python that a compiler could trace."""

    def finish(self) -> None:
        """Write what is left; nothing may call back into an interpreter that is ending."""
        self.pause()

    def forget(self) -> None:
        """In a forked child CUPTI calls nobody back."""

    def watch_launches(self, on: bool) -> None:
        """Begin or end calling back at launches. Raises CuptiError where none can be."""
        if not self._held:
            raise cupti.CuptiError("another profiler has the subscription")
        refused = None
        with self._agent.recorder.turn:
            for cbid in cbids.LAUNCHES:
                try:
                    self._agent.driver.watch(cupti.DOMAIN_DRIVER_API, cbid, on)
                except cupti.CuptiError as error:  # an id newer than this library
                    refused = error
                    if cbid == cbids.DRIVER_LAUNCH_KERNEL:
                        raise
        if refused is not None and on:
            self._agent.spool.event(ev="refused", what={"callbacks of some launches": str(refused)})

    def _called(self, _user: int | None, domain: int, cbid: int, data: int) -> None:
        collects = hold_garbage()
        try:
            if domain == cupti.DOMAIN_RESOURCE:
                self._node(cbid, data, sys._getframe().f_back)
            elif cbid in cbids.LAUNCHES and domain == cupti.DOMAIN_DRIVER_API:
                if self.windows is not None:
                    self.windows.launched(data, sys._getframe().f_back)
            else:
                self._profiler_call(cbid, _CallbackData.from_address(data).site)
        except BaseException as error:
            if not self._agent.interrupts.owe(error):
                self._agent.spool.event(ev="fault", where="graphs", text=str(error))
        finally:
            if collects:
                gc.enable()

    def _node(self, cbid: int, data: int, frame: FrameType | None) -> None:
        graph = _GraphData.from_address(_ResourceData.from_address(data).descriptor)
        driver = self._agent.driver
        source = driver.graph_node_id(graph.original_node) if cbid == _NODE_CLONED and graph.original_node else 0
        owner = driver.graph_id(graph.graph) if graph.graph else 0
        at, module, stack = Clock.unix_ns(), -1, -1
        if self.windows is not None and cbid == _NODE_CREATED:
            module, stack = self.windows.node_created(frame, at)
        row = (driver.graph_node_id(graph.node), source, owner, at, module, stack, get_ident() & _THREAD_BITS)
        with self._nodes_lock:
            self._nodes.append(row)
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
