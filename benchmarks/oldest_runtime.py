"""Compare the oldest ONNX Runtime that a package states for each file with old releases, which are installed here.

    python benchmarks/oldest_runtime.py PACKAGE ... --releases 1.17.3 1.18.1 1.19.2 1.31.1

Prints for each kind of file the stated release, and those among `--releases` that open it and reproduce its golden
cases. Exits with 1 if a release that should run a file does not. pip installs each release with its NumPy into a folder
of its own, which `--folder` keeps for the next time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isthmus.distill.onnx.runtime import oldest_runtime
from isthmus.package.device import check
from isthmus.package.manifest import open_package

RELEASES = ("1.16.3", "1.17.3", "1.18.1", "1.19.2", "1.20.1", "1.22.1", "1.31.1")
NUMPY_2 = (1, 19)
"""The first release that runs with NumPy 2."""
NEAR = 1e-3
"""Largest difference from golden outputs, as other kernels round INT8 differently; where larger, the file's own."""


def minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


def install(release: str, folder: Path) -> Path:
    if (folder / "onnxruntime").is_dir():
        return folder
    numpy = "numpy<3" if minor(release) >= NUMPY_2 else "numpy<2"
    wanted = [f"onnxruntime=={release}", numpy]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wanted]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return folder


def results(package: Path, runtime: Path) -> Iterator[dict[str, Any]]:
    """Yield what each file answers in the runtime that is installed in a folder."""
    command = [sys.executable, "-S", check.__file__, str(package), "--calls", "0"]
    done = subprocess.run(command, env={"PYTHONPATH": str(runtime)}, capture_output=True, text=True, check=True)
    _, *lines = done.stdout.splitlines()
    yield from map(json.loads, lines)


def failure(result: dict[str, Any], limit: float) -> str:
    if "error" in result:
        return " ".join(str(result["error"]).split())[-90:]
    worst = result["worst"]
    return "" if worst is not None and worst <= limit else f"differs by {worst}"


def compared(packages: Sequence[Path], runtimes: dict[str, Path]) -> tuple[Table, list[str]]:
    table = Table("package", "file", "stated", *runtimes)
    wrong = []
    for folder in packages:
        package = open_package(folder)
        answers = {release: {each["file"]: each for each in results(folder, at)} for release, at in runtimes.items()}
        for variant in package.manifest.variants:
            if variant.format not in ("onnx", "ort"):
                continue
            stated, limit = oldest_runtime(package.files.read(variant.file)), max(NEAR, variant.tolerance)
            found = {release: failure(of[variant.file], limit) for release, of in answers.items()}
            promised = {release for release in runtimes if minor(release) >= minor(stated)}
            wrong += [
                f"{folder.name}/{variant.file} in {release}: {why}"
                for release, why in found.items() if why and release in promised
            ]  # fmt: skip
            cells = [("no" if why else "yes") + ("*" if bool(why) is (release in promised) else "")
                     for release, why in found.items()]  # fmt: skip
            table.add_row(package.manifest.name, variant.file, stated, *cells)
    return table, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, help="package folders")
    parser.add_argument("--releases", nargs="+", default=RELEASES, help="releases of ONNX Runtime")
    parser.add_argument("--folder", type=Path, help="where to install them (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        runtimes = {release: install(release, (options.folder or Path(root)) / release) for release in options.releases}
        table, wrong = compared(options.packages, runtimes)
    Console(width=140).print(table, "A star marks where a release does not do as stated.", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
