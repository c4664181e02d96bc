"""Device, precision and peak memory of a training, as `[profiles.training]` requests them."""

import os
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from isthmus.distill.settings import TrainingSettings
from isthmus.features.errors import DependencyError, first_line
from isthmus.features.profiles import TrainingProfile

_WHERE = "profiles.training"
SIDE_BY_SIDE = "_ISTHMUS_SIDE_BY_SIDE"
"""Variable of processes that each train models of their own, instead of all together one model."""


def accelerator(profile: TrainingProfile) -> Accelerator:
    """Create the Accelerator (library accelerate) that trains a student on the device that `profile` requests.

    The Accelerator also uses the precision and the compiler of the profile. If `accelerate launch` started several
    processes, it joins them. The device and precision of an earlier Accelerator in this process are forgotten. Raises a
    DependencyError if this machine does not provide the requested CUDA, bf16 or torch.compile.
    """
    device = resolve(profile)
    if profile.compile:
        _require_compiler(device)
    # accelerate keeps a process's first device and precision, but one process may train with two profiles. An existing
    # process group stays, since it belongs to torch.
    AcceleratorState._reset_state(reset_partial_state=True)
    names = ("WORLD_SIZE", "LOCAL_RANK") if SIDE_BY_SIDE in os.environ else ()
    launched = {name: os.environ.pop(name) for name in names}
    try:
        return Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="bf16" if profile.precision == "bf16" else "no",
            dynamo_backend="inductor" if profile.compile else "no",
        )
    finally:
        os.environ.update(launched)


def resolve(profile: TrainingProfile) -> torch.device:
    """Return the torch device for a training profile; "auto" takes a GPU if this machine has one.

    Call it before long work, to fail early. Raises a DependencyError if the profile requests CUDA or bf16 and this
    machine does not provide it.
    """
    if profile.device == "cuda" and not torch.cuda.is_available():
        raise DependencyError(
            f"{_WHERE}.device",
            '"cuda", but torch sees no CUDA device',
            expected="a CUDA device and a CUDA build of torch",
            remedy='set device = "cpu" or "auto", or install a driver and a CUDA build of torch',
        )
    device = torch.device("cuda" if profile.device != "cpu" and torch.cuda.is_available() else "cpu")
    if profile.precision == "bf16" and not _has_bf16(device):
        raise DependencyError(
            f"{_WHERE}.precision",
            f'"bf16", but this {device.type} does not support bf16',
            expected="a device with bf16",
            remedy='set precision = "fp32"',
        )
    return device


@contextmanager
def enough_memory(where: str, device: torch.device, settings: TrainingSettings, rows: int) -> Iterator[None]:
    """Turn an out-of-memory error in the `with` block into a DependencyError that suggests a smaller batch.

    Wrap each training step in it. `where` names the step in the message, and `rows` is the number of rows that the step
    computes at once. The suggestion quotes batch size and accumulation from `settings`. All other errors are raised
    unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise DependencyError(
            where,
            f"the memory of {device} is full with {rows} rows at once",
            remedy=f"raise accumulation ({settings.accumulation}), which keeps the results, or lower batch "
            f"({settings.batch})",
            passes=False,
        ) from error


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def is_full(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _require_compiler(device: torch.device) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(torch.sigmoid)(torch.zeros(2, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        raise DependencyError(
            f"{_WHERE}.compile",
            f"true, but torch.compile does not work here: {first_line(error)}",
            expected="Triton for CUDA, a C++ compiler and Python's headers for the CPU",
            remedy="set compile = false, or install what is missing",
        ) from error


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads of torch for the `with` block, and restore the earlier number afterwards.

    Use it to measure or train with a fixed number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
