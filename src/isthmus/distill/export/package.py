"""The folder a mobile engineer receives."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.distill.export.readme import readme
from isthmus.features.files import publish
from isthmus.features.package.checksums import CONTRACT, GOLDEN, MANIFEST, README, SUMS
from isthmus.features.package.golden import Golden, read_golden
from isthmus.features.package.manifest import Manifest, read_package


def contents(
    manifest: Manifest, contract: Mapping[str, Any], golden: Golden, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The files of a package, by name.

    Args:
        manifest: of it.
        contract: as plain data.
        golden: cases with the answers of all its model files.
        files: models and what else is shipped.
    """
    found = {
        **files,
        MANIFEST: json.dumps(msgspec.to_builtins(manifest), indent=2, sort_keys=True, allow_nan=False).encode(),
        CONTRACT: json.dumps(contract, separators=(",", ":"), sort_keys=True).encode() + b"\n",
        GOLDEN: msgspec.json.encode(golden) + b"\n",
        README: readme(manifest).encode(),
    }
    lines = [f"{hashlib.sha256(found[name]).hexdigest()}  {name}\n" for name in sorted(found)]
    return {**found, SUMS: "".join(lines).encode()}


def write_package(packages: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Writes a package and gives its folder, whose name ends in the digest of what it holds.

    Args:
        packages: the folder of all.
        name: of the distillation.
        files: `contents`.
    """
    target = packages / f"{name}-{hashlib.sha256(files[SUMS]).hexdigest()[:12]}"

    def write(folder: Path) -> None:
        for file, content in files.items():
            (folder / file).write_bytes(content)

    publish(target, write)
    read_golden(target, read_package(target))
    return target


def package_bytes(files: Mapping[str, bytes], precision: str) -> int:
    """Bytes of a package that ships one precision: every file but the models of the other."""
    return sum(
        len(content)
        for name, content in files.items()
        if not name.startswith("model.") or name.startswith(f"model.{precision}.")
    )
