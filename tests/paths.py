"""Where tests find real inputs that are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SPIKEPROF_SHARED", ROOT.parent / "shared"))

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the folder of shared real inputs is not here ({SHARED.name}); set SPIKEPROF_SHARED"
)
