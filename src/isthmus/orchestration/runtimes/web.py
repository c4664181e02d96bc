"""onnxruntime-web in Node: whether a browser answers as recorded.

The first use installs what the lockfile beside the script pins, with npm, into a folder of the user's cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from isthmus.features.errors import DependencyError, PackageError
from isthmus.features.files import scratch_folder
from isthmus.features.package.checksums import GOLDEN
from isthmus.features.package.golden import Golden, TensorBytes
from isthmus.features.package.manifest import Manifest, Package, Variant
from isthmus.features.package.replay import SECONDS, Answers, refused

NAME = "onnxruntime-web"
TOLERANCE = 1e-6
"""Largest difference from the recorded outputs: a browser has no fused multiply-add, so that sums of floats, and their
results, may differ in their last bits."""

SOURCES = Path(__file__).parents[1] / "web"
"""The scripts that pages and Node run."""
_FILES = ("package.json", "package-lock.json", "model.mjs", "check.mjs")
_INSTALL_TIMEOUT = 600


class _Output(msgspec.Struct):
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    answers: tuple[dict[str, TensorBytes], ...]


class WebRuntime:
    """onnxruntime-web, in one process per model file, installed in `cache`.

    Raises:
        DependencyError: Node or npm is missing, or the registry does not answer.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._node = _program("node")
        self._folder = installed(cache)

    name = NAME
    tolerance = TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """The files in ORT format, which a browser receives."""
        return [variant for variant in manifest.variants if variant.format == "ort"]

    def ask(self, package: Package, variant: Variant, golden: Golden) -> Sequence[Answers]:
        """A file's answers in the golden cases."""
        manifest = package.manifest
        with tempfile.TemporaryDirectory() as folder:
            # Node opens them by their paths, where nobody else can replace them.
            model, cases = Path(folder) / variant.file, Path(folder) / GOLDEN
            model.write_bytes(package.files.read(variant.file))
            cases.write_bytes(msgspec.json.encode(golden))
            command = [self._node, str(self._folder / "check.mjs"), str(model), str(cases)]
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=SECONDS)  # noqa: S603 - ours
            except subprocess.TimeoutExpired as error:
                raise refused(manifest, variant, NAME, f"no answer in {SECONDS} seconds") from error
        if done.returncode:
            raise refused(manifest, variant, NAME, _reason(done.stderr.decode(errors="replace")))
        output = msgspec.json.decode(done.stdout, type=_Output)
        for what, names, tensors in (
            ("inputs", output.inputs, manifest.tensors),
            ("outputs", output.outputs, manifest.outputs),
        ):
            if sorted(names) != sorted(expected := [tensor.name for tensor in tensors]):
                where = f"package {manifest.name}: {variant.file}, {what}"
                raise PackageError(where, ", ".join(names), expected=", ".join(expected))
        return [{name: tensor.array for name, tensor in answer.items()} for answer in output.answers]


def installed(cache: Path | None = None) -> Path:
    """The folder with the script and its imports in `cache`, by default the user's; created if it is missing.

    Raises:
        DependencyError: npm is missing, or its registry does not answer.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    cache = cache or (Path(home) if home else Path.home() / ".cache") / "isthmus"
    content = {name: (SOURCES / name).read_bytes() for name in _FILES}
    version = json.loads(content["package.json"])["dependencies"][NAME]
    # Another release of Isthmus has another script.
    digest = hashlib.sha256(b"".join(content.values())).hexdigest()[:12]
    target = cache / f"{NAME}-{version}-{digest}"
    if target.is_dir():
        return target
    npm = _program("npm")
    cache.mkdir(parents=True, exist_ok=True)
    with scratch_folder(cache, f".{target.name}") as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        for name, data in content.items():
            (fresh / name).write_bytes(data)
        _install(npm, fresh, version)
        with suppress(OSError):  # another process was faster
            fresh.rename(target)
    return target


def _install(npm: str, folder: Path, version: str) -> None:
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=60000"]
    remedy = f"make its registry reachable: {NAME} {version} is installed on first use"
    try:
        done = subprocess.run(  # noqa: S603 - what it installs is pinned by the lockfile
            [npm, "ci", *options, "--prefix", str(folder)], capture_output=True, check=False, timeout=_INSTALL_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        problem = f"has not installed {NAME} in {_INSTALL_TIMEOUT} seconds"
        raise DependencyError("npm", problem, remedy=remedy) from error
    if done.returncode:
        reason = _reason(done.stderr.decode(errors="replace"))
        raise DependencyError("npm", f"cannot install {NAME} ({reason})", remedy=remedy)


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DependencyError(name, "is not there", remedy="install Node.js 20 or later, with npm", passes=False)
    return path


def _reason(text: str) -> str:
    """The line in the output of a Node program that says why it ended."""
    lines = [line.removeprefix("npm error ").strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("request to")]
    return (errors or lines or ["it says nothing"])[0][:300]
