from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import fabricated

from spikeprof.reports.kernel_names import clip, printable, short_name, short_names


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>"
            "(int, at::native::FillFunctor<int>, std::array<char*, 1ul>)",
            "vectorized_elementwise_kernel<4, FillFunctor<int>>",
        ),
        (fabricated.SILU, "vectorized_elementwise_kernel<4, silu_kernel(half)>"),
        (fabricated.GEMM, fabricated.GEMM),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(cutlass_80_tensorop_s1688gemm::Params)",
            "cutlass_80_tensorop_s1688gemm",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*, float const*)",
            "softmax_warp_forward<float, float, float, 10, true>",
        ),
        (
            "std::enable_if<(((8)>(0))), void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
            "fused_add_rms_norm_kernel<bf16, 8>",
        ),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIiEEEEviT0_T1_",
            "vectorized_elementwise_kernel<…>",
        ),
        ("_Z3fooPf", "foo"),
        ("_ZN12_GLOBAL__N_13barEv", "bar"),
        ("_Zwhatever", "_Zwhatever"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pageable)"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("", "(no name)"),
    ],
)
def test_readable_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_the_functor_survives_where_room_is_short() -> None:
    assert short_name(fabricated.ADD, 34) == "vectorized…<CUDAFunctor_add<half>>"


def test_names_that_shorten_alike_are_told_apart_and_fit() -> None:
    names = [f"void f<{i}>(std::array<char*, {i}>)" for i in range(30)] + ["void f<1>(std::array<char*, 1>)"]
    short = short_names([n.replace("f<", "a_rather_long_name_of_a_kernel<") for n in names], 20)
    assert len(set(short)) == 30
    assert short[1] == short[30]  # the same kernel in two rows keeps its name
    assert all(len(s) <= 20 for s in short)


def test_printable_makes_escapes_visible() -> None:
    assert printable("a\x1b[31m\u202eb\nc") == "a\\x1b[31m\\u202eb\\x0ac"
    assert printable("größe µs") == "größe µs"


def test_clip_keeps_both_ends() -> None:
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghijk", 10) == "abcdef…ijk"
    assert clip("abc", 1) == "a"


@given(st.text(alphabet="<>(){}[]:,. _Zabc0123*&'$\x1b\u2028operatlmd", max_size=300), st.integers(8, 80))
def test_any_text_gets_a_short_printable_name(name: str, width: int) -> None:
    short = short_name(name, width)
    assert 0 < len(short) <= width
    assert short.isprintable()


def test_hostile_nesting_ends_soon() -> None:
    for name in ("a<" * 100_000, "(" * 100_000, "a::b<c," * 50_000 + ">" * 50_000, "_Z" + "9" * 100_000):
        assert len(short_name(name, 40)) <= 40
