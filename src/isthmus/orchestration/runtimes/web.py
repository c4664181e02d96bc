"""onnxruntime-web in Node: what a browser answers.

The first use installs what the lockfile beside the scripts pins, with npm, into a folder of the user's cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from isthmus.features.errors import DependencyError, PackageError
from isthmus.features.files import scratch_folder
from isthmus.package.golden import Inputs, TensorBytes
from isthmus.package.manifest import Manifest, Package, Variant
from isthmus.package.replay import SECONDS, Answers, refused

NAME = "onnxruntime-web"
TOLERANCE = 1e-6
"""Largest difference from the recorded outputs: a browser has no fused multiply-add, so that sums of floats, and their
results, may differ in their last bits."""

SOURCES = Path(__file__).parents[1] / "web"
"""The scripts that pages and Node run."""
_FILES = ("package.json", "package-lock.json", "ort.mjs")
_MODULES = ("model.mjs", "predict.mjs", "tensors.mjs")
_CASES = "cases.json"
_INSTALL_TIMEOUT = 600

T = TypeVar("T")


class _Output(msgspec.Struct):
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    answers: tuple[dict[str, TensorBytes], ...]


class WebRuntime:
    """onnxruntime-web, in one process per model file, from `cache`; it is installed there, unless `install` is false.

    Raises:
        DependencyError: Node or npm is missing, the registry does not answer, or it is not installed.
    """

    def __init__(self, cache: Path | None = None, *, install: bool = True) -> None:
        folder = _folder(cache)
        if not install and not folder.is_dir():
            remedy = "run `isthmus package verify PACKAGE --runtime web`, which installs it"
            raise DependencyError(NAME, "is not installed", remedy=remedy, passes=False)
        self.node = Node(installed(cache) if install else folder)

    name = NAME
    tolerance = TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """The files in ORT format, which a browser receives: all but those that round activations on servers alone."""
        servers = [] if manifest.generation is None else ["int8"]
        return [
            variant for variant in manifest.variants if variant.format == "ort" and variant.precision not in servers
        ]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        """A file's outputs for each batch of inputs."""
        manifest = package.manifest
        fed = [{name: TensorBytes.of(array) for name, array in case.fed(variant).items()} for case in cases]
        files = {variant.file: package.files.read(variant.file), _CASES: msgspec.json.encode(fed)}
        try:
            output = self.node.run("check.mjs", files, variant.file, _CASES, kind=_Output)
        except NodeFailed as error:
            raise refused(manifest, variant, NAME, error) from error
        for what, names, tensors in (
            ("inputs", output.inputs, manifest.tensors),
            ("outputs", output.outputs, manifest.outputs),
        ):
            if sorted(names) != sorted(expected := [tensor.name for tensor in tensors]):
                where = f"package {manifest.name}: {variant.file}, {what}"
                raise PackageError(where, ", ".join(names), expected=", ".join(expected))
        return [{name: tensor.array for name, tensor in answer.items()} for answer in output.answers]


class NodeFailed(Exception):
    """Why a script in Node has not answered."""


class Node:
    """Runs scripts in Node, with onnxruntime-web from a folder of `installed`.

    Raises:
        DependencyError: Node is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._program, self.folder = _program("node"), folder

    def run(self, script: str, files: Mapping[str, bytes], *arguments: str, kind: type[T]) -> T:
        """What a script answers, as JSON, of files in its own folder. Raises a NodeFailed if it does not answer.

        Node opens them by their paths, where nobody else can replace them.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            for name in (script, *_MODULES):
                if name not in files:
                    shutil.copy(SOURCES / name, folder)
            command = [self._program, str(Path(folder, script)), str(self.folder / "ort.mjs")]
            command += [str(Path(folder, name)) for name in arguments]
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=SECONDS)  # noqa: S603 - ours
            except subprocess.TimeoutExpired as error:
                raise NodeFailed(f"no answer in {SECONDS} seconds") from error
        if done.returncode:
            raise NodeFailed(_reason(done.stderr.decode(errors="replace")))
        return msgspec.json.decode(done.stdout, type=kind)


def installed(cache: Path | None = None) -> Path:
    """The folder with the runtime in `cache`, by default the user's; created if it is missing.

    Raises:
        DependencyError: npm is missing, or its registry does not answer.
    """
    target = _folder(cache)
    if target.is_dir():
        return target
    npm, cache = _program("npm"), target.parent
    cache.mkdir(parents=True, exist_ok=True)
    with scratch_folder(cache, f".{target.name}") as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        for name in _FILES:
            shutil.copy(SOURCES / name, fresh)
        _install(npm, fresh, _version())
        with suppress(OSError):  # another process was faster
            fresh.rename(target)
    return target


def _folder(cache: Path | None) -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    cache = cache or (Path(home) if home else Path.home() / ".cache") / "isthmus"
    digest = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in _FILES)).hexdigest()[:12]
    return cache / f"{NAME}-{_version()}-{digest}"


def _version() -> str:
    return str(json.loads((SOURCES / "package.json").read_bytes())["dependencies"][NAME])


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
