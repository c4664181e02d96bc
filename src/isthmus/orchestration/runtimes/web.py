"""onnxruntime-web in Node, which gives the same answers as a browser. `NodeRunner` runs our scripts in Node."""

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
from isthmus.package.replay import SECONDS, Answers, rejection_error

NAME = "onnxruntime-web"
# Largest allowed difference from recorded outputs. Browsers have no fused multiply-add, so the last bits may differ.
TOLERANCE = 1e-6
SOURCES = Path(__file__).parents[1] / "web"  # scripts for pages and Node
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
    """Runs ORT model files with onnxruntime-web in Node, to check the answers that a browser gives.

    Creating it installs onnxruntime-web in the folder `cache` (default: the user's cache) with npm, if it is missing.
    This may take minutes. With `install` False, raises DependencyError instead. `ask` runs Node for up to two minutes.
    """

    def __init__(self, cache: Path | None = None, *, install: bool = True) -> None:
        folder = _folder(cache)
        if not install and not folder.is_dir():
            remedy = "run `isthmus package verify PACKAGE --runtime web`, which installs it"
            raise DependencyError(NAME, "is not installed", remedy=remedy, passes=False)
        self.node = NodeRunner(installed(cache) if install else folder)

    name = NAME
    tolerance = TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        servers = [] if manifest.generation is None else ["int8"]
        return [
            variant for variant in manifest.variants if variant.format == "ort" and variant.precision not in servers
        ]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        manifest = package.manifest
        fed = [{name: TensorBytes.of(array) for name, array in case.fed(variant).items()} for case in cases]
        files = {variant.file: package.files.read(variant.file), _CASES: msgspec.json.encode(fed)}
        try:
            output = self.node.run("check.mjs", files, variant.file, _CASES, kind=_Output)
        except NodeFailed as error:
            raise rejection_error(manifest, variant, NAME, error) from error
        for what, names, tensors in (
            ("inputs", output.inputs, manifest.tensors),
            ("outputs", output.outputs, manifest.outputs),
        ):
            if sorted(names) != sorted(expected := [tensor.name for tensor in tensors]):
                where = f"package {manifest.name}: {variant.file}, {what}"
                raise PackageError(where, ", ".join(names), expected=", ".join(expected))
        return [{name: tensor.array for name, tensor in answer.items()} for answer in output.answers]


class NodeFailed(Exception):
    """A script in Node failed or timed out."""


class NodeRunner:
    """Runs scripts in Node with onnxruntime-web, which `installed` puts into `folder`. DependencyError without Node."""

    def __init__(self, folder: Path) -> None:
        self._program, self.folder = _program("node"), folder

    def run(self, script: str, files: Mapping[str, bytes], *arguments: str, kind: type[T]) -> T:
        """Run a script of the folder `orchestration/web/` in a new Node process, and decode the JSON that it prints.

        `kind` is the type to decode. `files` (contents by name) are written to a temporary folder, which is deleted
        afterwards. `arguments` are names of these files; the script gets their paths. Raises NodeFailed if the script
        fails or takes more than two minutes.
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
    """Return the folder with the npm package onnxruntime-web. Install it if it is missing, which can take minutes.

    The folder is in `cache` (default: the user's cache). The lockfile in `orchestration/web/` sets the versions. Raises
    DependencyError if npm is missing, fails, or takes more than ten minutes.
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
    remedy = f"check the connection to the npm registry: {NAME} {version} is installed on first use"
    try:
        done = subprocess.run(  # noqa: S603 - the lockfile pins what it installs
            [npm, "ci", *options, "--prefix", str(folder)], capture_output=True, check=False, timeout=_INSTALL_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        problem = f"did not install {NAME} within {_INSTALL_TIMEOUT} seconds"
        raise DependencyError("npm", problem, remedy=remedy) from error
    if done.returncode:
        reason = _reason(done.stderr.decode(errors="replace"))
        raise DependencyError("npm", f"cannot install {NAME} ({reason})", remedy=remedy)


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DependencyError(name, "not found", remedy="install Node.js 20 or later, with npm", passes=False)
    return path


def _reason(text: str) -> str:
    lines = [line.removeprefix("npm error ").strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("request to")]
    return (errors or lines or ["no error message"])[0][:300]
