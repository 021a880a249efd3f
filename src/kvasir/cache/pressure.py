"""Memory pressure: who tells how full memory is, and when rows must go. Off by default.

One small function per source; adding one adds a line in the table. Evicts nothing itself.
"""

from __future__ import annotations

from kvasir.cache.policy import pressure_target
from kvasir.cache.settings import CacheSettings, Sample
from kvasir.errors import BadOption


def sampler(settings: CacheSettings) -> Sample | None:
    """The function that returns (used, total) bytes, or None when pressure is off."""
    if callable(settings.pressure):
        return settings.pressure
    return {"none": _off, "psutil": _psutil, "nvml": _nvml}[settings.pressure]()


def excess(sample: Sample, settings: CacheSettings) -> int:
    """Bytes to give up now."""
    used, total = sample()
    return pressure_target(used=used, total=total, high=settings.pressure_high, low=settings.pressure_low)


def _off() -> Sample | None:
    return None


def _psutil() -> Sample:
    import psutil

    def sample() -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.total

    return sample


def _nvml() -> Sample:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception as error:
        needs = f"nvidia-ml-py and a driver: {error}. Use 'psutil' or 'none'."
        raise BadOption(f"cache_pressure='nvml' needs {needs}") from error

    def sample() -> tuple[int, int]:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        facts = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return sum(each.used for each in facts), sum(each.total for each in facts)

    return sample
