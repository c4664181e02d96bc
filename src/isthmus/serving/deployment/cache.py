"""The cache of recently deployed packages next to the deployment file, by digest."""

import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from isthmus.features.errors import PackageError
from isthmus.features.files import publish
from isthmus.package.checksums import SIGNATURE
from isthmus.package.manifest import Package, open_package
from isthmus.package.signature import require_signature
from isthmus.serving.deployment.record import CACHE


def folder_of(file: Path) -> Path:
    return file.parent / CACHE


def fetch(
    package: Path, digest: str, folder: Path, public_key: str | None, done: Callable[[str], None]
) -> tuple[Path, int]:
    """Copy the package folder `package` into the cache `folder` for a server, unless the cache already has it.

    Returns the path in the cache and the number of bytes copied, or 0. Checks that the copy has the digest `digest`
    (the package's SHA-256) and, with a `public_key` (PEM), its signature. If a check fails, raises PackageError and
    leaves the cache unchanged. Replaces a damaged copy, or a copy with a different signature. Calls `done("fetch")` or
    `done("verify")` after each step, so that the caller can time the steps.
    """
    target = folder / digest
    with suppress(PackageError):
        require(target, digest, public_key)
        if _signature(target) == _signature(package):
            done("verify")
            return target, 0
    moved = 0

    def write(fresh: Path) -> None:
        nonlocal moved
        for entry in sorted(package.iterdir()):
            shutil.copyfile(entry, fresh / entry.name, follow_symlinks=False)
            moved += (fresh / entry.name).stat().st_size
        done("fetch")
        require(fresh, digest, public_key)
        done("verify")

    publish(target, write, scratch_name="package")
    done("fetch")
    return target, moved


def require(folder: Path, digest: str, public_key: str | None) -> Package:
    package = open_package(folder)
    if (actual := package.files.digest) != digest:
        raise PackageError(f"package {package.manifest.name}", f"has digest {actual[:12]}", expected=digest[:12],
                           remedy="run `isthmus deploy` again")  # fmt: skip
    if public_key is not None:
        require_signature(package.files, public_key)
    return package


def _signature(package: Path) -> bytes | None:
    # The digest does not cover the signature: a package may be signed later.
    file = package / SIGNATURE
    return file.read_bytes() if file.exists() else None


def prune(folder: Path, keep: Collection[str]) -> None:
    for entry in folder.glob("[0-9a-f]" * 64):
        if entry.name not in keep:
            shutil.rmtree(entry, ignore_errors=True)
