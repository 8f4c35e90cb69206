"""Spool files to tables: decode raw records, name kernels, map devices, correlate, write the trace."""
