"""Runs in the Python that has the model: calls its factory, reads its graph, times its nodes.

Standard library and torch only, Python 3.9 syntax, relative imports: it is loaded as the private package
``_spikeprof_graph``. What it finds goes to a file, one JSON object a line, so that a crash costs only what came later.
"""
