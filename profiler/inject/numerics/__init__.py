"""Numerics: what is in the tensors that modules give, scanned on the device while the program runs.

From a module to the file of records::

    part.py                 the agent's side: when to watch; writes the file
      watch.py              models, their modules, steps
        roots.py, direct.py   how what modules give comes by: by hooks in them, and without
          switched.py           a method of a class that can be exchanged at any time
        given.py              whether it waits, is scanned now, or is known already
          unseen.py             where nobody else sees what is done with tensors
          scripts.py            where torch.jit does not see the hooks
        alike.py              models like one that is gone go by its names
        passed_by.py          at the end: modules that gave nothing that was seen
        gradients.py          those of what modules give
        named.py              tensors that the program names, and weights, with scales.py for quantised ones
        places.py             what is scanned of a module: its names, each of its tensors
        looks.py              tensors on their way to a scanner
          waiting.py            those that wait, held, for a common launch
          batches.py            what is launched for them; which are as in the step before
          scanners.py           one for each device; that of torch operators, with scan_torch.py
            scanner.py            that of a GPU: rows of a table, and launches
              launcher.py           launches, past Triton
              scan_triton.py        the kernel, with tiles_triton.py and bad_triton.py
              memory.py             what the GPU and the agent's thread share: the table, the ring of records
            records.py          sixteen words for each tensor scanned; the format of the file
            formats.py          number formats as integer limits

From the first bad value to the operator that gave it::

    first_bad.py            which scan, which module; tells at the end
      culprits.py             that module and the one around it
      eager_inputs.py         what they take, copied step by step
      graph_inputs.py         what they take in CUDA graphs, which keep it themselves
        graph_store.py          by a table and a buffer, with keep_triton.py
      inputs.py, mirror.py    what is kept; copies of arguments and modules
      bisect.py               at the end: which operator it was
        outside.py              no file is changed for it, no process reached
        tape.py, quiet.py       its operators, recorded on tensors without memory, without a trace in the program
        rerun.py, contents.py   the same, run on what was kept; what is in the tensors on the way

Of every tensor: the largest finite magnitude, the smallest that is not zero, counts of NaN, infinite, subnormal, zero
and saturated elements, the index of the first bad one. Nothing waits for the device, and no value comes to the host by
a copy. Captured into CUDA graphs the scans run with every replay. Loaded by programs that ask for it only.
"""
