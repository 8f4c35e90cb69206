"""Launches of many kinds; with ``--ask`` prints what the driver says about each, as JSON. A process of its own.

Every launch passes CUPTI's callback, which sees the function and its shape; the driver is asked when all is done.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
from torch.nn import functional as F

_DRIVER, _LAUNCH, _LAUNCH_EX = 1, 307, 652
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_SHARED_SIZE_BYTES, _NUM_REGS = 1, 4  # CUfunction_attribute


class Data(ctypes.Structure):
    _fields_ = [
        ("site", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("parameters", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchEx(ctypes.Structure):
    _fields_ = [("config", ctypes.POINTER(Config)), ("function", ctypes.c_void_p)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
    ]


seen: dict[tuple[int, int, int, int], str] = {}  # (function, threads, dynamic shared bytes, cluster) -> symbol


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
def callback(_user: int | None, _domain: int, point: int, address: int) -> None:
    data = Data.from_address(address)
    if data.site:
        return
    cluster = 1
    if point == _LAUNCH:
        launch = Launch.from_address(data.parameters)
        function, block, shared = launch.function, launch.block, launch.shared
    else:
        extended = LaunchEx.from_address(data.parameters)
        config = extended.config.contents
        function, block, shared = extended.function, config.block, config.shared
        for i in range(config.count):
            attribute = Attribute.from_address(config.attributes + i * ctypes.sizeof(Attribute))
            if attribute.id == _CLUSTER_DIMENSION:
                x, y, z = attribute.value[:3]
                cluster = x * y * z
    seen[function, block[0] * block[1] * block[2], shared, cluster] = (data.symbol or b"").decode()


def subscribe() -> None:
    torch.zeros(1, device="cuda")
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        path = next(line.split()[-1] for line in maps if "libcupti.so" in line)
    cupti, subscriber = ctypes.CDLL(path), ctypes.c_void_p()
    assert cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None) == 0
    for point in (_LAUNCH, _LAUNCH_EX):
        assert cupti.cuptiEnableCallback(1, subscriber, _DRIVER, point) == 0


def asked() -> list[dict[str, Any]]:
    """What the driver says about each launch that was seen."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for (handle, threads, dynamic, cluster), symbol in seen.items():
        function, value, answers = ctypes.c_void_p(handle), ctypes.c_int(), []
        for attribute in (_NUM_REGS, _SHARED_SIZE_BYTES):
            if driver.cuFuncGetAttribute(ctypes.byref(value), attribute, function):
                assert driver.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(handle)) == 0, symbol
                assert driver.cuFuncGetAttribute(ctypes.byref(value), attribute, function) == 0, symbol
            answers.append(value.value)
        occupied = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        assert occupied(ctypes.byref(value), function, threads, ctypes.c_size_t(dynamic)) == 0, symbol
        registers, static = answers
        found.append(
            {"threads": threads, "registers": registers, "static": static, "dynamic": dynamic, "cluster": cluster,
             "blocks": value.value, "symbol": symbol}
        )  # fmt: skip
    return found


def work() -> None:
    half, bf16, single = ({"device": "cuda", "dtype": d} for d in (torch.float16, torch.bfloat16, torch.float32))
    torch.manual_seed(0)
    for kind in (half, bf16, single):
        x = torch.randn(512, 1024, **kind)
        for m, k, n in ((1, 1024, 1024), (16, 4096, 1024), (128, 1024, 4096), (2048, 2048, 2048), (4096, 4096, 512)):
            torch.randn(m, k, **kind) @ torch.randn(k, n, **kind)
            F.linear(torch.randn(m, k, **kind), torch.randn(n, k, **kind), torch.randn(n, **kind))
        torch.randn(16, 128, 64, **kind) @ torch.randn(16, 64, 128, **kind)
        for function in (F.gelu, F.silu, torch.relu, torch.exp, torch.sigmoid):
            function(x)
        (x + x, x * 2, x.float(), x.t().contiguous(), torch.cat((x, x), 1), x.sum(), x.sum(1), x.amax(1), x.mean(0))
        (x.argmax(1), x.sort(1), x.topk(8, 1), x.cumsum(1), F.softmax(x, 1), F.log_softmax(x, 1), F.dropout(x, 0.5))
        (F.layer_norm(x, (1024,)), x[:, ::3].clone(), x.index_select(0, torch.arange(7, device="cuda")), x.norm())
        F.embedding(torch.arange(99, device="cuda"), x)
        F.conv2d(torch.randn(4, 16, 32, 32, **kind), torch.randn(32, 16, 3, 3, **kind))
        (torch.where(x > 0, x, -x), x.masked_fill(x > 0, 0), torch.tril(x), x.std(1), x.var(0), x.cos())
        for head_dim in (64, 128):
            q = torch.randn(2, 8, 256, head_dim, **kind)
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.fft.rfft(torch.randn(64, 4096, **single))
    torch.randint(0, 9, (5000,), device="cuda").bincount()
    torch.randn(64, 64, **single).nonzero()
    torch.multinomial(torch.rand(8, 1000, **single), 4)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if "--ask" in sys.argv:
        subscribe()
        work()
        print(json.dumps(asked()))
    else:
        work()
