"""PM sampling through cupti-python: the one adapter to it, used in the sampler's own process.

cupti-python sets sampling up. What is done once a sample, ten thousand times a second and more, goes to the same
libcupti through ctypes with parameters that stay in place: cupti-python's own loops take five times as long.
"""

from __future__ import annotations

import ctypes
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.inject.cupti import library_candidates

#: Where samples wait for being decoded, in the driver: about 10 kB each (memory set on H200).
HARDWARE_BUFFER_BYTES = 256 << 20

_OUT_OF_MEMORY = 8  # CUPTI_ERROR_OUT_OF_MEMORY: that buffer ran over, and stays so until sampling is set up again

_DRIVER_CODES = {
    100: "the driver sees no GPU",
    803: "the driver is older than its libraries",
    999: "the driver does not say why",
}


class PmUnavailable(Exception):
    """Counters cannot be sampled here; the message says why and what would help."""


def load() -> str:
    """Load libcupti with its helpers, and the driver; returns libcupti's path. Raises PmUnavailable.

    cupti-python finds libcupti by itself only in some installations, and crashes where it does not: so the library is
    loaded first. libcupti asks for its two helpers by name alone.
    """
    tried = "no libcupti is installed beside cupti-python (pip install nvidia-cuda-cupti)"
    for candidate in library_candidates():
        path = Path(candidate)
        try:
            for helper in ("libnvperf_target.so", "libnvperf_host.so"):
                ctypes.CDLL(str(path.parent / helper) if path.parent.name else helper, ctypes.RTLD_GLOBAL)
            ctypes.CDLL(candidate, ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried = str(error)
            continue
        _start_driver()
        return candidate
    raise PmUnavailable(tried)


def _start_driver() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PmUnavailable("no NVIDIA driver: libcuda.so.1 cannot be loaded") from error
    code = driver.cuInit(0)
    if code:
        raise PmUnavailable(f"cuInit: {_DRIVER_CODES.get(code, 'failed')} ({code})")


@dataclass(slots=True)
class Decoded:
    """What one decoding brought: how many samples can be read, and whether samples ran over before it."""

    count: int
    overflow: bool = False


class Image:
    """Room for ``capacity`` decoded samples."""

    def __init__(self, blank: npt.NDArray[np.uint8]) -> None:
        self._blank = blank
        self.data = blank.copy()

    def clear(self) -> None:
        """Make it empty again."""
        self.data[:] = self._blank


class PmSampler:
    """PM sampling of one GPU with one list of CUPTI's metrics. Each new list needs a new sampler.

    ``device`` is the CUDA ordinal in this process. Raises PmUnavailable wherever CUPTI refuses.
    """

    def __init__(self, device: int, library: str) -> None:
        try:
            import cupti.cupti as bindings
            from cupti import pm_sampling, profiler_host
        except ImportError as error:
            raise PmUnavailable(f"cupti-python with PM sampling (13.3 or newer) is not installed: {error}") from error
        self._c, self._host_module = bindings, profiler_host
        self._lib = ctypes.CDLL(library)
        self._collector = pm_sampling.Collector(device)
        self.metrics: tuple[str, ...] = ()
        self._host: Any = None
        try:
            self._collector.enable()
        except Exception as error:
            raise PmUnavailable(_why(error, device)) from error
        self.chip: str = self._collector._chip_name

    def close(self) -> None:
        """Give the counters back."""
        if self._host is not None:
            self._host.deinitialize()
            self._host = None
        self._collector.disable()

    # -- which metrics ------------------------------------------------------------------------

    def passes(self, metrics: Sequence[str]) -> int:
        """How many passes these metrics need; 1 is what sampling can do. Raises PmUnavailable for an unknown one."""
        host = self._new_host()
        try:
            return int(self._host_module.get_num_of_passes(host.create_config_image(list(metrics))))
        except Exception as error:
            raise PmUnavailable(self._unknown(metrics, error)) from error
        finally:
            host.deinitialize()

    def _unknown(self, metrics: Sequence[str], error: Exception) -> str:
        """Which metric this chip does not have, and what it may have meant."""
        kinds = self._host_module.MetricType
        host = self._new_host()
        try:
            known = {base for kind in (kinds.COUNTER, kinds.RATIO, kinds.THROUGHPUT) for base in _base(host, kind)}
        finally:
            host.deinitialize()
        for metric in metrics:
            base = metric.split(".")[0]
            if base not in known:
                near = difflib.get_close_matches(base, known, 3)
                meant = f"; near it: {', '.join(near)}" if near else ""
                return f"{self.chip} has no metric {metric!r}{meant}"
        return f"metrics refused on {self.chip}: {', '.join(metrics)} ({_name(error)})"

    def _new_host(self) -> Any:
        host = self._host_module.ProfilerHost(self.chip, self._host_module.ProfilerType.PM_SAMPLING)
        host.initialize()
        return host

    # -- sampling -----------------------------------------------------------------------------

    def configure(self, metrics: Sequence[str], interval_ns: int, capacity: int) -> None:
        """Set up sampling of these metrics, one pass together, every ``interval_ns``; images of ``capacity``."""
        from cupti.utils import metrics_to_c_array

        try:
            self._collector.configure(
                metrics=list(metrics), sampling_interval=interval_ns, hardware_buffer_size=HARDWARE_BUFFER_BYTES
            )
            self._blank = self._collector._create_counter_data_image(capacity)
        except Exception as error:
            # Another holder of the counters is seen here, not where sampling is enabled.
            reason = _known_reason(error) or f"sampling {', '.join(metrics)} every {interval_ns} ns: {_name(error)}"
            raise PmUnavailable(reason) from error
        self.metrics = tuple(metrics)
        self._names, self._names_at = metrics_to_c_array(list(metrics))
        self._host = self._new_host()
        self._decode = self._parameters("PmSamplingDecodeDataParams", p_pm_sampling_object=self._object)
        self._info = self._parameters("PmSamplingGetCounterDataInfoParams")
        self._times = self._parameters("PmSamplingCounterDataGetSampleInfoParams", p_pm_sampling_object=self._object)
        self._values = self._parameters(
            "ProfilerHostEvaluateToGpuValuesParams",
            p_host_object=self._host._p_host_object,
            pp_metric_names=self._names_at,
            num_metrics=len(metrics),
        )

    @property
    def _object(self) -> int:
        return int(self._collector._pm_sampling_object)

    def _parameters(self, name: str, **fields: int) -> Any:
        parameters = getattr(self._c, name)()
        words = re.findall("[A-Z][a-z]+", name)
        parameters.struct_size = getattr(self._c, "_".join(words).upper() + "_STRUCT_SIZE")
        for field, value in fields.items():
            setattr(parameters, field, value)
        return parameters

    def image(self) -> Image:
        """Room for the samples of one decoding."""
        return Image(self._blank)

    def start(self) -> None:
        """Begin to sample."""
        try:
            self._collector.start()
        except Exception as error:
            raise PmUnavailable(_known_reason(error) or f"sampling did not start: {_name(error)}") from error

    def stop(self) -> None:
        """End sampling; what was taken can still be decoded."""
        self._collector.stop()

    def decode(self, image: Image) -> Decoded:
        """Samples taken since the last call, at most the image's capacity, into the image."""
        image.clear()
        parameters = self._decode
        self._aim(parameters, image)
        code = self._lib.cuptiPmSamplingDecodeData(ctypes.c_void_p(parameters.ptr))
        if code == _OUT_OF_MEMORY or parameters.overflow:
            return Decoded(0, overflow=True)
        if code:
            raise PmUnavailable(f"samples could not be decoded: CUPTI error {code}")
        self._aim(self._info, image)
        code = self._lib.cuptiPmSamplingGetCounterDataInfo(ctypes.c_void_p(self._info.ptr))
        if code:
            raise PmUnavailable(f"samples could not be counted: CUPTI error {code}")
        return Decoded(int(self._info.num_completed_samples))

    def read(self, image: Image, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The first ``count`` samples of an image: begin and end [count, 2] in Unix ns, values [count, metrics].

        One that CUPTI refuses has times of 0, or NaN for values.
        """
        times, values = np.zeros((count, 2), np.int64), np.zeros((count, len(self.metrics)))
        self._aim(self._times, image)
        index, begin, end = _views(self._times, self._c, "pm_sampling_counter_data_get_sample_info", _SAMPLE_FIELDS)
        ask, at = self._lib.cuptiPmSamplingCounterDataGetSampleInfo, ctypes.c_void_p(self._times.ptr)
        for k in range(count):  # CUPTI gives them one by one
            index.value = k
            if ask(at) == 0:
                times[k] = begin.value, end.value
        self._aim(self._values, image)
        index, target = _views(self._values, self._c, "profiler_host_evaluate_to_gpu_values", _VALUE_FIELDS)
        ask, at = self._lib.cuptiProfilerHostEvaluateToGpuValues, ctypes.c_void_p(self._values.ptr)
        row, base = values.strides[0], values.ctypes.data
        for k in range(count):
            index.value, target.value = k, base + k * row
            if ask(at):
                values[k] = np.nan
        return times, values

    @staticmethod
    def _aim(parameters: Any, image: Image) -> None:
        parameters.p_counter_data_image = image.data.ctypes.data
        parameters.counter_data_image_size = len(image.data)


_SAMPLE_FIELDS = ("sample_index", "start_timestamp", "end_timestamp")
_VALUE_FIELDS = ("range_index", "p_metric_values")


def _views(parameters: Any, bindings: Any, name: str, fields: Sequence[str]) -> list[ctypes.c_uint64]:
    """Live 64-bit views of fields of a parameter struct."""
    offsets = getattr(bindings, f"{name}_params_dtype").fields
    return [ctypes.c_uint64.from_address(parameters.ptr + offsets[field][1]) for field in fields]


def _base(host: Any, kind: Any) -> list[str]:
    return list(host.get_base_metrics(kind))


def _name(error: Exception) -> str:
    """CUPTI's name for what went wrong, or the exception's own words."""
    status = getattr(error, "status", None)
    return str(getattr(status, "name", "") or error or type(error).__name__)


def _why(error: Exception, device: int) -> str:
    """Why counters cannot be had, and what would unlock them."""
    if isinstance(error, ValueError):
        return f"there is no GPU {device}"
    return _known_reason(error) or f"PM sampling could not be started ({_name(error)})"


def _known_reason(error: Exception) -> str:
    """The same for refusals that have a known cause; empty for others."""
    name = _name(error)
    if isinstance(error, PermissionError) or "PRIVILEGES" in name:
        return (
            "this user may not read GPU counters: run as root, or have the administrator load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "BUSY" in name or "already enabled" in name:
        return "another tool holds the GPU's counters (DCGM, Nsight or a second sampler): stop it first"
    if "MIG" in name:
        return "counters of a MIG instance cannot be sampled"
    if "NOT_SUPPORTED" in name or "NOT_COMPATIBLE" in name or "INSUFFICIENT_DRIVER" in name:
        return f"PM sampling needs Turing or newer and a driver of CUDA 12.6 or newer ({name})"
    return ""
