"""Converts a student in a child process, away from training: the converters change settings and print."""

import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.runtimes.network import Converted, Portable, quiet, unconvertible

SECONDS = 900
"""Time limit of a conversion, in seconds."""

_FAILED = 3
"""Exit code of a process whose last line on stderr is the reason."""


class _Named(nn.Module):
    def __init__(self, network: nn.Module, tensors: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.network = network

        def forward(**inputs: Tensor) -> dict[str, Tensor]:
            return dict(zip(outputs, network(*(inputs[name] for name in tensors)), strict=True))

        # torch.export accepts dynamic sizes only for arguments that are named in the signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in tensors])  # type: ignore[attr-defined]
        self.forward = forward


def convert(part: Portable, file: str, libraries: Libraries, module: str, padded: tuple[str, ...] = ()) -> Converted:
    """Convert a student to a model file of LiteRT or Core ML, which computes one row at a time, in a child process.

    Args:
        part: part of the student to convert.
        file: name of the model file.
        libraries: libraries of the runtime, named in errors.
        module: module to run as the child process; it calls `serve`.
        padded: named sizes to fix at their maximum, so that inputs must be padded; other named sizes stay variable.

    Raises:
        GateFailed: the conversion fails or takes more than 15 minutes.
    """
    network, max_sizes = part.require(file, libraries.name), part.max_sizes(file, libraries.name)
    names = [tensor.name for tensor in part.tensors]
    sizes = part.open_sizes({name: size for name, size in max_sizes.items() if name not in padded})
    buffer = io.BytesIO()
    try:
        named = _Named(network, names, [output.name for output in part.outputs]).eval()
        with quiet(), torch.no_grad():
            shapes = sizes if any(sizes.values()) else None
            torch.export.save(torch.export.export(named, (), part.examples(max_sizes), dynamic_shapes=shapes), buffer)
    except Exception as error:  # torch's errors share no base class
        raise unconvertible(file, libraries, error) from error
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and a module of this package
            [sys.executable, "-P", "-W", "ignore", "-m", module, file], input=buffer.getvalue(), capture_output=True,
            check=False, timeout=SECONDS, env={**os.environ, **_ENVIRONMENT},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise unconvertible(file, libraries, f"no answer in {SECONDS} seconds") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else "no output"
        if done.returncode != _FAILED:
            reason = f"its process exited with {done.returncode}: {reason}"
        raise unconvertible(file, libraries, reason)
    return Converted(file, done.stdout, max_sizes, padded)


_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
"""Environment of a conversion: the same on all machines, without accelerators or random hash seeds."""


def serve(converting: Callable[[ExportedProgram], bytes]) -> None:
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    program = torch.export.load(io.BytesIO(sys.stdin.buffer.read()))
    try:
        model = converting(program)
    except Exception as error:  # noqa: BLE001 - any error is blamed on the converter
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        sys.stderr.write(f"\n{first}\n")
        sys.stderr.flush()
        os._exit(_FAILED)
    result.write(model)
    result.flush()
    os._exit(0)  # the converters' threads may never end
