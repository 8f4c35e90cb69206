"""Everything up to a valid Trace: record in the target, sample from outside, assemble, store."""
