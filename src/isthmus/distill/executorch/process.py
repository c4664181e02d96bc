"""Runs an ExecuTorch program in a child process, which a damaged file may crash.

`python -m isthmus.distill.executorch.process THREADS MEMORY` is that process. It needs only torch and executorch. Its
answers are untrusted: the program may do there what it likes.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any

import msgspec
import numpy as np

from isthmus.distill.types import Array
from isthmus.features.errors import DependencyError
from isthmus.features.package.checksums import LARGEST
from isthmus.features.package.golden import TensorBytes
from isthmus.features.package.manifest import Feeds, Package, Tensor, Variant
from isthmus.features.package.replay import SECONDS, refused
from isthmus.features.package.sandbox import confine

NAME = "ExecuTorch"
PINS = dict(
    line.split("==")
    for line in Path(__file__).parents[1].joinpath("executorch.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
"""The required packages beside torch, and their versions."""
INSTALL = f"pip install --no-deps {' '.join(f'{name}=={version}' for name, version in PINS.items())}"

MEMORY = 4 << 30
"""Bytes of memory of the process, beside its libraries and the file."""

_LARGEST = LARGEST + 2**20
"""Bytes of a message."""

_LAST_WORDS = 300
"""Bytes of the end of stderr in a message."""

_WRITTEN = 2**20
"""Bytes that the process may write to stderr, which is a file."""

_KINDS = {0: "uint8", 3: "int32", 4: "int64", 6: "float", 7: "double", 11: "bool"}
"""Elements by the numbers of torch's ScalarType."""


class Refused(Exception):
    """ExecuTorch refuses a file or its inputs, and why."""


@contextmanager
def opened(package: Package, variant: Variant) -> Iterator["Program"]:
    """A program of a package.

    Raises:
        DependencyError: ExecuTorch is not installed.
        PackageError: it refuses the file, or does not answer.
    """
    manifest, model = package.manifest, package.files.read(variant.file)
    try:
        with Program(model, manifest.tensors, manifest.outputs, variant.most) as program:
            yield program
    except Refused as error:
        raise refused(manifest, variant, NAME, error) from error


class _Described(msgspec.Struct, frozen=True):
    """A tensor of a program, which has no name."""

    element: str
    shape: tuple[int, ...]


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the process: first about the program, then an answer each time."""

    error: str = ""
    missing: str = ""
    inputs: tuple[_Described, ...] = ()
    outputs: tuple[_Described, ...] = ()
    answers: tuple[TensorBytes, ...] = ()


class Program(AbstractContextManager["Program"]):
    """A program, with the content of its file, in its process. Close it, or use it as a context.

    A row at a time is computed, so that the memory that is planned ahead is that of a single row. `max_sizes` are those
    of named sizes, `memory` the bytes that it may use, beside the libraries and the file; on Linux.

    Raises:
        DependencyError: ExecuTorch is not installed.
        Refused: the file is no program, or has different inputs or outputs.
    """

    def __init__(
        self,
        model: bytes,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        max_sizes: Mapping[str, int],
        threads: int = 1,
        memory: int = MEMORY,
    ) -> None:
        self._tensors, self._outputs = tensors, outputs
        self._stderr = TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P: the working folder may be that of an untrusted package with a torch.py.
        command = [sys.executable, "-P", "-m", "isthmus.distill.executorch.process", str(threads), str(memory)]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        try:
            program = self._exchange(model)
            _require("has the inputs", tensors, program.inputs, max_sizes)
            _require("has the outputs", outputs, program.outputs, max_sizes)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process, self._stderr:
            pass

    def ask(self, feeds: Feeds) -> dict[str, Array]:
        """The outputs by name, of inputs by name with any number of rows. Raises a Refused if it does not answer."""
        counts = {len(array) for array in feeds.values()}
        if len(counts) != 1 or 0 in counts:
            raise Refused(f"its inputs have {' and '.join(map(str, sorted(counts)))} rows")
        rows = ({name: array[row : row + 1] for name, array in feeds.items()} for row in range(counts.pop()))
        parts = [self._ask(row) for row in rows]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _ask(self, feeds: Feeds) -> dict[str, Array]:
        message = self._exchange(
            msgspec.msgpack.encode([TensorBytes.of(feeds[tensor.name]) for tensor in self._tensors])
        )
        try:
            return {tensor.name: data.array for tensor, data in zip(self._outputs, message.answers, strict=True)}
        except ValueError as error:
            raise self._unreadable(error) from error

    def _exchange(self, data: bytes) -> _Message:
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018 - pipes
        timer = Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                _write(self._process.stdin, data)
            answer = _read(self._process.stdout)
        except OverflowError as error:
            raise self._unreadable(error) from error
        finally:
            timer.cancel()
        if answer is None:
            raise Refused(_ended(self._process.wait()) + self._last_words())
        try:
            message = msgspec.msgpack.decode(answer, type=_Message)
        except ValueError as error:  # of msgspec, or invalid UTF-8
            raise self._unreadable(error) from error
        if message.missing:
            raise absent(message.missing)
        if message.error:
            raise Refused(message.error)
        return message

    def _unreadable(self, error: Exception) -> Refused:
        return Refused(f"its process sent a message that cannot be read, {error}{self._last_words()}")

    def _last_words(self) -> str:
        """The end of stderr, to be appended to a sentence."""
        end = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _LAST_WORDS, max(end - _LAST_WORDS, 0)).decode(errors="replace")
        words = " ".join(tail.split())
        return f"; its last words: {words}" if words else ""


def _require(what: str, tensors: Sequence[Tensor], actual: Sequence[_Described], max_sizes: Mapping[str, int]) -> None:
    shapes = [[max_sizes.get(size, 0) if isinstance(size, str) else size for size in t.shape] for t in tensors]
    expected = [_Described(tensor.element, tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True)]
    if expected != [*actual] or any(tensor.shape[:1] != (1,) for tensor in actual):
        shown, wanted = (", ".join(f"{t.element} {list(t.shape)}" for t in side) for side in (actual, expected))
        raise Refused(f"it {what} {shown or 'nothing'}, and not {wanted} for a row")


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"its process was killed: it took more than {SECONDS} seconds, or more memory than there is"
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def absent(reason: str) -> DependencyError:
    """The error where ExecuTorch is not installed."""
    return DependencyError(NAME, reason, remedy=f"run {INSTALL}", passes=False)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next message; None if the peer has ended. Raises an OverflowError if it announces too large a message."""
    begin = pipe.read(8)
    if len(begin) < 8:
        return None
    if (size := int.from_bytes(begin, "little")) > _LARGEST:
        raise OverflowError(f"an answer of {size:,} bytes")
    data = pipe.read(size)
    return data if len(data) == size else None


def _main(threads: str, memory: str) -> None:
    # Libraries print to stdout: their prints are no answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN, _WRITTEN))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def send(message: _Message) -> None:
        _write(answers, msgspec.msgpack.encode(message))

    def send_error(error: Exception) -> None:
        send(_Message(error=str(error)[:300] or type(error).__name__))

    model = _read(sys.stdin.buffer)
    try:
        import torch

        # The core of `executorch.runtime`, which also imports everything that exports, and takes ten times as long.
        from executorch.extension.pybindings import _C as runtime  # noqa: N811 - a module
    except ImportError as error:
        return send(_Message(missing=f"cannot be imported ({error})"))
    torch.set_num_threads(int(threads))
    runtime._unsafe_reset_threadpool(int(threads))
    confine(int(memory))
    try:
        program = runtime._load_program_from_buffer(
            model, program_verification=runtime.Verification.InternalConsistency
        )
        method = program.load_method("forward")
        meta = method.method_meta()
        inputs = tuple(_described(meta.input_tensor_meta(place)) for place in range(meta.num_inputs()))
        outputs = tuple(_described(meta.output_tensor_meta(place)) for place in range(meta.num_outputs()))
    except Exception as error:  # noqa: BLE001 - any error is sent
        return send_error(error)
    send(_Message(inputs=inputs, outputs=outputs))
    while (request := _read(sys.stdin.buffer)) is not None:
        feeds = msgspec.msgpack.decode(request, type=list[TensorBytes])
        try:
            tensors = method([torch.from_numpy(data.array.copy()) for data in feeds])
            send(_Message(answers=tuple(TensorBytes.of(tensor.numpy()) for tensor in tensors)))
        except Exception as error:  # noqa: BLE001 - any error is sent
            send_error(error)
    return None


def _described(meta: Any) -> _Described:
    return _Described(_KINDS.get(meta.dtype(), f"elements of kind {meta.dtype()}"), tuple(meta.sizes()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
