"""Converts a student in a child process, away from training: the converters change settings and print."""

import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.runtimes.network import Converted, Portable, quiet, unconvertible

SECONDS = 900
"""Time limit of a conversion, in seconds."""

_ERROR, _PART = ".error", ".part"
"""Endings of the names of a file's error and of its unfinished content."""


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
    part: Portable,
    files: Sequence[str],
    libraries: Libraries,
    module: str,
    padded: Callable[[str], Sequence[str]] = lambda _file: (),
) -> Mapping[str, Callable[[], Converted]]:
    """Return a function per model file of LiteRT or Core ML, which converts a student so that it computes single rows.

    The first call converts to all files in one child process, because its imports take longer than a conversion.

    Args:
        part: part of the student to convert.
        files: names of the model files.
        libraries: libraries of the runtime, named in errors.
        module: module to run as the child process; it calls `serve`.
        padded: returns the names of the sizes that are fixed at their maximum in a file, so that inputs must be padded.
            Other named sizes stay variable. Must return the same for all files.

    Raises:
        GateFailed: from a returned function, if its file cannot be converted, or if converting n files takes more
            than n times 15 minutes.
    """

    @cache
    def converted() -> Mapping[str, bytes | str]:
        return _convert(part, files, libraries, module, padded(files[0]))

    def program(file: str) -> Converted:
        part.require(file, libraries.name)
        max_sizes, fixed = part.max_sizes(file, libraries.name), tuple(padded(file))
        if isinstance(model := converted()[file], str):
            raise unconvertible(file, libraries, model)
        return Converted(file, model, max_sizes, fixed)

    return {file: partial(program, file) for file in files}


def _convert(
    part: Portable, files: Sequence[str], libraries: Libraries, module: str, padded: Sequence[str]
) -> Mapping[str, bytes | str]:
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
    with TemporaryDirectory() as folder:
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter and a module of this package
                [sys.executable, "-P", "-W", "ignore", "-m", module, folder, *files], input=buffer.getvalue(),
                capture_output=True, check=False, timeout=SECONDS * len(files), env={**os.environ, **_ENVIRONMENT},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            reason = f"no answer in {SECONDS * len(files)} seconds"
        else:
            lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            reason = f"its process exited with {done.returncode}: {lines[-1] if lines else 'no output'}"
        return {file: _result(Path(folder) / file, reason) for file in files}


def _result(file: Path, reason: str) -> bytes | str:
    if file.exists():
        return file.read_bytes()
    error = file.with_name(file.name + _ERROR)
    return error.read_text(encoding="utf-8") if error.exists() else reason


_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
"""Environment of a conversion: the same on all machines, without accelerators or random hash seeds."""


def serve(converting: Callable[[ExportedProgram, str], bytes]) -> None:
    """Run the child process of `conversions`: read a program from stdin, and write each file or the error instead."""
    os.dup2(2, 1)  # libraries print to stdout
    folder, *files = sys.argv[1:]
    program = torch.export.load(io.BytesIO(sys.stdin.buffer.read()))
    for file in files:
        path = Path(folder) / file
        try:
            model = converting(program, file)
        except Exception as error:  # noqa: BLE001 - any error is blamed on the converter
            text = str(error).strip() or type(error).__name__
            path.with_name(path.name + _ERROR).write_text(text, encoding="utf-8", errors="replace")
            continue
        # The process may be killed while it writes.
        path.with_name(path.name + _PART).write_bytes(model)
        path.with_name(path.name + _PART).replace(path)
    os._exit(0)  # the converters' threads may never end
