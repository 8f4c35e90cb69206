"""Time of every kernel against the peaks of this device, against its twin, and against float64.

``python -m spikeprof.kernels.bench`` prints the table; ``--ratios`` that of the published claims.
"""
