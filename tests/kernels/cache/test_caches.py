import random

import pytest
import torch

from spikeprof.kernels.cache import KINDS, CacheFull, make_cache

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
# Of unit normal values, a group's range is at most about 8: half of a 255th, or of a 15th.
TOLERANCE = {"contiguous": 0.0, "fp16": 0.0, "int8-values": 0.02, "int8-keys": 0.02, "int8": 0.02, "int4": 0.3}


def cache(kind="fp16", device="cpu", **changes):
    sizes = {"capacity_tokens": 64, "page_size": 4, "max_sequences": 8, "max_tokens": 16, "dtype": torch.float32}
    return make_cache(kind, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=device, **(sizes | changes))


def tokens(count, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, count, KV_HEADS, HEAD_DIM, generator=generator).to(device)


def appended(kv, new, made, path="torch"):
    plan = kv.plan(new)
    for layer in range(LAYERS):
        kv.append(layer, plan, made[layer, 0], made[layer, 1], path=path)
    return plan


def assert_holds(kv, sequence, made, tolerance):
    """``made`` [layers, 2, tokens, kv_heads, head_dim] is what the sequence consists of."""
    for layer in range(LAYERS):
        for found, wanted in zip(kv.gather(layer, sequence), made[layer], strict=True):
            assert found.shape == (KV_HEADS, made.shape[2], HEAD_DIM)
            assert torch.isfinite(found).all()
            assert (found - wanted.transpose(0, 1)).abs().max() <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_appended_is_gathered(device_path, kind):
    device, path = device_path
    kv = cache(kind, device)
    kv.begin(5)
    kv.begin(3)
    made = tokens(14, device)
    appended(kv, [(5, 6), (3, 3)], made[:, :, :9], path)
    appended(kv, [(3, 1), (5, 1)], made[:, :, 9:11], path)
    appended(kv, [(5, 3)], made[:, :, 11:], path)
    assert_holds(kv, 5, made[:, :, [*range(6), 10, *range(11, 14)]], TOLERANCE[kind])
    assert_holds(kv, 3, made[:, :, [6, 7, 8, 9]], TOLERANCE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_appending_leaves_what_is_written_as_it_is(kind):
    kv = cache(kind)
    kv.begin(0)
    appended(kv, [(0, 2)], tokens(2))
    before = [kv.gather(layer, 0) for layer in range(LAYERS)]
    appended(kv, [(0, 1)], tokens(1, seed=1) * 100)
    for layer in range(LAYERS):
        for old, new in zip(before[layer], kv.gather(layer, 0), strict=True):
            assert torch.equal(old, new[:, :2])


@pytest.mark.parametrize("kind", KINDS)
def test_forks_go_their_own_ways(kind):
    kv = cache(kind)
    kv.begin(0)
    made = tokens(9)
    appended(kv, [(0, 6)], made[:, :, :6])
    kv.fork(0, 1)
    appended(kv, [(1, 1), (0, 1)], made[:, :, 6:8])
    appended(kv, [(1, 1)], made[:, :, 8:])
    assert_holds(kv, 0, made[:, :, [0, 1, 2, 3, 4, 5, 7]], TOLERANCE[kind])
    assert_holds(kv, 1, made[:, :, [0, 1, 2, 3, 4, 5, 6, 8]], TOLERANCE[kind])
    kv.evict(0)
    assert_holds(kv, 1, made[:, :, [0, 1, 2, 3, 4, 5, 6, 8]], TOLERANCE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_begin_alike(kind):
    kv = cache(kind)
    prompt = list(range(10))
    made = tokens(12)
    assert kv.begin(0, prompt) == 0
    appended(kv, [(0, 10)], made[:, :, :10])
    known = kv.begin(1, prompt)
    assert known == (0 if kind == "contiguous" else 8)
    assert kv.length(1) == known
    appended(kv, [(1, 10 - known)], made[:, :, known:10])
    kv.evict(0)
    appended(kv, [(1, 2)], made[:, :, 10:])
    assert_holds(kv, 1, made, TOLERANCE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_guesses_are_dropped(kind):
    kv = cache(kind)
    kv.begin(0)
    made = tokens(8)
    appended(kv, [(0, 7)], made[:, :, [0, 1, 2, 6, 6, 6, 6]])
    kv.truncate(0, 3)
    appended(kv, [(0, 3)], made[:, :, 3:6])
    assert kv.length(0) == 6
    assert_holds(kv, 0, made[:, :, :6], TOLERANCE[kind])


@pytest.mark.parametrize("kind", ["contiguous", "fp16", "int8"])
def test_many_sequences_that_come_grow_fork_and_go(kind):
    chance = random.Random(3)
    kv = cache(kind, capacity_tokens=96)
    expected = {}
    for step in range(60):
        try:
            if expected and chance.random() < 0.3:
                parent = chance.choice(sorted(expected))
                kv.fork(parent, step)
                expected[step] = expected[parent]
            else:
                kv.begin(step)
                expected[step] = tokens(0)
            new = [(sequence, chance.randint(1, 3)) for sequence in expected if kv.length(sequence) < 14]
            chance.shuffle(new)
            if new:
                made = tokens(sum(count for _, count in new), seed=step)
                appended(kv, new, made)
                for (sequence, _), part in zip(new, made.split([count for _, count in new], 2), strict=True):
                    expected[sequence] = torch.cat((expected[sequence], part), 2)
        except CacheFull:
            gone = chance.choice(sorted(expected))
            kv.evict(gone)
            del expected[gone]
        sequence = chance.choice(sorted(expected)) if expected else None
        if sequence is not None and kv.length(sequence):
            assert_holds(kv, sequence, expected[sequence], TOLERANCE[kind])
    for sequence in list(expected):
        kv.evict(sequence)
    assert kv.usage().bytes_reserved == 0
    assert kv.usage().free_pages_count == kv.usage().pages_count


def attended_in_float64(kv, layer, sequence, q, window):
    keys, values = (part.double() for part in kv.gather(layer, sequence))
    if window is not None:
        keys, values = keys[:, -window:], values[:, -window:]
    group = q.shape[0] // KV_HEADS
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("hd,htd->ht", q.double(), keys) * HEAD_DIM**-0.5
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_the_cache(device_path, kind, window):
    device, path = device_path
    kv = cache(kind, device)
    kv.begin(0)
    kv.begin(1)
    appended(kv, [(0, 9), (1, 2)], tokens(11, device), path)
    plan = appended(kv, [(1, 1), (0, 1)], tokens(2, device, seed=1), path)
    q = torch.randn(2, 4, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(device)
    for layer in range(LAYERS):
        found = kv.attend(layer, plan, q, window=window, path=path)
        assert found.path == path
        for row, sequence in enumerate([1, 0]):
            out, lse = attended_in_float64(kv, layer, sequence, q[row], window)
            assert torch.isfinite(found.out[row]).all()
            assert (found.out[row] - out).norm() <= 1e-5 * out.norm()
            assert (found.lse[row] - lse).abs().max() <= 1e-5 * lse.abs().max()


@pytest.mark.parametrize(("kind", "most"), [("int8-keys", 0.01), ("int8-values", 0.01), ("int8", 0.012)])
def test_eight_bits_cost_attention_about_one_percent(device_path, kind, most):
    device, path = device_path
    outs = []
    for each in ("fp16", kind):
        kv = make_cache(each, layers=1, kv_heads=2, head_dim=128, capacity_tokens=64, max_sequences=1, max_tokens=64,
                        dtype=torch.float32, device=device)  # fmt: skip
        generator = torch.Generator().manual_seed(4)
        keys, values, q = (torch.randn(size, 2, 128, generator=generator).to(device) for size in (50, 50, 1))
        kv.begin(0)
        plan = kv.plan([(0, 50)])
        kv.append(0, plan, keys, values, path=path)
        outs.append(kv.attend(0, plan, q, path=path).out)
    assert torch.isfinite(outs[1]).all()
    assert (outs[1] - outs[0]).norm() <= most * outs[0].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_static_plan_gives_what_the_plan_gives(device_path, kind):
    device, path = device_path
    kv = cache(kind, device)
    static = kv.blank_plan(5)
    for sequence in (0, 1):
        kv.begin(sequence)
    appended(kv, [(0, 6), (1, 3)], tokens(9, device), path)
    plan = kv.plan([(1, 1), (0, 1)])
    static.copy_from(plan)
    made = torch.zeros(LAYERS, 2, 5, KV_HEADS, HEAD_DIM, device=device)
    made[:, :, :2] = tokens(2, device, seed=1)
    made[:, :, 2:] = 1e3
    q = torch.randn(5, 4, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(device)
    before = [kv.gather(0, sequence)[0][:, :-1] for sequence in (0, 1)]
    kv.append(0, static, made[0, 0], made[0, 1], path=path)
    padded = kv.attend(0, static, q, path=path)
    exact = kv.attend(0, plan, q[:2], path=path)
    assert torch.isfinite(padded.out).all()
    assert (padded.out[:2] - exact.out).abs().max() <= 1e-6
    assert not padded.out[2:].any()
    for sequence, old in enumerate(before):
        assert torch.equal(kv.gather(0, sequence)[0][:, :-1], old)
    # What stood there is overwritten by a smaller batch.
    static.copy_from(kv.plan([(0, 1)]))
    assert static.lengths.tolist() == [8, 0, 0, 0, 0]
    assert static.slots[1:].tolist() == [static.scratch_slot] * 4


def test_parts_of_a_plan_begin_at_multiples_of_16_bytes():
    kv = cache()
    kv.begin(0)
    kv.begin(1)
    for count in (1, 3, 8):
        plan = kv.plan([(0, count), (1, 1)])
        begin = plan.slots.data_ptr()
        assert [(part.data_ptr() - begin) % 16 for part in (plan.block_table, plan.lengths)] == [0, 0]
        assert plan.slots.shape == (count + 1,)
        assert plan.lengths.tolist() == [{1: 1, 3: 4, 8: 12}[count], {1: 1, 3: 2, 8: 3}[count]]


def test_a_plan_too_large_for_a_static_one():
    kv = cache()
    static = kv.blank_plan(1)
    kv.begin(0)
    with pytest.raises(ValueError, match=r"other has 2 new tokens, 1 sequences and 1 pages for one: this plan has "):
        static.copy_from(kv.plan([(0, 2)]))


def test_arguments_of_append_that_cannot_be():
    kv = cache()
    kv.begin(0)
    plan = kv.plan([(0, 3)])
    good = tokens(3)[0, 0]
    with pytest.raises(ValueError, match=r"keys has shape \[2, 2, 32\], \[3, 2, 32\] is wanted"):
        kv.append(0, plan, good[:2], good)
    with pytest.raises(ValueError, match=r"values are torch.float16 on cpu, the cache is of torch.float32 on cpu"):
        kv.append(0, plan, good, good.half())
    with pytest.raises(IndexError, match="layer is 2: the cache has 2, counted from 0"):
        kv.append(2, plan, good, good)
    with pytest.raises(ValueError, match="path is 'cuda'"):
        kv.append(0, plan, good, good, path="cuda")
    with pytest.raises(ValueError, match="batch is 0"):
        kv.blank_plan(0)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("int2", {}, "kind is 'int2': it can be contiguous, fp16, int8-values, int8-keys, int8, int4"),
        ("fp16", {"page_size": 0}, "page_size is 0: a whole number, 1 at least"),
        ("fp16", {"max_sequences": 1.5}, "max_sequences is 1.5: a whole number, 1 at least"),
        ("fp16", {"capacity_tokens": 64.0}, "capacity_tokens is 64.0: a whole number, 1 at least"),
        ("fp16", {"dtype": torch.int8}, "dtype is torch.int8: it can be torch.float16"),
        ("fp16", {"capacity_tokens": 3}, "capacity_tokens is 3: room for a page of 4 tokens at least"),
        ("contiguous", {"capacity_tokens": 15}, "room for a sequence of max_tokens, 16 tokens at least"),
    ],
)
def test_caches_that_cannot_be(kind, changes, text):
    with pytest.raises(ValueError, match=text):
        cache(kind, **changes)


def test_four_bits_need_whole_groups():
    with pytest.raises(ValueError, match="head_dim is 48: 4 bits need a multiple of 32"):
        make_cache("int4", layers=1, kv_heads=1, head_dim=48, capacity_tokens=16, max_sequences=1, max_tokens=16,
                   dtype=torch.float16, device="cpu")  # fmt: skip
