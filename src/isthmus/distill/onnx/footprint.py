"""Measures the memory and time to open a model, in a fresh process."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from isthmus.distill.onnx.runtime import predict, session
from isthmus.features.errors import GateFailed
from isthmus.package.golden import TensorBytes
from isthmus.package.inputs import Feeds

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Footprint(msgspec.Struct, frozen=True):
    """Peak memory above the level before loading, in MiB, and milliseconds from the file to the first answer."""

    memory_mb: float
    load_ms: float


def footprint(model: bytes, feeds: Feeds, threads: int, max_load_ms: float | None) -> Footprint:
    """Measure the memory and time to open a model and compute one answer, in a fresh process (Linux only).

    `model` is the content of the file, `feeds` are the inputs of the answer, and `max_load_ms` is the declared limit in
    milliseconds. If the first process takes longer than the limit, measure once more, and return the faster run. None
    means that there is no limit. Raises a GateFailed if a process fails.
    """
    first = _footprint(model, feeds, threads)
    if max_load_ms is None or first.load_ms <= max_load_ms:
        return first
    return min(first, _footprint(model, feeds, threads), key=lambda run: run.load_ms)


def _footprint(model: bytes, feeds: Feeds, threads: int) -> Footprint:
    with tempfile.TemporaryDirectory() as folder:
        file, tensors = Path(folder) / "model", Path(folder) / "tensors"
        file.write_bytes(model)
        tensors.write_bytes(msgspec.json.encode({name: TensorBytes.of(array) for name, array in feeds.items()}))
        # -P: the working directory may hold an onnx.py.
        command = [sys.executable, "-P", "-m", "isthmus.distill.onnx.footprint", str(file), str(tensors), str(threads)]
        answer = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - this interpreter and module
    if answer.returncode:
        last_line = answer.stderr.decode(errors="replace").splitlines()[-1:]
        raise GateFailed(
            "a fresh process with the model", f"exited with {answer.returncode}: {''.join(last_line)[:300]}",
            expected="an answer", remedy="make the student smaller, or free memory on this machine",
        )  # fmt: skip
    return msgspec.json.decode(answer.stdout, type=Footprint)


def _main(model: str, tensors: str, threads: str) -> None:
    encoded = msgspec.json.decode(Path(tensors).read_bytes(), type=dict[str, TensorBytes])
    row = {name: tensor.array for name, tensor in encoded.items()}
    with suppress(OSError):  # if the peak cannot be reset, the peak of the imports counts
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    began = time.perf_counter()
    predict(session(Path(model).read_bytes(), int(threads)), row)
    seconds = time.perf_counter() - began
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    measured = Footprint(round((peak - before) / 2**20, 2), round(seconds * 1000, 2))
    sys.stdout.write(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
