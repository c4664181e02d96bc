"""A machine that runs a package's model files: reached by ssh or adb, or started by a command, such as an emulator."""

import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, NamedTuple, Self
from zipfile import ZIP_DEFLATED, ZipFile

import msgspec

from isthmus.features.errors import DependencyError, RequestError
from isthmus.package.checksums import GOLDEN, MANIFEST
from isthmus.package.golden import GoldenCase, Inputs, TensorBytes
from isthmus.package.manifest import WHOLE, Manifest, Package, Variant
from isthmus.package.replay import GOLDEN_TOLERANCE, Answers, rejection_error

SECONDS = 900
"""Time limit for one model file: an emulator takes a hundred times as long as the processor that it emulates."""

CHECK = Path(__file__).with_name("check.py")
_START = "import sys; sys.path[:] = filter(None, sys.path); exec(sys.stdin.buffer.read({size}))"
"""Reads the script from stdin. Modules in the working folder are not imported."""

_LINES = (b'{"processor":', b'{"file":')
_TARGETS = "ssh:HOST, adb, adb:SERIAL, or the command of a Python interpreter"
_QUOTED = 300
_Amount = Annotated[float, msgspec.Meta(ge=0)]


class Processor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processor and the library versions of a target, as the target states them."""

    machine: str
    processor: str
    cores: int
    system: str
    python: str
    numpy: str
    onnxruntime: str


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The comparison of a golden case with its recorded outputs; `outputs` is what the file computed.

    `differing` of `values` numbers or texts differ in any bit. `worst` is None if a difference is not a number.
    """

    values: int
    differing: int
    worst: _Amount | None
    outputs: dict[str, TensorBytes] = {}


class FileResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of running a model file on a target with one thread; `calls` is 0 if nothing was timed.

    Attributes:
        error: why the runtime rejects the file; empty if it ran.
        values: number of values in all cases; also `differing` and `worst` are those of all cases.
        load_ms: milliseconds from the file's bytes to the first prediction.
        memory_mb: peak memory of loading and predicting, in MiB; None if the system does not tell.
        p50_us: median time of a prediction, in microseconds.
    """

    file: str
    error: str = ""
    values: int = 0
    differing: int = 0
    worst: _Amount | None = None
    calls: int = 0
    load_ms: _Amount = 0.0
    memory_mb: _Amount | None = None
    p50_us: _Amount = 0.0
    p99_us: _Amount = 0.0
    cases: tuple[CaseResult, ...] = ()


class TargetRun(NamedTuple):
    processor: Processor
    result: FileResult


class _FirstLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processor: Processor


@dataclass(frozen=True)
class Target:
    """A machine with Python, NumPy and ONNX Runtime.

    `connection` is the command that runs a line in the machine's shell, empty for this machine. `interpreter` is the
    command of its Python.
    """

    name: str
    connection: Sequence[str]
    interpreter: Sequence[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a target: `ssh:HOST [PYTHON]`, `adb[:SERIAL] [PYTHON]`, or the command of a local Python.

        PYTHON is `python3` by default. Raises a RequestError if the command is empty or its quotes are unbalanced, or
        if the host, or the serial number after `adb:`, is missing or starts with `-`, like an option of ssh or adb.
        """
        where = f"target {text!r}"
        try:
            first, *words = shlex.split(text) or [""]
        except ValueError as error:
            raise RequestError(where, str(error), expected=_TARGETS) from error
        kind, colon, place = first.partition(":")
        if kind == "ssh" or first == "adb" or (kind == "adb" and colon):
            if place.startswith("-") or (not place and first != "adb"):
                raise RequestError(where, "names no machine", expected=_TARGETS)
            serial = ["-s", place] if place else []
            connection = (
                ["ssh", "-o", "BatchMode=yes", "--", place] if kind == "ssh" else ["adb", *serial, "shell", "-T"]
            )
            return cls(text, connection, words or ["python3"])
        if not first:
            raise RequestError("target", "is empty", expected=_TARGETS)
        return cls(text, [], [first, *words])

    def run(self, package: Package, variant: Variant, cases: Sequence[Inputs], calls: int = 0) -> TargetRun:
        """Run a model file on batches of inputs, and time up to `calls` predictions of the first one.

        Golden cases are also compared with their recorded outputs. The script and the files go through stdin; nothing
        is written to the target's disk.

        Raises a DependencyError if the target cannot be reached, lacks a library, or takes more than 15 minutes. Raises
        a PackageError if ONNX Runtime rejects the file or crashes.
        """
        script = CHECK.read_bytes()
        start = [*self.interpreter, "-c", _START.format(size=len(script)), "--calls", str(calls)]
        done = self._exchange(start, script + _archive(package, variant, cases))
        lines = [line for line in done.stdout.splitlines() if line.startswith(_LINES)]  # a login may greet
        if not lines:
            raise DependencyError(
                self._where, _ending(done), expected="Python 3.9 or later with NumPy and ONNX Runtime",
                remedy="install them there: python3 -m pip install numpy onnxruntime", passes=False,
            )  # fmt: skip
        try:
            processor = msgspec.json.decode(lines[0], type=_FirstLine).processor
            result = _decode(lines[1]) if lines[1:] else None
        except ValueError as error:  # a msgspec error
            raise DependencyError(self._where, f"its answer cannot be read ({error})", passes=False) from error
        reject = partial(
            rejection_error, package.manifest, variant, f"ONNX Runtime {processor.onnxruntime} on {self.name}",
            remedy="install on it at least the release that the package's README names for this file, or export again",
        )  # fmt: skip
        if result is None:
            raise reject(_ending(done))
        names = {output.name for output in package.manifest.outputs}
        if result.error:
            raise reject(result.error)
        if len(result.cases) != len(cases) or any(case.outputs.keys() != names for case in result.cases):
            raise reject("it returned other outputs than the manifest's")
        return TargetRun(processor, result)

    def _exchange(self, start: Sequence[str], data: bytes) -> "subprocess.CompletedProcess[bytes]":
        # A remote shell splits the command again, so quote it.
        command = [*self.connection, shlex.join(start)] if self.connection else start
        try:
            return subprocess.run(  # noqa: S603 - the user's own command, without a local shell
                command, input=data, capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DependencyError(self._where, f"no answer in {SECONDS} seconds", passes=False) from error
        except OSError as error:
            raise DependencyError(
                self._where, f"{command[0]} cannot be started ({error.strerror})", expected=_TARGETS,
                remedy="install it, or name another target", passes=False,
            ) from error  # fmt: skip

    @property
    def _where(self) -> str:
        return f"target {self.name}"


class DeviceRuntime:
    """ONNX Runtime on a target, to verify packages. `ask` sends the model file to the target and runs it there."""

    tolerance = GOLDEN_TOLERANCE

    def __init__(self, target: Target) -> None:
        self.name, self._target = f"ONNX Runtime on {target.name}", target

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        return [variant for variant in manifest.variants if variant.format in WHOLE]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        return outputs_of(self._target.run(package, variant, cases).result)


def outputs_of(result: FileResult) -> Sequence[Answers]:
    return [{name: tensor.array for name, tensor in case.outputs.items()} for case in result.cases]


def _decode(line: bytes) -> FileResult:
    result = msgspec.json.decode(line, type=FileResult)
    for case in result.cases:
        for tensor in case.outputs.values():
            tensor.array  # noqa: B018 - raises if its elements do not fit
    return result


def _archive(package: Package, variant: Variant, cases: Sequence[Inputs]) -> bytes:
    beside = package.manifest.files if variant.format == "onnx" else ()
    written = BytesIO()
    with ZipFile(written, "w", ZIP_DEFLATED) as archive:
        for name in (MANIFEST, variant.file, *beside):
            archive.writestr(name, package.files.read(name))
        sent = [
            GoldenCase(
                {name: TensorBytes.of(tensor) for name, tensor in case.fed(variant).items()},
                {name: of for name, of in case.outputs.items() if name == variant.file}
                if isinstance(case, GoldenCase)
                else {},
            )
            for case in cases
        ]
        archive.writestr(GOLDEN, msgspec.json.encode({"cases": sent}))
    return written.getvalue()


def _ending(done: "subprocess.CompletedProcess[bytes]") -> str:
    code = done.returncode
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    text = " ".join(done.stderr[-_QUOTED:].decode(errors="replace").split())
    return ended + (f"; its stderr ends with: {text}" if text else "")
