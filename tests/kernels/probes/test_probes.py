from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels import probes  # noqa: E402
from spikeprof.kernels.probes.transpose import TILES, source  # noqa: E402
from spikeprof.kernels.probes.transpose import ways as transpose_ways  # noqa: E402

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("shape", [(1,), (3, 1367), (4096,), (5000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_copy_moves_every_byte(device_path, shape, dtype):
    device, path = device_path
    x = torch.randint(0, 200, shape, device=device).to(dtype)
    probed = probes.stream_copy(x, path=path)
    assert torch.equal(probed.out, x)
    assert probed.path == path
    assert probed.bytes_moved == 2 * x.numel() * x.element_size()
    assert probed.flops == 0


def test_copy_keeps_bits_that_are_no_number(device_path):
    device, path = device_path
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45], device=device)
    out = probes.stream_copy(x, torch.empty_like(x), path=path).out
    assert torch.equal(out.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("m", "n", "k"), [(8, 8, 8), (130, 264, 72), (200, 520, 136)])
def test_product_against_float64(device_path, dtype, m, n, k):
    device, path = device_path
    a = torch.randn(m, k, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(k, n, device=device, dtype=torch.float32).to(dtype)
    probed = probes.matmul(a, b, path=path)
    wanted = a.double() @ b.double()
    assert probed.out.isfinite().all()
    assert (probed.out.double() - wanted).norm() / wanted.norm() <= BOUNDS[dtype]
    assert (probed.path, probed.flops) == (path, 2 * m * n * k)
    assert probed.bytes_moved == (m * k + k * n + m * n) * a.element_size()


def test_every_pass_reads_every_element_once(device_path):
    device, path = device_path
    x = torch.arange(10_000, device=device, dtype=torch.float32).remainder(7)
    probed = probes.read_again(x, 5, path=path)
    assert float(probed.out.sum()) == 5 * float(x.sum())
    assert probed.bytes_moved == 5 * 40_000


@pytest.mark.parametrize(("rows", "width", "count"), [(100, 8, 333), (7, 1, 1), (9, 1500, 5)])
def test_gather_takes_the_named_rows(device_path, rows, width, count):
    device, path = device_path
    table = torch.randn(rows, width, device=device)
    index = probes.random_rows(rows, count, device=device, seed=1)
    probed = probes.gather(table, index, path=path)
    assert torch.equal(probed.out, table[index])
    assert probed.bytes_moved == 2 * count * width * 4 + 8 * count


def test_rows_are_the_same_for_one_seed_and_in_range():
    first, again = probes.random_rows(10, 1000, seed=3), probes.random_rows(10, 1000, seed=3)
    assert torch.equal(first, again)
    assert set(first.tolist()) == set(range(10))


def test_empty_launches_do_nothing(device_path):
    device, path = device_path
    probed = probes.launch_empty(3, device=device, path=path)
    assert probed.path == path
    assert probed.out.tolist() == [0.0]


@pytest.mark.parametrize("tile", list(TILES))
@pytest.mark.parametrize(("shape", "passes"), [((1, 1), 1), ((33, 70), 1), ((64, 32), 1), ((33, 70), 16)])
def test_transpose(tile, shape, passes):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and probes.why_no_nvrtc():
        pytest.skip(probes.why_no_nvrtc())
    x = torch.randn(shape, device=device)
    probed = probes.transpose(x, tile, passes)
    assert torch.equal(probed.out, x.t())
    assert probed.path == ("nvrtc" if device == "cuda" else "torch")


def banks(tile: str) -> tuple[int, int]:
    """Most accesses of one warp to one bank, writing a row and reading a column, by the indices in the source."""
    words = int(TILES[tile])
    text = source(tile)
    swizzled = "tile[y][x ^ y]" in text and "tile[x][y ^ x]" in text
    assert f"tile[32][{words}]" in text

    def most(cells: list[tuple[int, int]]) -> int:
        used = [(row * words + (column ^ row if swizzled else column)) % 32 for row, column in cells]
        return max(used.count(bank) for bank in used)

    return most([(5, x) for x in range(32)]), most([(x, 5) for x in range(32)])


@pytest.mark.parametrize(("tile", "ways"), [("conflicting", 32), ("padded", 1), ("swizzled", 1)])
def test_ways_of_conflict_by_hand(tile, ways):
    assert banks(tile) == (1, ways)
    assert transpose_ways(tile) == ways


def test_what_cannot_be_is_named():
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"out has shape \[8, 4\], \[4, 8\] is wanted"):
        probes.stream_copy(x, torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"source has shape \[0, 8\]"):
        probes.stream_copy(x[:0])
    with pytest.raises(ValueError, match=r"b has shape \[4, 8\], \[8, any\] is wanted"):
        probes.matmul(x, x)
    with pytest.raises(ValueError, match=r"b is torch.float16, a torch.float32"):
        probes.matmul(x, x.t().half())
    with pytest.raises(ValueError, match=r"passes is 0: it must be 1 or more"):
        probes.read_again(x, 0)
    with pytest.raises(IndexError, match=r"index has 4 to 4: table has rows 0 to 3"):
        probes.gather(x, torch.tensor([4]))
    with pytest.raises(ValueError, match=r"count is 0"):
        probes.launch_empty(0)
    with pytest.raises(ValueError, match=r"tile is 'odd': it can be conflicting, padded, swizzled"):
        probes.transpose(x, "odd")
    with pytest.raises(ValueError, match=r"passes is 0: 1 at least"):
        probes.transpose(x, passes=0)
    with pytest.raises(ValueError, match=r"path is 'nvrtc', not available"):
        probes.transpose(x, path="nvrtc")


def test_the_kernel_names_rows_that_descriptors_cannot_load():
    pytest.importorskip("triton")
    device, path = ("cuda", "triton") if torch.cuda.is_available() else ("cpu", "interpreter")
    a, b = torch.zeros(4, 6, device=device), torch.zeros(6, 4, device=device)
    with pytest.raises(ValueError, match=r"a has rows of 24 bytes: this path needs a multiple of 16; take 'torch'"):
        probes.matmul(a, b, path=path)


def test_peer_copy_or_why_not():
    if probes.why_no_peer():
        assert "it needs 2 GPUs, there " in probes.why_no_peer()
        with pytest.raises(ValueError, match="peer copy is not available: it needs 2 GPUs"):
            probes.peer_copy(torch.zeros(4), torch.zeros(4))
        return
    source_tensor = torch.randn(1000, device="cuda:0")
    probed = probes.peer_copy(source_tensor, torch.empty(1000, device="cuda:1"))
    assert torch.equal(probed.out.cpu(), source_tensor.cpu())
    assert probed.bytes_moved == 4000
