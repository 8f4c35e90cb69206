"""Recordings of other profilers, read into the same Trace. ``open_trace`` opens whatever it is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spikeprof.profiler.trace import Trace

__all__ = ["open_trace"]


def open_trace(path: str | Path) -> Trace:
    """Open a trace folder, or a torch.profiler JSON file (gzipped or not, whatever its name).

    Raises TraceNotFound (nothing there), ForeignFile (something else), DamagedTrace (truncated or
    corrupt), NewerSchema, or InputError when the file may not be read.
    """
    path = Path(path)
    if path.is_file():
        from spikeprof.profiler.importers.kineto import read_kineto

        return read_kineto(path)
    from spikeprof.profiler import session, store

    if session.is_unfinished(path):  # the recording was cut off before it was assembled
        session.recover(path)
    if path.is_dir() and not store.is_trace(path):
        _refuse_folder(path)
    return store.read_trace(path)


def _refuse_folder(folder: Path) -> None:
    """Say so when the folder holds what torch.profiler's handlers write, one file per rank."""
    from spikeprof.profiler.errors import TraceNotFound

    files = sorted(p.name for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))
    if files:
        raise TraceNotFound(
            f"{folder} is not a trace folder; it holds {len(files)} JSON file(s): name one, e.g. {folder / files[0]}"
        )
