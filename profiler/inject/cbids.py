"""The CUDA calls that are recorded: those that launch, copy or synchronise.

Numbers are CUPTI's callback ids (``cupti_runtime_cbid.h``, ``cupti_driver_cbid.h``), which never change
meaning once given. Recording every runtime call costs nine records a launch, most of them cudaGetDevice.
"""

from __future__ import annotations

#: Runtime API: callback id -> name, version suffix dropped; per-thread-stream variants share the name.
RUNTIME = {
    13: "cudaLaunch",
    31: "cudaMemcpy",
    41: "cudaMemcpyAsync",
    49: "cudaMemset",
    51: "cudaMemsetAsync",
    126: "cudaThreadSynchronize",
    131: "cudaStreamSynchronize",
    137: "cudaEventSynchronize",
    160: "cudaMemcpyPeer",
    161: "cudaMemcpyPeerAsync",
    165: "cudaDeviceSynchronize",
    211: "cudaLaunchKernel",
    213: "cudaLaunch",
    214: "cudaLaunchKernel",
    215: "cudaMemcpy",
    225: "cudaMemcpyAsync",
    233: "cudaMemset",
    235: "cudaMemsetAsync",
    239: "cudaStreamSynchronize",
    269: "cudaLaunchCooperativeKernel",
    270: "cudaLaunchCooperativeKernel",
    272: "cudaLaunchCooperativeKernelMultiDevice",
    311: "cudaGraphLaunch",
    312: "cudaGraphLaunch",
    430: "cudaLaunchKernelExC",
    431: "cudaLaunchKernelExC",
    482: "cudaMemcpyBatchAsync",
    483: "cudaMemcpyBatchAsync",
    505: "cudaLaunchKernel",
    506: "cudaLaunchKernel",
    509: "cudaMemcpyBatchAsync",
    510: "cudaMemcpyBatchAsync",
}

#: Driver API, called directly by Triton, NCCL, cuBLAS and JIT compilers.
DRIVER = {
    17: "cuCtxSynchronize",
    115: "cuLaunch",
    116: "cuLaunchGrid",
    117: "cuLaunchGridAsync",
    121: "cuEventSynchronize",
    126: "cuStreamSynchronize",
    216: "cuMemsetD8Async",
    218: "cuMemsetD16Async",
    220: "cuMemsetD32Async",
    249: "cuMemsetD8",
    250: "cuMemsetD16",
    251: "cuMemsetD32",
    276: "cuMemcpyHtoD",
    277: "cuMemcpyHtoDAsync",
    278: "cuMemcpyDtoH",
    279: "cuMemcpyDtoHAsync",
    280: "cuMemcpyDtoD",
    281: "cuMemcpyDtoDAsync",
    305: "cuMemcpy",
    306: "cuMemcpyAsync",
    307: "cuLaunchKernel",
    318: "cuMemcpyPeer",
    319: "cuMemcpyPeerAsync",
    408: "cuMemcpy",
    418: "cuMemcpyAsync",
    421: "cuMemcpyHtoDAsync",
    422: "cuMemcpyDtoHAsync",
    423: "cuMemcpyDtoDAsync",
    428: "cuMemsetD8Async",
    429: "cuMemsetD16Async",
    430: "cuMemsetD32Async",
    440: "cuStreamSynchronize",
    442: "cuLaunchKernel",
    477: "cuLaunchCooperativeKernel",
    478: "cuLaunchCooperativeKernel",
    480: "cuLaunchCooperativeKernelMultiDevice",
    514: "cuGraphLaunch",
    515: "cuGraphLaunch",
    652: "cuLaunchKernelEx",
    653: "cuLaunchKernelEx",
    776: "cuMemcpyBatchAsync",
    777: "cuMemcpyBatchAsync",
    796: "cuMemcpyBatchAsync",
    797: "cuMemcpyBatchAsync",
    800: "cuCtxSynchronize",
}

#: Driver calls that launch kernels or graphs, called back while launches are attributed: what the runtime launches goes
#: through them, too, under the same correlation id.
LAUNCHES = frozenset(number for number, name in DRIVER.items() if name.startswith(("cuLaunch", "cuGraphLaunch")))

DRIVER_LAUNCH_KERNEL = 307

#: Calls watched through the callback API for ``--capture-range``.
RUNTIME_PROFILER_START, RUNTIME_PROFILER_STOP = 171, 172
DRIVER_PROFILER_START, DRIVER_PROFILER_STOP = 308, 309
