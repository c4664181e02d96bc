"""onnxruntime-web in Node: whether a browser answers as recorded.

The first use installs what the lockfile beside the script pins, with npm, into a folder of the user's cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from isthmus.features.errors import DependencyError, PackageError
from isthmus.features.files import scratch_folder
from isthmus.features.package.checksums import GOLDEN
from isthmus.features.package.golden import Golden, TensorBytes
from isthmus.features.package.manifest import Manifest, Variant
from isthmus.features.package.replay import SECONDS, Answers, refused

NAME = "onnxruntime-web"
TOLERANCE = 1e-6
"""Largest difference from the recorded outputs: a browser has no fused multiply-add, so that sums of floats, and what
is made of them, may differ in their last bits."""

SOURCES = Path(__file__).parents[1] / "web"
"""What pages and Node run."""
_FILES = ("package.json", "package-lock.json", "model.mjs", "check.mjs")
_SECONDS = 600


class _Told(msgspec.Struct):
    """What the script writes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    answers: tuple[dict[str, TensorBytes], ...]


class WebRuntime:
    """onnxruntime-web, one process for a model file.

    Args:
        cache: where it is installed, if it is not there yet; by default the user's cache.

    Raises:
        DependencyError: Node or npm is missing, or the registry does not answer.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._node = _program("node")
        self._folder = installed(cache)

    name = NAME
    tolerance = TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """Those in ORT format, which a browser is sent."""
        return [variant for variant in manifest.variants if variant.format == "ort"]

    def ask(self, folder: Path, manifest: Manifest, variant: Variant, _golden: Golden) -> Sequence[Answers]:
        """A file's answers in the golden cases."""
        command = [self._node, str(self._folder / "check.mjs"), str(folder / variant.file), str(folder / GOLDEN)]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=SECONDS)  # noqa: S603 - our script
        except subprocess.TimeoutExpired as error:
            raise refused(manifest, variant, NAME, f"no answer in {SECONDS} seconds") from error
        if done.returncode:
            raise refused(manifest, variant, NAME, _reason(done.stderr.decode(errors="replace")))
        told = msgspec.json.decode(done.stdout, type=_Told)
        for what, names, tensors in (
            ("inputs", told.inputs, manifest.tensors),
            ("outputs", told.outputs, manifest.outputs),
        ):
            if sorted(names) != sorted(expected := [tensor.name for tensor in tensors]):
                where = f"package {manifest.name}: {variant.file}, {what}"
                raise PackageError(where, ", ".join(names), expected=", ".join(expected))
        return [{name: kept.array for name, kept in of.items()} for of in told.answers]


def installed(cache: Path | None = None) -> Path:
    """The folder with the script and what it imports; made if it is not there.

    Args:
        cache: where it is, or is made; by default the user's cache.

    Raises:
        DependencyError: npm is missing, or its registry does not answer.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    cache = cache or (Path(home) if home else Path.home() / ".cache") / "isthmus"
    content = {name: (SOURCES / name).read_bytes() for name in _FILES}
    version = json.loads(content["package.json"])["dependencies"][NAME]
    # Another release of ours brings another script.
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
    where, remedy = "npm", f"make its registry reachable: {NAME} {version} is installed on first use"
    try:
        done = subprocess.run(  # noqa: S603 - what it installs is pinned by the lockfile
            [npm, "ci", *options, "--prefix", str(folder)], capture_output=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise DependencyError(where, f"has not installed {NAME} in {_SECONDS} seconds", remedy=remedy) from error
    if done.returncode:
        reason = _reason(done.stderr.decode(errors="replace"))
        raise DependencyError(where, f"cannot install {NAME} ({reason})", remedy=remedy)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise DependencyError(name, "is not there", remedy="install Node.js 20 or later, with npm", passes=False)
    return found


def _reason(text: str) -> str:
    """The line of what a program of Node's wrote that says why it ended."""
    lines = [line.removeprefix("npm error ").strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or line.startswith("request to")]
    return (telling or lines or ["it says nothing"])[0][:300]
