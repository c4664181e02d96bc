"""A program of ExecuTorch, run in a process of its own: a file that is none may end that process, and no other.

`python -m isthmus.distill.executorch.process THREADS MEMORY` is that process. It needs torch and executorch alone. What
comes from there is read as untrusted: the program may do there what it likes.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from isthmus.features.package.manifest import Feeds, Manifest, Tensor, Variant
from isthmus.features.package.replay import SECONDS, refused
from isthmus.features.package.sandbox import confine

NAME = "ExecuTorch"
PINS = dict(
    line.split("==")
    for line in Path(__file__).parents[1].joinpath("executorch.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
"""What it needs beside torch, in which release."""
INSTALL = f"pip install --no-deps {' '.join(f'{name}=={version}' for name, version in PINS.items())}"

MEMORY = 4 << 30
"""Bytes that a process may take for a program, beside its libraries and the file."""

_LARGEST = LARGEST + 2**20
"""Bytes of what one side says at once."""

_LAST_WORDS = 300
"""Bytes of a process's last words that are told."""

_WRITTEN = 2**20
"""Bytes of what it may write into a file, which is where its last words are."""

_KINDS = {0: "uint8", 3: "int32", 4: "int64", 6: "float", 7: "double", 11: "bool"}
"""Elements by the numbers of torch's ScalarType."""


class Refused(Exception):
    """ExecuTorch does not take a file, or what it is fed; says why."""


@contextmanager
def opened(folder: Path, manifest: Manifest, variant: Variant) -> Iterator["Program"]:
    """A program of a package.

    Raises:
        DependencyError: ExecuTorch is not there.
        PackageError: it refuses the file, or is refused an answer.
    """
    try:
        with Program((folder / variant.file).read_bytes(), manifest.tensors, manifest.outputs, variant.most) as program:
            yield program
    except Refused as error:
        raise refused(manifest, variant, NAME, error) from error


class _Shown(msgspec.Struct, frozen=True):
    """A tensor of a program: in which order, and not by which name."""

    element: str
    shape: tuple[int, ...]


class _Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the process says: first of the program, then an answer each time."""

    error: str = ""
    missing: str = ""
    inputs: tuple[_Shown, ...] = ()
    outputs: tuple[_Shown, ...] = ()
    answers: tuple[TensorBytes, ...] = ()


class Program:
    """A program in its process. To be closed, or used as a context.

    It takes one row at a time, so that the memory that it plans ahead is that of one row.

    Args:
        model: the file.
        tensors: what it is fed, in order.
        outputs: what it gives, in order.
        most: the largest of each size that has a name.
        threads: that compute.
        memory: bytes that it may take, beside the libraries and the file; on Linux.

    Raises:
        DependencyError: ExecuTorch is not there.
        Refused: it is no program, or takes or gives something else.
    """

    def __init__(
        self,
        model: bytes,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        most: Mapping[str, int],
        threads: int = 1,
        memory: int = MEMORY,
    ) -> None:
        self._tensors, self._outputs = tensors, outputs
        self._said = TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P: a package that is looked at may lie in the working folder, and hold a torch.py.
        command = [sys.executable, "-P", "-m", "isthmus.distill.executorch.process", str(threads), str(memory)]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        try:
            told = self._exchange(model)
            _require("is fed", tensors, told.inputs, most)
            _require("gives", outputs, told.outputs, most)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process, self._said:
            pass

    def ask(self, feeds: Feeds) -> dict[str, Array]:
        """Its outputs by name.

        Args:
            feeds: tensors by name, of any number of rows.

        Raises:
            Refused: it does not answer.
        """
        counts = {len(array) for array in feeds.values()}
        if len(counts) != 1 or 0 in counts:
            raise Refused(f"it is fed tensors of {' and '.join(map(str, sorted(counts)))} rows")
        parts = [
            self._ask({name: array[row : row + 1] for name, array in feeds.items()}) for row in range(counts.pop())
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _ask(self, feeds: Feeds) -> dict[str, Array]:
        told = self._exchange(msgspec.msgpack.encode([TensorBytes.of(feeds[tensor.name]) for tensor in self._tensors]))
        try:
            return {tensor.name: kept.array for tensor, kept in zip(self._outputs, told.answers, strict=True)}
        except ValueError as error:
            raise self._unreadable(error) from error

    def _exchange(self, data: bytes) -> _Told:
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
            told = msgspec.msgpack.decode(answer, type=_Told)
        except ValueError as error:  # msgspec's errors, and of a text that is none
            raise self._unreadable(error) from error
        if told.missing:
            raise absent(told.missing)
        if told.error:
            raise Refused(told.error)
        return told

    def _unreadable(self, error: Exception) -> Refused:
        return Refused(f"its process says what cannot be read, {error}{self._last_words()}")

    def _last_words(self) -> str:
        """What the process wrote to stderr last, as the end of a sentence."""
        end = os.fstat(self._said.fileno()).st_size
        said = os.pread(self._said.fileno(), _LAST_WORDS, max(end - _LAST_WORDS, 0)).decode(errors="replace")
        words = " ".join(said.split())
        return f"; its last words: {words}" if words else ""


def _require(what: str, tensors: Sequence[Tensor], found: Sequence[_Shown], most: Mapping[str, int]) -> None:
    expected = [
        _Shown(tensor.element, tuple(most.get(size, 0) if isinstance(size, str) else size for size in tensor.shape))
        for tensor in tensors
    ]
    if expected != [*found] or any(one.shape[:1] != (1,) for one in found):
        shown, wanted = (", ".join(f"{one.element} {list(one.shape)}" for one in of) for of in (found, expected))
        raise Refused(f"it {what} {shown or 'nothing'}, and not {wanted} for one row")


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"its process was killed: it took more than {SECONDS} seconds, or more memory than there is"
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def absent(found: str) -> DependencyError:
    """What is raised where it is not there."""
    return DependencyError(NAME, found, remedy=f"run {INSTALL}", passes=False)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """What the other side wrote; None if it has ended.

    Raises:
        OverflowError: it says that it is about to write more than anybody needs.
    """
    begin = pipe.read(8)
    if len(begin) < 8:
        return None
    if (size := int.from_bytes(begin, "little")) > _LARGEST:
        raise OverflowError(f"an answer of {size:,} bytes")
    data = pipe.read(size)
    return data if len(data) == size else None


def _main(threads: str, memory: str) -> None:
    # What libraries print goes where nobody reads an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN, _WRITTEN))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(told: _Told) -> None:
        _write(answers, msgspec.msgpack.encode(told))

    model = _read(sys.stdin.buffer)
    try:
        import torch

        # What `executorch.runtime` wraps. That imports all that makes programs, too, which takes ten times as long and
        # is not needed where they are run.
        from executorch.extension.pybindings import _C as runtime  # noqa: N811 - a module
    except ImportError as error:
        return tell(_Told(missing=f"cannot be imported ({error})"))
    torch.set_num_threads(int(threads))
    runtime._unsafe_reset_threadpool(int(threads))
    confine(int(memory))
    try:
        program = runtime._load_program_from_buffer(
            model, program_verification=runtime.Verification.InternalConsistency
        )
        method = program.load_method("forward")
        meta = method.method_meta()
        inputs = tuple(_shown(meta.input_tensor_meta(place)) for place in range(meta.num_inputs()))
        outputs = tuple(_shown(meta.output_tensor_meta(place)) for place in range(meta.num_outputs()))
    except Exception as error:  # noqa: BLE001 - of any kind: it is told
        return tell(_Told(error=str(error)[:300] or type(error).__name__))
    tell(_Told(inputs=inputs, outputs=outputs))
    while (asked := _read(sys.stdin.buffer)) is not None:
        feeds = msgspec.msgpack.decode(asked, type=list[TensorBytes])
        try:
            given = method([torch.from_numpy(kept.array.copy()) for kept in feeds])
            tell(_Told(answers=tuple(TensorBytes.of(tensor.numpy()) for tensor in given)))
        except Exception as error:  # noqa: BLE001 - of any kind: it is told
            tell(_Told(error=str(error)[:300] or type(error).__name__))
    return None


def _shown(meta: Any) -> _Shown:
    return _Shown(_KINDS.get(meta.dtype(), f"elements of kind {meta.dtype()}"), tuple(meta.sizes()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
