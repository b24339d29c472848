"""What the last bits of a result depend on, besides the manifest and the seed."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy
import torch


def prepare_process(threads: int) -> None:
    """Make this process's arithmetic repeatable. Call it before the first operation.

    Args:
        threads: of torch's intra-operation pool (``spec.training.threads``): a sum's order depends on it.
    """
    torch.set_num_threads(threads)
    # As torch.use_deterministic_algorithms(True), which besides imports all of torch's compiler: 3 s of every process.
    torch.set_deterministic_debug_mode("error")
    # Filling fresh memory costs time and only helps code that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def numerics_key(threads: int, device: str) -> dict[str, str]:
    """Equal keys promise equal digests for the same manifest and seed; a difference is what a user is shown."""
    config = torch.__config__.show()
    blas = next(
        (line.split("=")[1] for line in config.replace(",", "\n").split("\n") if "BLAS_INFO=" in line), "unknown"
    )
    return {
        "torch": str(torch.__version__),
        "numpy": str(numpy.__version__),
        "cpuCapability": torch.backends.cpu.get_cpu_capability(),
        "blas": blas.strip(),
        "cpuModel": _cpu_model(),
        "threads": str(threads),
        "device": device,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
        return " ".join(fields.get(k, "?") for k in ("vendor_id", "cpu family", "model", "stepping", "model name"))
    return platform.processor() or platform.machine()
