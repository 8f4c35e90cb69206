"""What runs inside the program under test: the standard library and ctypes, nothing else.

This folder is loaded in two ways: as ``spikeprof.profiler.inject`` by the supervising process (which takes
constants and paths from it), and as the private package ``_spikeprof`` inside the target, whose environment
need not hold spikeprof at all. So: Python 3.9 syntax, relative imports only, no third-party module.

How data flows in the target::

    site/sitecustomize.py   the interpreter starts it; chains to the user's own sitecustomize
      └ hooks.py            says hello (events.py); waits for a CUDA package; first CUDA use -> Agent.activate()
          └ agent.py        one per process: decides when to record; fork, exit and faults
              ├ options.py  what to record
              ├ cupti.py    finds and drives the process's one libcupti
              ├ recorder.py what of it is on at a moment; flushes
              ├ callbacks.py  CUPTI's requests for buffers, and the full ones
              ├ spool.py    raw activity buffers -> .act file
              ├ events.py   everything else -> .jsonl file
              ├ interrupts.py  exceptions of the program's signal handlers that hit a callback of ours
              ├ control.py  the supervisor's questions (kernel names), its orders and its absence
              ├ marks.py    ranges that the program marks itself
              ├ parts.py    the following, as far as they were asked for
              ├ steps.py    CUDA-event step times, untraced and traced (--clean-steps)
              ├ graphs.py   graph node created / cloned; launches, while they are attributed
              ├ attribution.py  when launches get their module, line and operator: the first steps of each kind
              │   ├ calls.py      the one hook in nn.Module.__call__: where steps begin
              │   ├ kinds.py      which steps are alike
              │   ├ windows.py    the launches, while CUPTI calls back
              │   ├ frames.py     modules and lines from the Python frames of a launch
              │   ├ modules.py    their names
              │   ├ operators.py  operators and their shapes
              │   └ captures.py   where captures of graphs begin and end
              ├ numerics/   what is in the tensors that modules give (--numerics)
              └ guests.py   other profilers in the same process: yield to them, resume after

Rule of the house: if in doubt, stop recording and keep the program.
"""

import os

#: The folder to put first on the target's PYTHONPATH.
SITE_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

#: Environment of the target.
ENV_SPOOL = "SPIKEPROF_SPOOL"  # folder for spool files; absent = do nothing
ENV_CONTROL = "SPIKEPROF_CONTROL"  # path of the supervisor's socket
ENV_OPTIONS = "SPIKEPROF_OPTIONS"  # JSON object, see options.py

#: Spool file of raw activity buffers: frames of FRAME_HEADER_BYTES + payload.
FRAME_MAGIC = 0x31455A494B495053  # "SPIKIZE1" little endian
FRAME_HEADER_BYTES = 64
FRAME_FORMAT = "<QQQQ"  # magic, payload bytes, unix ns when handed over, sequence number
