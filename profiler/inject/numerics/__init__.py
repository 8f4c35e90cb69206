"""Numerics: what is in the tensors that modules give, scanned on the device while the program runs.

::

    part.py              the agent's side: when to watch, the file of records
      └ watch.py         models, their modules, steps
          ├ roots.py     the hooks in them
          ├ direct.py    what they give, without hooks
          ├ kept.py      inputs of the module that gave the first bad value: kept from then on
          │   ├ keeping.py, store.py  those in CUDA graphs, by keep_triton.py
          │   ├ culprits.py, inputs.py, mirror.py  the module, what it takes, copies of both
          │   └ bisect.py       at the end: which operator it was
          │       ├ tape.py     the module's operators, recorded on tensors without memory, with quiet.py
          │       └ rerun.py    the same, run on what was kept
          └ looks.py     tensors on their way to a scanner
              ├ waiting.py        those that wait, held
              ├ batches.py        what is launched for them, which are the same
              └ scanners.py       one for each device
                  ├ scanner.py      that of a GPU: launches, with launcher.py
                  ├ scan_triton.py  the kernels, with tiles_triton.py and bad_triton.py; only where there is Triton
                  ├ scan_torch.py   the same numbers from torch operators
                  ├ memory.py       what a GPU and the agent's thread share
                  ├ formats.py      number formats as integer limits
                  └ records.py      sixteen words for each tensor scanned

Of every tensor: the largest finite magnitude, the smallest that is not zero, counts of NaN, infinite, subnormal, zero
and saturated elements, the index of the first bad one. Nothing waits for the device, and no value comes to the host by
a copy. Captured into CUDA graphs the scans run with every replay. Loaded by programs that ask for it only.
"""
