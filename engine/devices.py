"""What the machine offers, and what to take of it by default."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.engine.config import EngineConfig
from adaflash.engine.errors import ConfigError

GIB = 1 << 30
CPU_CACHE_GIB = 2.0  # default KV cache on the CPU, if a quarter of the available memory allows it
CUDA_CACHE_SHARE = 0.85  # of the memory left after loading the weights


@dataclass(frozen=True)
class Device:
    """Where the engine runs and with what numbers."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_device(config: EngineConfig) -> Device:
    """Resolve "auto" for this machine. Raises ConfigError if what is asked for is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, and PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices"
        )
    num_threads = config.num_threads or _default_threads()
    return Device(device, _choose_dtype(config.dtype, device), num_threads)


def cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes to spend on key/value pages; call after the weights are loaded."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_CACHE_SHARE)
    return int(min(CPU_CACHE_GIB * GIB, _available_memory() / 4))


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda" or _cpu_multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Whether bfloat16 GEMMs run on matrix instructions here instead of being emulated."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def _default_threads() -> int:
    """All cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_memory() -> int:
    """Bytes that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere: half of all memory, taking the rest to be in use.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def processor_name(device: torch.device) -> str:
    """Name of the chip, as the system has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
