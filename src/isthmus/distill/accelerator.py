"""Where a module is trained, as `[profiles.training]` says it: device, precision and processes."""

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


def accelerator(profile: TrainingProfile) -> Accelerator:
    """This process's device and precision, and the peers that `accelerate launch` started. Raises like `resolve`."""
    device = resolve(profile)
    if profile.compile:
        _require_compiler(device)
    # accelerate never changes the first choice of a process, but a process may train by two profiles. An existing
    # process group stays: it is torch's.
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if profile.precision == "bf16" else "no",
        dynamo_backend="inductor" if profile.compile else "no",
    )


def resolve(profile: TrainingProfile) -> torch.device:
    """The device of a profile; raises a DependencyError if this machine has no CUDA device, or no bf16 for it."""
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
            f'"bf16", but this {device.type} has no bf16 arithmetic',
            expected="a device with bf16",
            remedy='set precision = "fp32"',
        )
    return device


@contextmanager
def enough_memory(where: str, device: torch.device, settings: TrainingSettings, rows: int) -> Iterator[None]:
    """If memory runs out within the block, raises an error that says which settings need less of it."""
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
    """This process's peak memory in bytes: what torch allocated on a GPU, else the resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def is_full(error: Exception) -> bool:
    """Whether an error of torch means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _require_compiler(device: torch.device) -> None:
    """Compiles a small function: what torch.compile needs (Triton, a C++ compiler, headers) differs by device."""
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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block, torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
