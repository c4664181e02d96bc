"""A student as an exported program of torch, which a process of its own converts.

The process keeps the converters' imports, settings and prints away from training: `python -m MODULE FILE` with a
program on stdin, and the model on stdout.
"""

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
"""Limit for a conversion."""

_FAILED = 3
"""Exit code of a process whose last word on stderr is the reason."""


class _Named(nn.Module):
    """A network whose inputs and outputs have their names."""

    def __init__(self, network: nn.Module, tensors: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.network = network

        def forward(**fed: Tensor) -> dict[str, Tensor]:
            return dict(zip(outputs, network(*(fed[name] for name in tensors)), strict=True))

        # torch.export takes no sizes for arguments that a signature does not name.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in tensors])  # type: ignore[attr-defined]
        self.forward = forward


def convert(of: Portable, file: str, libraries: Libraries, module: str, padded: tuple[str, ...] = ()) -> Converted:
    """The file for a row at a time, as a module's process makes it. Raises a GateFailed if that is not possible.

    The sizes in `padded` are the maximum in every call.
    """
    network, max_sizes = of.require(file, libraries.name), of.max_sizes(file, libraries.name)
    names = [tensor.name for tensor in of.tensors]
    sizes = of.open_sizes({name: size for name, size in max_sizes.items() if name not in padded})
    buffer = io.BytesIO()
    try:
        named = _Named(network, names, [output.name for output in of.outputs]).eval()
        with quiet(), torch.no_grad():
            shapes = sizes if any(sizes.values()) else None
            torch.export.save(torch.export.export(named, (), of.examples(max_sizes), dynamic_shapes=shapes), buffer)
    except Exception as error:  # those of torch have no base class in common
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
        reason = lines[-1] if lines else "no word"
        if done.returncode != _FAILED:
            reason = f"its process ended with {done.returncode}: {reason}"
        raise unconvertible(file, libraries, reason)
    return Converted(file, done.stdout, max_sizes, padded)


_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
"""Of a conversion: neither an accelerator nor an order of sets differs between machines."""


def serve(converting: Callable[[ExportedProgram], bytes]) -> None:
    """The process: reads a program and writes what it becomes."""
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    program = torch.export.load(io.BytesIO(sys.stdin.buffer.read()))
    try:
        model = converting(program)
    except Exception as error:  # noqa: BLE001 - any error is the converter's
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        sys.stderr.write(f"\n{first}\n")
        sys.stderr.flush()
        os._exit(_FAILED)
    result.write(model)
    result.flush()
    os._exit(0)  # the converters' threads may wait for ever
