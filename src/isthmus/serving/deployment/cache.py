"""The cache of a server: the packages that were deployed lately, beside the deployment, by digest."""

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
    """The cache beside a deployment file."""
    return file.parent / CACHE


def fetch(
    package: Path, digest: str, folder: Path, public_key: str | None, done: Callable[[str], None]
) -> tuple[Path, int]:
    """Copies the package of a digest into a cache, unless it is complete there; returns its path and the bytes copied.

    It appears there once its checksums, and its signature by the owner of `public_key` (PEM), have been checked on that
    side. A damaged copy, or a copy with a different signature, is replaced. `done` is called with the stage, fetch or
    verify, whenever a part of it has ended.
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

    publish(target, write, kind="package")
    done("fetch")
    return target, moved


def require(folder: Path, digest: str, public_key: str | None) -> Package:
    """The package in a folder, if it is the complete package of a digest, signed by whom it must be."""
    package = open_package(folder)
    if (actual := package.files.digest) != digest:
        raise PackageError(f"package {package.manifest.name}", f"has digest {actual[:12]}", expected=digest[:12],
                           remedy="run `isthmus deploy` again")  # fmt: skip
    if public_key is not None:
        require_signature(package.files, public_key)
    return package


def _signature(package: Path) -> bytes | None:
    # No part of the digest: a package may have been signed since.
    file = package / SIGNATURE
    return file.read_bytes() if file.exists() else None


def prune(folder: Path, keep: Collection[str]) -> None:
    """Removes all packages of a cache but those with these digests."""
    for entry in folder.glob("[0-9a-f]" * 64):
        if entry.name not in keep:
            shutil.rmtree(entry, ignore_errors=True)
