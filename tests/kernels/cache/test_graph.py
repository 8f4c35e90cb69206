import pytest
import torch

from spikeprof.kernels.cache import KINDS, make_cache

HEADS, KV_HEADS, HEAD_DIM, MOST_BATCH = 8, 2, 64, 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use: CUDA graphs need one")
@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_the_step(kind, path):
    """The same tokens through a cache that is replayed and one that is not, as sequences come and go."""
    replayed, plain = (
        make_cache(kind, layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity_tokens=256, max_sequences=4,
                   max_tokens=64, dtype=torch.float16, device="cuda") for _ in range(2)
    )  # fmt: skip
    static = replayed.blank_plan(MOST_BATCH)
    new = torch.zeros(2, MOST_BATCH, KV_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")
    q = torch.zeros(MOST_BATCH, HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")

    def step():
        replayed.append(0, static, new[0], new[1], path=path)
        return replayed.attend(0, static, q, path=path).out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    generator = torch.Generator().manual_seed(0)
    present = []
    for at in range(40):
        if at in {0, 1, 5, 9}:
            present.append(at)
            for kv in (replayed, plain):
                kv.begin(at)
        if at == 20:
            present.remove(1)
            for kv in (replayed, plain):
                kv.evict(1)
        batch = len(present)
        new.copy_(torch.randn(new.shape, generator=generator))
        q.copy_(torch.randn(q.shape, generator=generator))
        static.copy_from(replayed.plan([(sequence, 1) for sequence in present]))
        graph.replay()
        plan = plain.plan([(sequence, 1) for sequence in present])
        plain.append(0, plan, new[0, :batch], new[1, :batch], path=path)
        wanted = plain.attend(0, plan, q[:batch], path=path).out
        assert torch.isfinite(out[:batch]).all()
        assert (out[:batch].float() - wanted.float()).norm() <= 2e-3 * wanted.float().norm()
        assert not out[batch:].any()
    for sequence in present:
        for found, wanted in zip(replayed.gather(0, sequence), plain.gather(0, sequence), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use: kernels are compiled for one")
def test_longer_contexts_have_each_kernel_compiled_once():
    """A step that waits for the compiler takes half a second instead of some milliseconds.

    Once more is for parts that are to be merged: these are kept in float32.
    """
    from spikeprof.kernels.attention import decode_triton

    kv = make_cache("fp16", layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity_tokens=1280, max_sequences=1,
                    max_tokens=1280, dtype=torch.float16, device="cuda")  # fmt: skip
    kv.begin(0)
    new = torch.zeros(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")
    q = torch.zeros(1, HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")
    compiled = []
    for _ in range(1200):
        plan = kv.plan([(0, 1)])
        kv.append(0, plan, new[0], new[1], path="triton")
        kv.attend(0, plan, q, path="triton")
        kernels = decode_triton._decode_part, decode_triton._merge_parts
        compiled.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert all(last - first <= 1 for first, last in zip(compiled[0], compiled[-1], strict=True))
