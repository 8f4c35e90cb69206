"""Names of the modules that are being called: each gets a number, the one that called it, and a path below its root.

Nothing is hooked: modules come from the frames of ``nn.Module.__call__`` (frames.py), outermost first. A path is looked
for below the module that called, in ``_modules`` as it stands there, so a module shared by two parents has a path under
each, and no code of the program runs. Modules are held weakly; one that takes the place of another, under the same
name and of the same class, takes over its number.
"""

import sys
import weakref
from collections import deque

from .events import RLock

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Optional

#: Numbers given out; what is called beyond belongs to the module that called it.
MODULES_MAX = 65_536

#: Live roots of one class that are told apart, and roots in which a module that is called from outside is looked for.
_ROOTS_MAX = 64

#: Entries of one module's table of the modules it called, which objects made for one call would fill.
_KNOWN_MAX = 4096


class Node:
    """One module as called by another."""

    __slots__ = ("children", "index", "named", "names", "parent", "path", "ref", "walk")

    def __init__(self, index: int, parent: "Optional[Node]", path: str, module: "Any") -> None:
        self.index, self.parent, self.path = index, parent, path
        self.ref = weakref.ref(module)
        self.children: "dict[int, tuple[weakref.ref[Any], Node]]" = {}  # by id of the module object
        self.named: "dict[tuple[str, str], Node]" = {}  # by name below this one, and class
        self.names: "dict[int, str]" = {}  # id -> name, as far as the walk has come
        self.walk: "Optional[Iterator[tuple[int, str]]]" = None

    def name_of(self, module: "Any") -> "Optional[str]":
        """Name of a module below this one; None when it is not registered there."""
        top = self.ref()
        if top is None:
            return None
        for _ in range(2):  # a second time from the start: modules may have been replaced since
            name = self._walked_to(top, module)
            if name is not None and _below(top, name) is module:
                return name
            self.names, self.walk = {}, None
        return None

    def _walked_to(self, top: "Any", module: "Any") -> "Optional[str]":
        wanted = id(module)
        if self.walk is None:
            self.walk = _names_below(weakref.ref(top))
        if wanted not in self.names:
            for identity, name in self.walk:
                self.names.setdefault(identity, name)
                if identity == wanted:
                    break
        return self.names.get(wanted)


class Modules:
    """All modules seen in this process. ``rows`` are those that are yet to be written."""

    def __init__(self) -> None:
        self.rows: "list[tuple[int, int, str, str]]" = []  # index, parent or -1, path, class
        self.beyond = 0
        self._count = 0
        self._lock = RLock()
        self._top: "dict[int, tuple[weakref.ref[Any], Node]]" = {}
        self._roots: "dict[str, list[Node]]" = {}  # by class

    def index(self, chain: "list[Any]") -> int:
        """Number of the innermost of the modules that are being called, outermost first; -1 for none."""
        node: "Optional[Node]" = None
        before: "Any" = None
        for module in map(plain, chain):
            if module is before or module is None:  # a class's own __call__ and the one it goes on to
                continue
            before = module
            known = (self._top if node is None else node.children).get(id(module))
            if known is not None and known[0]() is module:
                node = known[1]
            else:
                with self._lock:
                    node = self._root(module) if node is None else self._child(node, module)
        return -1 if node is None else node.index

    def _root(self, module: "Any") -> Node:
        node = self._inside_a_root(module)
        if node is None:
            kind = type(module).__name__
            alike = self._roots.setdefault(kind, [])
            node = next((root for root in alike if root.ref() is None), None)
            if node is None and len(alike) >= _ROOTS_MAX:
                node = alike[0]
            if node is None:
                node = self._made(None, "", module)
                alike.append(node)
            else:
                _rebind(node, module)
        _remember(self._top, module, node)
        return node

    def _inside_a_root(self, module: "Any") -> "Optional[Node]":
        """A part of a known model that is called from outside of it."""
        roots = [root for alike in self._roots.values() for root in alike][:_ROOTS_MAX]
        for root in roots:
            name = root.name_of(module)
            if name is not None:
                return self._child(root, module)
        return None

    def _child(self, node: Node, module: "Any") -> Node:
        up: "Optional[Node]" = node
        while up is not None:  # modules that call each other
            if up.ref() is module:
                _remember(node.children, module, up)
                return up
            up = up.parent
        kind = type(module).__name__
        name = node.name_of(module) or "<%s>" % kind
        found = node.named.get((name, kind))
        if found is None:
            if self._count >= MODULES_MAX:
                self.beyond += 1
                return node
            found = self._made(node, "%s.%s" % (node.path, name) if node.path else name, module)
            node.named[name, kind] = found
        elif found.ref() is not module:
            _rebind(found, module)
        _remember(node.children, module, found)
        return found

    def _made(self, parent: "Optional[Node]", path: str, module: "Any") -> Node:
        node = Node(self._count, parent, path, module)
        self._count += 1
        self.rows.append((node.index, -1 if parent is None else parent.index, path, type(module).__name__))
        return node


def plain(module: "Any") -> "Any":
    """The module itself, where torch.compile has wrapped it: the same paths with and without."""
    while type(module).__name__ == "OptimizedModule":
        inner = _submodules(module).get("_orig_mod")
        if inner is None:
            break
        module = inner
    return module


def _remember(table: "dict[int, tuple[weakref.ref[Any], Node]]", module: "Any", node: Node) -> None:
    if len(table) >= _KNOWN_MAX:
        table.clear()
    table[id(module)] = (weakref.ref(module), node)


def _rebind(node: Node, module: "Any") -> None:
    node.ref = weakref.ref(module)
    node.names, node.walk = {}, None


def _submodules(module: "Any") -> "dict[str, Any]":
    """``_modules`` as it stands in the object."""
    found = held_by(module).get("_modules")
    return found if isinstance(found, dict) else {}


def held_by(module: "Any") -> "dict[str, Any]":
    """The object's own ``__dict__``: attribute access, and a class's ``__dict__``, may be the program's own code."""
    base = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    own = vars(base).get("__dict__") if base is not None and issubclass(type(module), base) else None
    try:
        found = object.__getattribute__(module, "__dict__") if own is None else own.__get__(module)
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _names_below(top: "weakref.ref[Any]") -> "Iterator[tuple[int, str]]":
    """(id, name) of all modules below, nearest first, each once. While it rests it keeps none of them alive."""
    seen: "set[int]" = set()
    waiting = deque([("", top)])
    while waiting:
        for identity, below, child in _children(*waiting.popleft(), seen):
            yield identity, below
            waiting.append((below, child))


def _children(path: str, ref: "weakref.ref[Any]", seen: "set[int]") -> "list[tuple[int, str, weakref.ref[Any]]]":
    """The modules right below one that were not ``seen`` yet."""
    found = []
    module = ref()
    seen.add(id(module))
    for name, registered in list(_submodules(module).items()):
        child = plain(registered)
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        try:
            found.append((id(child), "%s.%s" % (path, name) if path else str(name), weakref.ref(child)))
        except TypeError:  # no module
            pass
    return found


def _below(top: "Any", path: str) -> "Any":
    """The module at a path. A name may hold dots itself, so the longest that fits is taken."""
    while path and top is not None:
        children = _submodules(top)
        name = path
        while name not in children and "." in name:
            name = name.rpartition(".")[0]
        top = plain(children.get(name))
        path = path[len(name) + 1 :]
    return top
