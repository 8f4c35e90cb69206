"""The short way to launch: what is handed to the driver, and when it is not taken."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from spikeprof.profiler.inject.numerics import launcher
from spikeprof.profiler.inject.numerics.launcher import Launcher, launcher_for

#: As Triton 3.9 writes it for two pointers and three numbers; older ones have fewer pointers at the end.
HEAD = """
.version 8.4
.target sm_90a
.visible .entry scan(
	.param .u64 .ptr .global .align 1 scan_param_0,
	.param .u64 .ptr .global .align 1 scan_param_1,
	.param .u32 scan_param_2,
	.param .u32 scan_param_3,
	.param .u32 scan_param_4{more}
)
.reqntid {threads}
{{
	ret;
}}
"""


def ptx(more: str = "", threads: int = 128) -> str:
    return HEAD.format(more=more, threads=threads)


def scratch(count: int) -> str:
    return "".join(f",\n\t.param .u64 .ptr .global .align 1 scan_param_{5 + at}" for at in range(count))


class Driver:
    """What stands in for libcuda: it reads the parameters as the real one does."""

    def __init__(self, parameters: list[Any], answer: int = 0) -> None:
        self.parameters, self.answer = parameters, answer
        self.launches: list[tuple[Any, ...]] = []
        self.cuLaunchKernel = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
        )(self._launch)
        self.cuPointerGetAttribute = self._attribute

    def _launch(self, function: int, *rest: Any) -> int:
        places = (ctypes.c_void_p * len(self.parameters)).from_address(rest[8])
        values = [kind.from_address(place).value for kind, place in zip(self.parameters, places, strict=True)]
        self.launches.append((function, rest[:7], rest[7], values, rest[9]))
        return self.answer

    def _attribute(self, found: Any, attribute: int, address: Any) -> int:
        found._obj.value = address.value + 1  # the device's own address of the host's memory
        assert attribute == 3
        return 0


def compiled(text: str, **metadata: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(num_warps=4, shared=32, **metadata), asm={"ptx": text}, function=0x1234
    )


def tensors(*addresses: int) -> tuple[Any, ...]:
    return tuple(SimpleNamespace(data_ptr=lambda address=address: address) for address in addresses)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_pointers_come_first_then_numbers_then_no_scratch_memory(monkeypatch: pytest.MonkeyPatch, extra: int) -> None:
    kinds = [ctypes.c_uint64] * 2 + [ctypes.c_int32] * 3 + [ctypes.c_uint64] * extra
    driver = Driver(kinds)
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda name: driver)
    made = launcher_for(compiled(ptx(scratch(extra))), tensors(1 << 40, 4096), 3)
    assert made is not None
    made.launch(77, 0xABC0, (1, -2, 3))
    made.launch(5, 0, (4, 5, 6))
    assert driver.launches == [
        (0x1234, (77, 1, 1, 128, 1, 1, 32), 0xABC0, [(1 << 40) + 1, 4097, 1, -2, 3, *[0] * extra], None),
        (0x1234, (5, 1, 1, 128, 1, 1, 32), None, [(1 << 40) + 1, 4097, 4, 5, 6, *[0] * extra], None),
    ]


@pytest.mark.parametrize(
    "what",
    [
        compiled(ptx(",\n\t.param .u32 scan_param_5")),  # a number more
        compiled(ptx(scratch(5))),
        compiled(ptx(threads=256)),
        compiled(ptx().replace(".param .u32 scan_param_2", ".param .u64 scan_param_2")),
        compiled(ptx().replace(".param .u64 .ptr .global .align 1 scan_param_0,\n", "")),
        compiled(ptx() + ptx()),  # two kernels
        compiled("no code"),
        compiled(ptx(), num_ctas=2),
        compiled(ptx(), launch_cooperative_grid=True),
        SimpleNamespace(),  # a Triton that is quite different
        None,
    ],
)
def test_what_is_in_doubt_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda name: Driver([]))
    assert launcher_for(what, tensors(16, 32), 3) is None


def test_without_a_driver_there_is_no_short_way() -> None:
    assert launcher_for(compiled(ptx()), tensors(16, 32), 3) is None


def test_an_error_of_the_driver_is_raised() -> None:
    driver = Driver([], answer=700)
    made = Launcher(driver, 1, 128, 0, [16], 1)
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed: error 700"):
        made.launch(1, 0, (1,))
