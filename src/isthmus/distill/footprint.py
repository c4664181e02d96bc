"""Resident memory of a model session, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from isthmus.distill.runtime import predict, session

PAGE = os.sysconf("SC_PAGE_SIZE")
_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int32)": np.int32, "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_, "tensor(string)": np.str_,
}  # fmt: skip


def footprint(model: Path, threads: int) -> float:
    """MiB by which a fresh process grows when it opens the model and answers one row (Linux)."""
    command = [sys.executable, "-m", "isthmus.distill.footprint", str(model), str(threads)]
    # The command is this interpreter and this module; nothing in it comes from outside.
    answer = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return round(float(answer.stdout), 2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def _main(model: str, threads: str) -> None:
    before = _resident()
    opened = session(Path(model).read_bytes(), int(threads))
    row: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    for item in opened.get_inputs():
        sizes = [size if isinstance(size, int) else 1 for size in item.shape]
        row[item.name] = np.zeros(sizes, _TYPES[item.type])
    predict(opened, row)
    sys.stdout.write(str((_resident() - before) / 2**20))


if __name__ == "__main__":
    _main(*sys.argv[1:])
