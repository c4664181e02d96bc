"""Resident memory of a model session, measured in a process of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from isthmus.distill.runtime import predict, session
from isthmus.features.golden import Kept
from isthmus.features.manifest import Feeds

PAGE = os.sysconf("SC_PAGE_SIZE")


def footprint(model: bytes, fed: Feeds, threads: int) -> float:
    """MiB by which a fresh process grows when it opens a model and answers once (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        file, tensors = Path(folder) / "model", Path(folder) / "tensors"
        file.write_bytes(model)
        tensors.write_bytes(msgspec.json.encode({name: Kept.of(array) for name, array in fed.items()}))
        return _measured([str(file), str(tensors), str(threads)])


def _measured(arguments: list[str]) -> float:
    command = [sys.executable, "-m", "isthmus.distill.footprint", *arguments]
    # The command is this interpreter and this module; nothing in it comes from outside.
    answer = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return round(float(answer.stdout), 2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def _main(model: str, tensors: str, threads: str) -> None:
    fed = msgspec.json.decode(Path(tensors).read_bytes(), type=dict[str, Kept])
    row = {name: kept.array for name, kept in fed.items()}
    before = _resident()
    predict(session(Path(model).read_bytes(), int(threads)), row)
    sys.stdout.write(str((_resident() - before) / 2**20))


if __name__ == "__main__":
    _main(*sys.argv[1:])
