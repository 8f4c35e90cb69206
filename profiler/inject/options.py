"""What to record, as the supervising process asks for it: a JSON object in the environment (ENV_OPTIONS)."""

from __future__ import annotations

import json


class Options:
    """Recording options from the environment; every field has the default of "record all"."""

    def __init__(self, text: str | None) -> None:
        given = json.loads(text or "{}")
        self.max_bytes = int(given.get("max_bytes", 0))
        self.max_seconds = float(given.get("max_seconds", 0))
        self.window = given.get("window")  # [seconds on, seconds off]
        self.capture_range = bool(given.get("capture_range"))
        self.clean_steps = int(given.get("clean_steps", 0))
        self.graph_nodes = bool(given.get("graph_nodes", True))
        self.attribute_steps = int(given.get("attribute_steps", 3))
        self.numerics_every = int(given.get("numerics_every", 0))
        self.numerics_modules = tuple(given.get("numerics_modules", ("*",)))
        self.numerics_roles = tuple(given.get("numerics_roles", ("output",)))
        self.libcupti = given.get("libcupti")
