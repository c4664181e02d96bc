"""Converts a student in a child process, away from training: the converters change settings and print."""

import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import msgspec
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.runtimes.network import Converted, Portable, quiet, unconvertible

SECONDS = 900
"""Time limit of the conversions to a runtime, in seconds."""


class _Model(msgspec.Struct):
    model: bytes = b""
    error: str = ""


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


def conversions(
    part: Portable, files: Sequence[str], libraries: Libraries, module: str, padded: Callable[[], Sequence[str]] = tuple
) -> Mapping[str, Callable[[], Converted]]:
    """Return a function per model file of LiteRT or Core ML, which converts a student so that it computes single rows.

    The first call converts to all files in one child process, because its imports take longer than a conversion.

    Args:
        part: part of the student to convert.
        files: names of the model files.
        libraries: libraries of the runtime, named in errors.
        module: module to run as the child process; it calls `serve`.
        padded: returns the named sizes to fix at their maximum, so that inputs must be padded; other named sizes stay
            variable.

    Raises:
        GateFailed: the conversion fails, or all take more than 15 minutes. Raised by the functions.
    """

    @cache
    def converted() -> Mapping[str, _Model]:
        return _convert(part, files, libraries, module, padded())

    def program(file: str) -> Converted:
        made = converted()[file]
        if made.error:
            raise unconvertible(file, libraries, made.error)
        return Converted(file, made.model, part.max_sizes(file, libraries.name), tuple(padded()))

    return {file: partial(program, file) for file in files}


def _convert(
    part: Portable, files: Sequence[str], libraries: Libraries, module: str, padded: Sequence[str]
) -> Mapping[str, _Model]:
    file = files[0]
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
            [sys.executable, "-P", "-W", "ignore", "-m", module, *files], input=buffer.getvalue(), capture_output=True,
            check=False, timeout=SECONDS, env={**os.environ, **_ENVIRONMENT},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return dict.fromkeys(files, _Model(error=f"no answer in {SECONDS} seconds"))
    if done.returncode:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else "no output"
        return dict.fromkeys(files, _Model(error=f"its process exited with {done.returncode}: {reason}"))
    return msgspec.msgpack.decode(done.stdout, type=dict[str, _Model])


_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
"""Environment of a conversion: the same on all machines, without accelerators or random hash seeds."""


def serve(converting: Callable[[ExportedProgram, str], bytes]) -> None:
    """Run the child process of `conversions`: read a program from stdin, write a model or a reason for each file."""
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    program, models = torch.export.load(io.BytesIO(sys.stdin.buffer.read())), dict[str, _Model]()
    for file in sys.argv[1:]:
        try:
            models[file] = _Model(converting(program, file))
        except Exception as error:  # noqa: BLE001 - any error is blamed on the converter
            lines = (line.strip() for line in str(error).splitlines() if line.strip())
            models[file] = _Model(error=next(lines, type(error).__name__))
    result.write(msgspec.msgpack.encode(models))
    result.flush()
    os._exit(0)  # the converters' threads may never end
