"""What a module was called with, as it is kept until its operators are run again."""

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any


class Input:
    """What a module was called with: copies. ``exact``: in the step that was the first bad one."""

    __slots__ = ("args", "autocast", "exact", "kwargs", "tensors")

    def __init__(self, args: "Any", kwargs: "Any", tensors: "list[Any]", autocast: "Any", exact: bool) -> None:
        self.args, self.kwargs, self.tensors = args, kwargs, tensors
        self.autocast, self.exact = autocast, exact


def autocast_now(torch: "Any", device: str) -> "Any":
    """The autocast that is on in this thread for a kind of device: its dtype; None where it is off."""
    try:
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    except TypeError:  # torch before 2.4
        pass
    return None
