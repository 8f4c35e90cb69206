"""Makes a recording fit for ``sample_traces``: small, and without names of the machine's folders.

``python scripts/make_sample.py TRACE TARGET [--cut FOLDER]... [--without TABLE]...`` copies a trace folder. Each FOLDER
is cut off where names of files in the table of stacks begin with it, each TABLE is left out; notes in the manifest say
so. Nothing is written where an absolute name of a file is left. Of a file of torch.profiler (``.json.gz``) it keeps the
kernels, the calls that launched them and the calls of modules, with what ties these to each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from spikeprof.profiler.errors import SpikeprofError
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.store import create_folder, write_trace
from spikeprof.profiler.trace import Trace

_KEPT_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_KEPT_ARGS = ("device", "stream", "correlation", "Python parent id", "Python id", "Python module id")


def sample(trace: Trace, folders: Sequence[str], without: Sequence[str]) -> Trace:
    """The trace without those tables, and without those folders in its stacks. Raises SystemExit, see above."""
    tables = {name: trace.table(name) for name in trace.tables if name not in without}
    if "stacks" in tables:
        tables["stacks"] = _cut(tables["stacks"], folders)
    notes = [*trace.manifest.notes]
    if folders:
        notes.append("A sample: names of folders above the project, its environment and caches are cut off.")
    if left_out := [name for name in without if name in trace.tables]:
        notes.append(f"A sample: left out to keep it small: {', '.join(left_out)}.")
    return Trace(dataclasses.replace(trace.manifest, notes=tuple(notes)), tables)


def _cut(stacks: pa.Table, folders: Sequence[str]) -> pa.Table:
    columns = {name: stacks.column(name) for name in stacks.column_names}
    files = [_without(text, folders) for text in columns["file"].to_pylist()]
    frames = [[_without(text, folders) for text in json.loads(one or "[]")] for one in columns["frames"].to_pylist()]
    left = sorted({text for text in [*files, *(f for one in frames for f in one)] if text.startswith("/")})
    if left:
        raise SystemExit(f"make_sample: absolute paths are left, cut them, too: {', '.join(left[:3])}")
    columns |= {"file": pa.array(files), "frames": pa.array([json.dumps(one) for one in frames])}
    return pa.table(columns).cast(stacks.schema)


def _without(text: str, folders: Sequence[str]) -> str:
    beginnings = (folder.rstrip("/") + "/" for folder in folders)
    return text.removeprefix(next((one for one in beginnings if text.startswith(one)), ""))


def modules_of_torch(document: dict[str, Any]) -> dict[str, Any]:
    """A document of torch.profiler with kernels, their launches and calls of modules alone."""
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    launched = {e["args"]["correlation"] for e in events if e["cat"] == "kernel"}
    kept = [
        {name: e[name] for name in _KEPT_FIELDS} | {"args": {k: v for k, v in e["args"].items() if k in _KEPT_ARGS}}
        for e in events
        if e["cat"] == "kernel"
        or (e["cat"] in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") in launched)
        or (e["cat"] == "python_function" and e["name"].startswith("nn.Module: "))
    ]
    return {k: v for k, v in document.items() if k != "traceName"} | {"traceEvents": kept}


def main() -> None:
    """Copy one recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--cut", action="append", default=[])
    parser.add_argument("--without", action="append", default=[], choices=sorted(TABLES), metavar="TABLE")
    given = parser.parse_args()
    try:
        if given.source.suffix == ".gz":
            document = modules_of_torch(json.loads(gzip.decompress(given.source.read_bytes())))
            text = json.dumps(document, separators=(",", ":"))
            given.target.write_bytes(gzip.compress(text.encode(), mtime=0))
            return
        made = sample(open_trace(given.source), given.cut, given.without)
        write_trace(create_folder(given.target), made)
    except (SpikeprofError, OSError, ValueError, KeyError) as error:
        parser.error(f"{given.source}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
