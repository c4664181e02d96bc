"""Describes the machine that measures: latency, memory and load times are only valid for it."""

import os
import platform
from pathlib import Path

_CPUS = Path("/proc/cpuinfo")


def host() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUS.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = next(filter(None, models), platform.processor())
    names = [name for name in (platform.machine(), model) if name]
    return f"{', '.join(dict.fromkeys(names))}, {cores} core{'s' if cores > 1 else ''}"
