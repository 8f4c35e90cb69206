"""Example programs as modules, in the process of the tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from paths import ROOT


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Loads the example of this name."""

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_example", ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return loaded
