from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
from scanned import asked

from spikeprof.profiler.watching import Watch

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("watch_pages")


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "uint8"), ("int4", "int4"), ("fp16", "float16")])
def test_pages_of_every_layer_and_step_are_looked_at(
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: str,
) -> None:
    watches: list[Watch] = []
    look = Watch.look

    def looking(self: Watch, *args: object, **more: object) -> None:
        watches.append(self)
        look(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Watch, "look", looking)
    assert example.main(["--device", "cpu", "--kv-cache", kind, "--tokens", "3"]) == 0
    # 4 layers, keys and values, 3 steps: both prompts in the first.
    assert capsys.readouterr().out.startswith(f"24 tensors of {dtype}, the largest number at most ")
    rows = [row for row in watches[0].stats() if row["role"] == "kv"]
    assert {row["module"] for row in rows} == {f"layers.{at}.{name}" for at in range(4) for name in ("keys", "values")}
    # The prompts' 35 tokens, then one of each: 2 heads of 64 channels.
    assert [row["elements_count"] for row in rows if row["module"] == "layers.0.keys"] == [35 * 128, 256, 256]
    assert all((row["real_amax_value"] is not None) == (kind != "fp16") for row in rows)
    blank = {"amax_value": math.nan, "smallest_value": math.nan, "real_amax_value": math.nan}
    table = [{**row, **{key: value for key, value in blank.items() if row[key] is None}} for row in watches[0].stats()]
    assert asked(*table).findings == ()  # INT8 and INT4 have their ends by intention
