"""The folder a mobile engineer receives."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.distill.readme import readme
from isthmus.features.files import publish
from isthmus.features.golden import Golden, read_golden
from isthmus.features.manifest import CONTRACT, GOLDEN, MANIFEST, README, SUMS, Manifest, read_package


def write_package(
    packages: Path,
    manifest: Manifest,
    contract: Mapping[str, Any],
    golden: Golden,
    files: Mapping[str, bytes],
) -> Path:
    """Writes a package and gives its folder, whose name ends in the digest of what it holds.

    Args:
        packages: the folder of all.
        manifest: of it.
        contract: as plain data.
        golden: cases with the answers of all its model files.
        files: models and what else is shipped.
    """
    files = {
        **files,
        MANIFEST: json.dumps(msgspec.to_builtins(manifest), indent=2, sort_keys=True, allow_nan=False).encode(),
        CONTRACT: json.dumps(contract, separators=(",", ":"), sort_keys=True).encode() + b"\n",
        GOLDEN: msgspec.json.encode(golden) + b"\n",
        README: readme(manifest).encode(),
    }
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    files[SUMS] = "".join(lines).encode()
    target = packages / f"{manifest.name}-{hashlib.sha256(files[SUMS]).hexdigest()[:12]}"

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    publish(target, write)
    read_golden(target, read_package(target))
    return target


def package_bytes(path: Path, precision: str) -> int:
    """Bytes of a package that ships one precision: every file but the models of the other."""
    return sum(
        file.stat().st_size
        for file in path.iterdir()
        if not file.name.startswith("model.") or file.name.startswith(f"model.{precision}.")
    )
