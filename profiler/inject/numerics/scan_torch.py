"""The scan in plain torch operators: on the CPU, and on GPUs without Triton. The same numbers as scan_triton.py."""

import sys

from .formats import FLOAT, NIBBLES, SIGNED, UNSIGNED
from .records import ROW_SHIFT, ROWS_MAX, STATISTICS, form_of

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

    from .formats import Format

#: Elements looked at at a time: what is made on the way takes some ten bytes of each.
CHUNK = 1 << 20

#: Numbers that ``scan_on_device`` gives.
COUNT = len(STATISTICS)

_NONE = (1 << 63) - 1


def scan(tensor: "Any", form: "Format") -> "list[int]":
    """The statistics of records.py of any strided tensor. Waits for the device, if there is one."""
    values: list[int] = scan_on_device(tensor, form).tolist()
    return values


def scan_on_device(tensor: "Any", form: "Format") -> "Any":
    """The same as an int64 tensor [COUNT] where the tensor is: nothing waits."""
    torch = sys.modules["torch"]
    count = tensor.numel()
    row = form_of(tensor, count) >> ROW_SHIFT
    totals = None
    # Detached, and not under no_grad, which would stay on where a signal handler raises at its end.
    # Slices of the first dimension that is long enough: a view of any strides is never copied as a whole.
    for begin, piece in _pieces(tensor.detach()):
        part = _part(torch, piece, form, begin * (2 if form.kind == NIBBLES else 1), row, count)
        totals = part if totals is None else _joined(torch, totals, part)
    if totals is None or not count:
        return torch.tensor([-1, -1, 0, 0, 0, 0, 0, -1, 0], dtype=torch.int64, device=tensor.device)
    return torch.cat([torch.where(totals == _NONE, -1, totals)[:-1], totals[-1:]])


def _pieces(tensor: "Any", begin: int = 0) -> "Any":
    """(flat index of its first element, flat piece) of the whole tensor, in order."""
    count = tensor.numel()
    if count == 0:
        return
    if count <= CHUNK:
        yield begin, tensor.reshape(-1)
        return
    if tensor.dim() == 1:
        for at in range(0, count, CHUNK):
            yield begin + at, tensor[at : at + CHUNK]
        return
    inner = count // tensor.shape[0]
    rows = max(CHUNK // inner, 1)
    for at in range(0, tensor.shape[0], rows):
        piece = tensor[at : at + rows]
        if rows > 1 or inner <= CHUNK:
            yield begin + at * inner, piece.reshape(-1)
        else:
            yield from _pieces(piece[0], begin + at * inner)


def _part(torch: "Any", flat: "Any", form: "Format", begin: int, row: int, count: int) -> "Any":
    size = _magnitudes(torch, flat, form)
    finite = size < form.special
    bad = ~finite
    inf = size == form.infinity
    zero = size == 0
    zeros = zero.sum()
    saturated = ((size >= form.largest) & finite).sum()
    if form.kind in (UNSIGNED, NIBBLES):
        saturated = saturated + zeros
    places = torch.arange(begin, begin + len(size), dtype=torch.int64, device=size.device)
    first = torch.where(bad, places, _NONE).min()
    return torch.stack(
        [
            torch.where(finite, size, -1).max(),
            torch.where(finite & ~zero, size, _NONE).min(),
            (bad & ~inf).sum(),
            inf.sum(),
            ((size < form.normal) & ~zero).sum(),
            zeros,
            saturated,
            first,
            _bad_rows(torch, bad, places, first, row, count),
        ]
    )


def _bad_rows(torch: "Any", bad: "Any", places: "Any", first: "Any", row: int, count: int) -> "Any":
    """A bit for each row with a bad element, see records.py."""
    if not row or (not bad.is_cuda and first == _NONE):  # on a GPU that question would wait
        return torch.zeros_like(first)
    rows, of = count // row, places // row
    if rows > ROWS_MAX:
        of = of * ROWS_MAX // rows
    seen = torch.zeros(ROWS_MAX + 1, dtype=torch.int64, device=bad.device)
    seen.scatter_(0, torch.where(bad, of, ROWS_MAX), 1)
    bits = torch.arange(ROWS_MAX, dtype=torch.int64, device=bad.device)
    return (seen[:ROWS_MAX] << bits).sum()


def _joined(torch: "Any", a: "Any", b: "Any") -> "Any":
    least, most = torch.minimum(a, b), torch.maximum(a, b)
    return torch.cat([most[:1], least[1:2], (a + b)[2:7], least[7:8], (a | b)[8:]])


def _magnitudes(torch: "Any", flat: "Any", form: "Format") -> "Any":
    """int64 magnitudes; a float's bits but for its sign."""
    if form.kind == FLOAT:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[form.item_bytes]
        return flat.view(whole).to(torch.int64) & form.sign_mask
    codes = flat.view(torch.int8 if form.kind == SIGNED else torch.uint8).to(torch.int64)
    if form.kind == NIBBLES:
        return torch.stack([codes & 15, codes >> 4], 1).reshape(-1)
    return codes.abs()
