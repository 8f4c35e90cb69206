"""What a module gave: whether it waits for a common launch, is scanned now, or is what the module took."""

import sys

from ..events import get_ident
from .places import tensors_in
from .unseen import alone, functions_overridden, is_compiling, is_traced, operators_overridden

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .places import Place
    from .roots import Root
    from .watch import Numerics

    Gave = Callable[[Root, Place, tuple[Any, ...], Any], None]
    Several = Callable[[Root, Place, tuple[Any, ...], Any], bool]
    Hooked = Callable[[Root, Place, Any, tuple[Any, ...], Any], None]

#: Classes that hand their input on as it is.
_HAND_ON = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")


def giver(numerics: "Numerics") -> "tuple[Gave, Several, Hooked]":
    """What is called with all that a module gave, a short way for tuples of tensors, and what hooks call.

    The first two take the arguments of the call: the module is the first. The short way is for where no mode is on, and
    says False of what is no such tuple. The last is not for where a compiler may come by, see ``careful``.
    """
    waits, looks, plain = numerics.waits, numerics.looks, numerics.looks.tensor

    def gave(root: "Root", place: "Place", args: "tuple[Any, ...]", output: "Any") -> None:
        alone(sees, root, place, args, output)

    def sees(root: "Root", place: "Place", args: "tuple[Any, ...]", output: "Any") -> None:
        try:
            if looks.traced():
                return
            if type(output) is plain:
                if not waits(place.spots[0], args, output):
                    see(root, place, args, 0, output)
            elif not several(root, place, args, output):
                see_all(root, place, args, output)
        except Exception as error:
            numerics.fault(error)

    def several(root: "Root", place: "Place", args: "tuple[Any, ...]", output: "Any") -> bool:
        if type(output) is not tuple:
            return False
        spots = place.spots
        if len(output) != len(spots):
            output = [each for each in output if each is not None]
            if len(output) != len(spots):
                return False
        for each in output:
            if type(each) is not plain:
                return False
        for index, each in enumerate(output):
            if not waits(spots[index], args, each):
                alone(sees_one, root, place, args, index, each)
        return True

    def hooked(root: "Root", place: "Place", module: "Any", args: "tuple[Any, ...]", output: "Any") -> None:
        if numerics.thread != get_ident():
            return
        if (
            functions_overridden()  # as ``overridden``, without a call more for each module
            or operators_overridden()
            or is_traced()
            or not (
                waits(place.spots[0], args, output)
                if type(output) is plain
                else several(root, place, (module, *args), output)
            )
        ):
            gave(root, place, (module, *args), output)

    def sees_one(root: "Root", place: "Place", args: "tuple[Any, ...]", index: int, tensor: "Any") -> None:
        try:
            see(root, place, args, index, tensor)
        except Exception as error:
            numerics.fault(error)

    def see_all(root: "Root", place: "Place", args: "tuple[Any, ...]", output: "Any") -> None:
        """Of whatever form it is."""
        none = True
        for index, tensor in enumerate(tensors_in(plain, output)):
            none = False
            see(root, place, args, index, tensor)
        if none:
            looks.unchecked(place.path, "its output holds no tensor: %s" % type(output).__name__)

    def see(root: "Root", place: "Place", args: "tuple[Any, ...]", index: int, tensor: "Any") -> None:
        if any(each is tensor for each in args):
            if hands_on(args[0]):
                return
            if not place.writes_input:
                place.writes_input = True
                root.flush_before(numerics, args[0])
        looks.see(place, index, tensor)
        if numerics.first_bad.fresh:
            numerics.first_bad.keep_now(place, args[1:])

    return gave, several, hooked


def careful(hooked: "Hooked", *given: "Any") -> None:
    """The same where a compiler may come by: first of all, and plainly, it is asked for."""
    if is_compiling():
        return
    hooked(*given)


def gives(module: "Any") -> bool:
    """Whether calls of a module are expected, and give what nobody else gave."""
    kind = type(module)
    return kind.forward is not sys.modules["torch"].nn.Module.forward and kind.__name__ not in _HAND_ON


def hands_on(module: "Any") -> bool:
    """Whether the module gives what it takes, unchanged."""
    return type(module).__name__ in _HAND_ON and not (module.training and getattr(module, "p", 0))
