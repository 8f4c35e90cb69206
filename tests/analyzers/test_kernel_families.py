"""Names as they were recorded, by what they say; the families' file keeps to its own rules."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from spikeprof.analyzers.derived.kernel_families import VERDICTS, of_operator, work_of

FILE = ROOT / "analyzers" / "derived" / "kernel_families.toml"
KINDS = {
    "gemm", "conv", "attention", "pointwise", "norm", "reduction", "copy", "gather", "sort", "communication", "other",
}  # fmt: skip
ATEN = "void at::native::"
COPY = ATEN + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>"
SILU = (
    ATEN + "vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)>"
)
MEAN = ATEN + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float> > >"


@pytest.mark.parametrize(
    ("name", "verdict", "kind"),
    [
        # Inductor
        ("triton_poi_fused_add_mul_3", "fused", "pointwise"),
        ("triton_red_fused__unsafe_view_add_mean_mul_pow_rsqrt_1", "fused", "reduction"),
        ("triton_per_fused__softmax_mul_0", "fused", "reduction"),
        ("triton_tem_fused_addmm_relu_2", "fused", "gemm"),
        ("triton_tem_fused_mm_2", "single", "gemm"),
        ("triton_poi_fused__unsafe_view_add_3", "single", "pointwise"),  # a view is no work
        ("triton_poi_fused__to_copy_1", "copy", "pointwise"),
        ("triton_poi_fused_0", "unknown", "pointwise"),
        ("triton_poi_fused_add_silu_4_0d1d2de", "fused", "pointwise"),
        # what people write
        ("gelu_dropout_kernel", "fused", "pointwise"),
        ("silu_mul_kernel", "fused", "pointwise"),
        ("rms_norm_residual_kernel", "fused", "norm"),
        ("linear_silu_kernel", "fused", "gemm"),
        ("rotary_kernel", "library_fused", "pointwise"),
        ("void bias_gelu_kernel<__half>(__half*, int)", "fused", "pointwise"),
        ("vector_add", "single", "pointwise"),
        ("_int8_linear", "library_fused", "gemm"),
        # libraries and engines
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Params)",
            "library_fused",
            "attention",
        ),
        (
            "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
            "library_fused",
            "attention",
        ),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128", "library_fused", "attention"),
        ("kernel_unified_attention_2d", "library_fused", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<false, 2>(P)", "library_fused", "attention"),
        (
            "std::enable_if<true, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x)",
            "library_fused",
            "norm",
        ),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", "single", "norm"),
        ("void vllm::act_and_mul_kernel<c10::Half, silu>(c10::Half*)", "fused", "pointwise"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)", "library_fused", "gather"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "library_fused", "pointwise"),
        ("void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16>(x)", "single", "pointwise"),
        ("nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN", "library_fused", "gemm"),
        ("nvjet_sm90_hsh_8x64_64x16_2x1_v_bz_TNN", "single", "gemm"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "fused", "gemm"),
        ("void marlin::Marlin<__half, 256, 1>(x)", "library_fused", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)", "single", "gemm"),
        # names that only say what a kernel could do
        ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_relu_f2f_tn", "single", "gemm"),
        ("cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1", "single", "conv"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT160x256x64", "single", "gemm"),
        # one node each
        (SILU, "single", "pointwise"),
        (MEAN, "single", "reduction"),
        (COPY, "copy", "copy"),
        (ATEN + "(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 2>(x)", "copy", "copy"),
        (ATEN + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "single", "norm"),
        (ATEN + "(anonymous namespace)::fused_dropout_kernel_vec<float>(x)", "single", "pointwise"),
        (ATEN + "index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl<x> >", "single", "gather"),
        (ATEN + "(anonymous namespace)::multi_tensor_apply_kernel<x>(y)", "library_fused", "other"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>(x)", "single", "norm"),
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL(x)", "single", "communication"),
        ("void vllm::cross_device_reduce_1stage<__half, 2>(x)", "single", "communication"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int>(x)", "copy", "copy"),  # no product
        ("spin", "unknown", "other"),
        ("", "unknown", "other"),
    ],
)
def test_what_a_name_says(name: str, verdict: str, kind: str) -> None:
    work = work_of(name)
    assert (work.verdict, work.kind) == (verdict, kind)
    assert work.reason
    assert work.is_fused == (verdict in ("fused", "library_fused"))


def test_inductor_lists_operators_once_each() -> None:
    name = "triton_poi_fused_add_bitwise_and_bitwise_not_bitwise_or_ge_lt_mul_sub_0"
    assert work_of(name).operators == ("add", "bitwise_and", "bitwise_not", "bitwise_or", "ge", "lt", "mul", "sub")
    assert work_of("triton_poi_fused__to_copy__unsafe_view_add_7").operators == ("_to_copy", "add")
    assert work_of("triton_poi_fused_my_own_op_add_7").operators == ("my_own_op", "add")
    assert work_of("triton_poi_fused_add_mul_3").reason == "Inductor joined add and mul"


@pytest.mark.parametrize(
    ("name", "does"),
    [
        (SILU, "silu"),
        (MEAN, "mean"),
        (COPY, "copy"),
        (ATEN + "vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(x)::{lambda(c10::Half)#1}>", "gelu"),
        (
            ATEN + "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<at::native::CUDAFunctorOnSelf_add<float> > >",
            "add",
        ),
        (ATEN + "unrolled_elementwise_kernel<at::native::AUnaryFunctor<float, MulFunctor<float> > >", "mul"),
        (ATEN + "vectorized_elementwise_kernel<4, at::native::pow_tensor_scalar_kernel_impl<float, float> >", "pow"),
        (ATEN + "vectorized_elementwise_kernel<4, at::native::addcmul_cuda_kernel(x)::{lambda()#2}>", "addcmul"),
        (ATEN + "(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 2>(x)", "cat"),
        (ATEN + "index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl<x> >", "index_copy"),
        ("triton_poi_fused_add_mul_3", "add+mul"),
        ("nvjet_sm90_hsh_8x64_64x16_2x1_v_bz_TNN", "gemm"),
        ("spin", "other"),
    ],
)
def test_what_a_kernel_does_in_a_word(name: str, does: str) -> None:
    assert work_of(name).does == does


def test_what_operators_say() -> None:
    assert (of_operator("aten::mul").verdict, of_operator("aten::mul").kind) == ("single", "pointwise")
    assert of_operator("aten::mul_").kind == "pointwise"
    assert of_operator("aten::copy_").verdict == "copy"
    assert of_operator("aten::_softmax").kind == "norm"
    for name in ("mul", "aten::no_such", "aten::view", "triton::mine", "vllm::rms_norm", ""):
        assert of_operator(name).verdict == "unknown"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_name_has_an_answer(name: str) -> None:
    assert work_of(name).verdict in VERDICTS
    assert work_of(f"triton_poi_fused_{name}").kind in KINDS
    assert of_operator(f"aten::{name}").verdict in VERDICTS


def test_very_long_names_take_no_time() -> None:
    for name in ("a_" * 100_000, "triton_poi_fused_" + "add_" * 100_000, "<" * 100_000, "1d" * 100_000):
        assert work_of(name).verdict in VERDICTS


def test_the_file_keeps_to_its_rules() -> None:
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    for family in data["families"]:
        assert set(family) <= {"pattern", "kind", "verdict", "reason", "source", "part"}
        re.compile(family["pattern"])
        assert family["kind"] in KINDS
        assert family["verdict"] in VERDICTS
        assert family["source"] in data["sources"]
        assert family["reason"][-1] != "."
    for table in ("words", "plain"):
        assert set(data[table]) <= KINDS | {"view"}
        words = [word for group in data[table].values() for word in group]
        assert len(words) == len(set(words)), "a word of two kinds"
    assert set(data["inductor"]["kinds"].values()) <= KINDS
