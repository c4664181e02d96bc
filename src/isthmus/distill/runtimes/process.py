"""Runs a model file in a child process: a damaged file may crash its runtime, a malicious one may control it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.types import Array
from isthmus.package.checksums import LARGEST
from isthmus.package.golden import TensorBytes
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo
from isthmus.package.replay import SECONDS
from isthmus.package.sandbox import limit_memory

MEMORY = 4 << 30
"""Bytes of memory for the process, besides its libraries and the file."""

_LARGEST = LARGEST + 2**20
"""Most bytes of a message."""

_AT_ONCE = 2**18
"""Bytes of rows per message, at least one row: sending a message takes longer than computing a table row."""

_ENOUGH = 10
"""Seconds after which the process sends the rows computed so far, so that slow programs do not time out."""

_QUOTED = 300
"""Bytes of stderr to quote in an error."""

_WRITTEN = 2**20
"""Most bytes that the process may write to stderr, a file."""


class ProgramRejected(Exception):
    """A runtime rejects a model file or its inputs; the message is the reason."""


class Description(msgspec.Struct, frozen=True):
    """Element type, shape and name of a program's input or output.

    The name is "" in formats without names. A size is -1 if the format leaves it open.
    """

    element: str
    shape: tuple[int, ...]
    name: str = ""


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str = ""
    missing: str = ""
    inputs: tuple[Description, ...] = ()
    outputs: tuple[Description, ...] = ()
    answers: tuple[TensorBytes, ...] = ()


class Loaded(NamedTuple):
    inputs: Sequence[Description]
    outputs: Sequence[Description]
    run: Callable[[list[Array]], list[Array]]


class Program(AbstractContextManager["Program"]):
    """A model file that runs in a child process, until `close` or the end of a `with` block.

    A subclass names the runtime's `libraries`, and the Python `package` that runs its files. Its module calls `serve`.
    The process is killed if it takes more than `SECONDS` to load the file or to answer a message. `tensors` and
    `outputs` are the inputs and outputs that the file must have. `max_sizes` has the maximum of each named size. On
    Linux, `memory` limits the bytes that the process uses besides libraries and file.

    Raises a DependencyError if the runtime is not installed. Raises a ProgramRejected if the file is not a program, has
    different inputs or outputs, or takes too long to load.
    """

    libraries: ClassVar[Libraries]
    package: ClassVar[str]

    @classmethod
    def require_present(cls) -> None:
        if find_spec(cls.package) is None:
            raise cls.libraries.absent("is not installed")

    def __init__(
        self,
        model: bytes,
        tensors: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        max_sizes: Mapping[str, int],
        memory: int = MEMORY,
    ) -> None:
        self._stderr = TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P: the working folder may be that of an untrusted package with a torch.py.
        command = [sys.executable, "-P", "-m", self.__module__, str(memory)]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        try:
            program = self._exchange(model)
            self._tensors = _require("inputs", tensors, program.inputs, max_sizes)
            self._outputs = _require("outputs", outputs, program.outputs, max_sizes)
            self._max_sizes = max_sizes
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError), self._process, self._stderr:
            pass

    def ask(self, feeds: Feeds) -> dict[str, Array]:
        """Run the model on rows, one at a time, and return its outputs: arrays by name.

        `feeds` has the inputs: arrays by name. Raise a ProgramRejected if there are no rows, if inputs differ in their
        number of rows, or if the child process fails or takes too long.
        """
        counts = {len(array) for array in feeds.values()}
        if len(counts) != 1 or 0 in counts:
            raise ProgramRejected(f"the inputs have {' and '.join(map(str, sorted(counts)))} rows")
        count = counts.pop()
        at_once = max(1, _AT_ONCE // max(1, sum(array.nbytes for array in feeds.values()) // count))
        parts: list[dict[str, Array]] = []
        begin = 0
        while begin < count:
            parts.append(self._ask({name: array[begin : begin + at_once] for name, array in feeds.items()}))
            counts = {len(array) if array.ndim else 0 for array in parts[-1].values()}
            answered = max(counts, default=0)
            if len(counts) != 1 or not 0 < answered <= min(at_once, count - begin):
                raise ProgramRejected(f"it returned {answered} rows instead of {min(at_once, count - begin)}")
            begin += answered
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
            raise ProgramRejected(_ended(self._process.wait()) + self._stderr_tail())
        try:
            message = msgspec.msgpack.decode(answer, type=_Message)
        except ValueError as error:  # a msgspec error, or invalid UTF-8
            raise self._unreadable(error) from error
        if message.missing:
            raise self.libraries.absent(message.missing)
        if message.error:
            raise ProgramRejected(message.error)
        return message

    def _unreadable(self, error: Exception) -> ProgramRejected:
        return ProgramRejected(f"its process sent an unreadable message, {error}{self._stderr_tail()}")

    def _stderr_tail(self) -> str:
        end = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _QUOTED, max(end - _QUOTED, 0)).decode(errors="replace")
        text = " ".join(tail.split())
        return f"; its stderr ends with: {text}" if text else ""


def _require(
    what: str, tensors: Sequence[TensorInfo], actual: Sequence[Description], max_sizes: Mapping[str, int]
) -> list[TensorInfo]:
    places = {tensor.name: place for place, tensor in enumerate(actual) if tensor.name}
    ordered = sorted(tensors, key=lambda tensor: places.get(tensor.name, -1)) if places else [*tensors]
    shapes = [[max_sizes.get(size, 0) if isinstance(size, str) else size for size in t.shape] for t in ordered]
    expected = [
        Description(tensor.element, tuple(shape), tensor.name if places else "")
        for tensor, shape in zip(ordered, shapes, strict=True)
    ]
    same = len(actual) == len(expected) and all(map(_fits, actual, expected))
    if not same or any(tensor.shape[:1] != (1,) for tensor in expected):
        shown, required = (
            ", ".join(f"{t.name} {t.element} {list(t.shape)}".lstrip() for t in side) for side in (actual, expected)
        )
        raise ProgramRejected(f"its {what} are {shown or 'missing'}; expected {required} for one row")
    return ordered


def _fits(actual: Description, expected: Description) -> bool:
    sizes = zip(actual.shape, expected.shape, strict=False)
    return (
        (actual.element, actual.name, len(actual.shape)) == (expected.element, expected.name, len(expected.shape))
        and all(size in (largest, -1) for size, largest in sizes)
    )  # fmt: skip


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"its process was killed: it took more than {SECONDS} seconds, or more memory than the machine has"
    return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    begin = pipe.read(8)
    if len(begin) < 8:
        return None
    if (size := int.from_bytes(begin, "little")) > _LARGEST:
        raise OverflowError(f"an answer of {size:,} bytes")
    data = pipe.read(size)
    return data if len(data) == size else None


def serve(prepare: Callable[[], Callable[[bytes], Loaded]]) -> None:
    """Run the child process of a `Program`: read a model and then inputs from stdin, and write outputs to stdout.

    `prepare` imports the runtime and returns a function that loads a model from bytes. On Linux, the process may use
    `sys.argv[1]` bytes of memory after the import. Sends an error to the parent process instead of raising it. Returns
    when stdin ends, or if the runtime or the model cannot be loaded.
    """
    memory = int(sys.argv[1])
    # Libraries print to stdout, which carries the answers: give them /dev/null.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN, _WRITTEN))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def send(message: _Message) -> None:
        _write(answers, msgspec.msgpack.encode(message))

    def send_error(error: Exception) -> None:
        send(_Message(error=str(error)[:300] or type(error).__name__))

    model = _read(sys.stdin.buffer) or b""
    try:
        load = prepare()
    except ImportError as error:
        return send(_Message(missing=f"cannot be imported ({error})"))
    limit_memory(memory)
    try:
        loaded = load(model)
    except Exception as error:  # noqa: BLE001 - any error is sent
        return send_error(error)
    send(_Message(inputs=tuple(loaded.inputs), outputs=tuple(loaded.outputs)))
    while (request := _read(sys.stdin.buffer)) is not None:
        tensors = [data.array for data in msgspec.msgpack.decode(request, type=list[TensorBytes])]
        try:
            rows: list[list[Array]] = []
            began = time.monotonic()
            while len(rows) < len(tensors[0]) and (not rows or time.monotonic() < began + _ENOUGH):
                rows.append(loaded.run([tensor[len(rows) : len(rows) + 1] for tensor in tensors]))
            send(_Message(answers=tuple(TensorBytes.of(np.concatenate(parts)) for parts in zip(*rows, strict=True))))
        except Exception as error:  # noqa: BLE001 - any error is sent
            send_error(error)
    return None
