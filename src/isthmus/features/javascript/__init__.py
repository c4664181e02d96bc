"""What runs a package outside of Python: modules for browsers and Node, and the runtime that they need, from npm."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from isthmus.features.errors import DependencyError
from isthmus.features.files import publish

SOURCES = Path(__file__).parent
_LOCKED = ("package.json", "package-lock.json")
_SECONDS = 300
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""What runs models on a processor, in browsers and in Node."""


def runtime() -> Path:
    """The folder with `RUNTIME` of onnxruntime-web, installed at its first use: the very bytes that are locked here.

    Raises:
        DependencyError: npm is not installed, or cannot get it.
    """
    locked = {name: (SOURCES / name).read_bytes() for name in _LOCKED}
    digest = hashlib.sha256(b"".join(locked.values())).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "isthmus" / f"javascript-{digest}"
    if not folder.exists():
        publish(folder, _install)
    return folder


def _install(folder: Path) -> None:
    with TemporaryDirectory(prefix="isthmus-npm-") as scratch:
        _npm(Path(scratch))
        for file in RUNTIME:
            shutil.copy(Path(scratch) / "node_modules" / "onnxruntime-web" / "dist" / file, folder)


def _npm(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise DependencyError("onnxruntime-web", "npm is not installed", remedy="install Node.js 20 or later, with npm")
    for name in _LOCKED:
        shutil.copy(SOURCES / name, folder)
    # Nothing here comes from outside. The lock file names what may be installed, by its SHA-512.
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except subprocess.TimeoutExpired:
        said = [f"npm did not end within {_SECONDS} seconds"]
    if said is not None:
        raise DependencyError(
            "onnxruntime-web", f"npm cannot install it: {''.join(said)}", remedy="look at npm's registry and network"
        )
