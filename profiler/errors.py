"""Every error spikeprof raises, and the exit code each one ends the command with.

Libraries raise these; only ``cli/app.py`` prints one and exits. A message says what happened
with the values, what still works, and what to do.

==== ==============================================================================
code meaning
==== ==============================================================================
0    done (``run``: the program's own exit code is passed through instead)
1    a policy the user asked for failed (``--fail-on``, ``--policy``), or a test of ``doctor`` failed
2    the command line is wrong
3    the input cannot be read: no trace there, foreign, truncated, newer schema, corrupt; no GPU to ask
4    the output cannot be written: folder exists, read-only, disk full
5    internal error: a bug in spikeprof
126  ``run``: the command exists but cannot be executed
127  ``run``: the command was not found
==== ==============================================================================

SpikeprofError
├── UsageError            2
├── InputError            3
│   ├── TraceNotFound
│   ├── ForeignFile
│   ├── NewerSchema
│   ├── DamagedTrace
│   └── NoGpu
├── MissingTable          3   (an analyzer asked for a table that was not collected)
├── OutputError           4
├── CommandNotExecutable  126
└── CommandNotFound       127
"""

from __future__ import annotations


class SpikeprofError(Exception):
    """Base of all errors whose message is meant for the user. ``exit_code`` is the command's."""

    exit_code = 5


class UsageError(SpikeprofError):
    """The command line or an argument is wrong."""

    exit_code = 2


class InputError(SpikeprofError):
    """An input file or folder cannot be read as what it should be."""

    exit_code = 3


class TraceNotFound(InputError):
    """There is no trace at the path."""


class ForeignFile(InputError):
    """The file is not a format that spikeprof reads."""


class NewerSchema(InputError):
    """The trace was written by a newer spikeprof than this one."""


class DamagedTrace(InputError):
    """The trace is truncated or corrupt beyond what can be read around."""


class NoGpu(InputError):
    """There is no GPU here that can be asked what the command is about."""


class MissingTable(InputError):
    """A table was asked for that this trace does not hold (it was not collected)."""


class OutputError(SpikeprofError):
    """The output cannot be written."""

    exit_code = 4


class CommandNotExecutable(SpikeprofError):
    """``run``: the command exists but cannot be executed."""

    exit_code = 126


class CommandNotFound(SpikeprofError):
    """``run``: the command was not found."""

    exit_code = 127
