"""The command line: one verb per file, ``app.py`` joins them and is the only place that exits."""
