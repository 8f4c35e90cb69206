"""Renderers of a Report: terminal, HTML, JSON. Text is made here and nowhere else."""
