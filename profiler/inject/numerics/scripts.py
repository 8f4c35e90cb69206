"""``torch.jit`` compiles the hooks of what it scripts, which ours are not made for: they are not there meanwhile."""

import sys
from contextlib import nullcontext

from ..interrupts import is_ours, leave_out_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

_PLACE, _NAME = "torch.jit._recursive", "create_script_module"

_users = 0


def put_in() -> None:
    """Have our hooks hidden from ``torch.jit.script``, until the last who asked for it asks no more."""
    global _users
    _users += 1
    module = sys.modules.get(_PLACE)
    original = getattr(module, _NAME, None)
    if type(original) is type(put_in) and not hasattr(original, "of_spikeprof"):
        setattr(module, _NAME, _hiding(original))


def take_out() -> None:
    """See put_in. Wrapped by somebody since, it stays and does nothing."""
    global _users
    _users -= 1
    module = sys.modules.get(_PLACE)
    there: Any = getattr(module, _NAME, None)
    if not _users and hasattr(there, "of_spikeprof"):
        setattr(module, _NAME, there.__wrapped__)


def _hiding(original: "Any") -> "Any":
    def create_script_module(nn_module: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        taken: list[tuple[Any, list[tuple[int, Any]]]] = []
        try:
            for module in nn_module.modules() if _users else ():
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    if any(map(_is_ours, hooks.values())):
                        taken.append((hooks, list(hooks.items())))
                        _put(hooks, [each for each in hooks.items() if not _is_ours(each[1])])
        except Exception as error:
            if not is_ours(error, "torch"):  # of a signal handler of the program's
                raise
        try:
            return original(nn_module, *args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise
        finally:
            for hooks, items in taken:
                _put(hooks, items)

    create_script_module.__doc__, create_script_module.__module__ = original.__doc__, original.__module__
    create_script_module.__wrapped__ = original  # type: ignore[attr-defined]
    create_script_module.of_spikeprof = True  # type: ignore[attr-defined]
    return create_script_module


def _is_ours(hook: "Any") -> bool:
    """Also what ours become in copies, see roots.py."""
    return hasattr(hook, "of_spikeprof") or isinstance(getattr(hook, "__self__", None), nullcontext)


def _put(hooks: "Any", items: "list[tuple[int, Any]]") -> None:
    hooks.clear()
    hooks.update(items)
