from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.derived.intervals import ints
from spikeprof.analyzers.derived.occupancy import RESOURCES, Shapes, occupancy, waves
from spikeprof.profiler.hardware import architectures

shapes = st.tuples(st.integers(1, 1100), st.integers(1, 260), st.integers(0, 240_000))
arch = st.integers(0, len(architectures()) - 1)


@given(shapes, arch, st.integers(0, 64), st.integers(0, 5000))
def test_more_of_a_resource_never_lets_an_sm_hold_more_blocks(
    shape: tuple[int, int, int], arch: int, registers: int, shared: int
) -> None:
    more = Shapes(
        ints([shape[0]] * 3),
        shape[1] + ints([0, registers, 0]),
        shape[2] + ints([0, 0, shared]),
        ints([arch] * 3),
    )
    blocks = occupancy(more, architectures()).blocks
    assert blocks[1] <= blocks[0]
    assert blocks[2] <= blocks[0]


@given(st.lists(st.tuples(shapes, arch), min_size=1, max_size=20))
def test_what_an_sm_holds_is_within_what_it_has_and_all_at_once_is_as_one_by_one(
    rows: list[tuple[tuple[int, int, int], int]],
) -> None:
    columns = [ints(column) for column in zip(*((*shape, arch) for shape, arch in rows), strict=True)]
    found = occupancy(Shapes(*columns), architectures())
    for i, (shape, number) in enumerate(rows):
        one = architectures()[number]
        alone = occupancy(Shapes(*(ints([value]) for value in (*shape, 0))), [one])
        assert alone.blocks[0] == found.blocks[i]
        assert found.warps[i] <= one.warps_count.value
        assert found.blocks[i] <= one.blocks_count.value
        assert found.blocks[i] * found.block_registers[i] <= one.registers_count.value
        assert found.blocks[i] * found.block_shared_bytes[i] <= found.carve_out_bytes[i] <= one.shared_bytes.value
        # What limits it allows no block more, all else at least as many; something always limits.
        assert set(found.limiters(i)) <= set(RESOURCES)
        assert found.limiters(i)
        assert found.allowed[:, i].min() == found.blocks[i]


@given(shapes, arch, st.integers(1, 10**6), st.integers(1, 300))
def test_waves_hold_all_blocks(shape: tuple[int, int, int], arch: int, grid: int, sm_count: int) -> None:
    held = occupancy(Shapes(*(ints([value]) for value in (*shape, arch))), architectures())
    found = waves(held, ints([grid]), ints([sm_count]))
    if not held.blocks[0]:
        assert np.isnan(found.waves[0])
        return
    whole = np.ceil(found.waves[0])
    assert (whole - 1) * held.blocks[0] * sm_count < grid <= whole * held.blocks[0] * sm_count
    assert 0 <= found.tail_share[0] < 1
    assert 0 < found.active_sms_share[0] <= 1
    assert 0 < found.warps[0] <= held.warps[0] + 1e-9
    # Warps on the SMs that have some, over all waves, are those of the grid.
    assert np.isclose(found.warps[0] * found.active_sms_share[0] * whole * sm_count, grid * held.block_warps[0])
