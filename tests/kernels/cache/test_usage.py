import pytest
import torch

from spikeprof.kernels.cache import KINDS, CacheFull, bytes_per_token, make_cache


def cache(kind, **changes):
    sizes = {"capacity_tokens": 64, "page_size": 4, "max_sequences": 8, "max_tokens": 16}
    return make_cache(kind, layers=3, kv_heads=2, head_dim=64, dtype=torch.float16, device="cpu", **(sizes | changes))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    # Of one head of 128 channels in fp16: two bytes a channel and side; else one, or a half, and 4 for each scale.
    [("contiguous", 512), ("fp16", 512), ("int8-values", 388), ("int8-keys", 388), ("int8", 264), ("int4", 160)],
)
def test_bytes_of_a_token_by_hand(kind, wanted):
    assert bytes_per_token(kind, layers=1, kv_heads=1, head_dim=128) == wanted
    assert bytes_per_token(kind, layers=32, kv_heads=8, head_dim=128) == 32 * 8 * wanted


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_what_quantising_saves_at_most(head_dim):
    plain = bytes_per_token("fp16", layers=1, kv_heads=1, head_dim=head_dim)
    saved = {kind: 1 - bytes_per_token(kind, layers=1, kv_heads=1, head_dim=head_dim) / plain for kind in KINDS}
    assert saved["int8-values"] == saved["int8-keys"] == pytest.approx(0.25 - 1 / head_dim)
    assert saved["int8"] == pytest.approx(0.5 - 2 / head_dim)
    assert saved["int4"] == pytest.approx(0.75 - 1 / 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_takes_what_the_formula_says(kind):
    usage = cache(kind).usage()
    assert usage.bytes_per_token == bytes_per_token(kind, layers=3, kv_heads=2, head_dim=64)
    # The spare ones are a slot in each of 4 rows, or a page of 4.
    assert usage.bytes_allocated == (64 + 4) * usage.bytes_per_token


def test_usage_by_hand():
    kv = cache("fp16")
    token = 3 * 2 * 64 * 2 * 2
    kv.begin(0, range(9))
    kv.plan([(0, 9)])  # 3 pages, the last with 1 token
    kv.begin(1, range(9))  # shares 2 pages
    kv.plan([(1, 3)])  # and has 1 of its own with 3 tokens
    usage = kv.usage()
    assert (usage.tokens_count, usage.stored_tokens_count, usage.sequences_count) == (20, 12, 2)
    assert (usage.pages_count, usage.free_pages_count) == (16, 12)
    assert usage.bytes_per_token == token
    assert usage.bytes_reserved == 16 * token
    assert usage.bytes_used == 12 * token
    assert usage.utilisation_share == 12 / 68
    assert usage.internal_fragmentation_share == 0.25


def test_an_empty_cache_wastes_nothing_inside():
    usage = cache("int4").usage()
    assert (usage.bytes_used, usage.utilisation_share, usage.internal_fragmentation_share) == (0, 0.0, 0.0)


@pytest.mark.parametrize(("kind", "sequences", "share"), [("contiguous", 4, 0.25), ("fp16", 8, 0.5)])
def test_pages_hold_more_sequences_in_the_same_room(kind, sequences, share):
    """Sequences of 4 tokens where 16 are allowed: a row for each wastes three quarters."""
    kv = cache(kind)
    for sequence in range(sequences):
        kv.begin(sequence)
        kv.plan([(sequence, 4)])
    with pytest.raises(CacheFull, match=f"sequence 8 finds {sequences} others"):
        kv.begin(8)
    usage = kv.usage()
    assert usage.tokens_count == sequences * 4
    assert usage.bytes_used / (64 * usage.bytes_per_token) == share
