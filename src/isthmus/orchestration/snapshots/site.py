"""`isthmus package page`: write a static web page that runs the latest package in the browser (`site`)."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.files import publish
from isthmus.orchestration.artifacts import Artifacts, serving_profile
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.web import NAME, SOURCES, installed
from isthmus.orchestration.snapshots.create import copy, signer, snapshot_folder
from isthmus.package.clients import CLIENT, FOLDER, GENERATORS
from isthmus.package.manifest import Manifest, read_package
from isthmus.package.snapshot.file import read_header, read_snapshot
from isthmus.package.snapshot.owners import open_owners
from isthmus.package.snapshot.selection import kept_views
from isthmus.package.snapshot.signature import require_sealed
from isthmus.package.snapshot.store import SnapshotFolder

NOTE = "page.json"
_SHARED = (
    *(SOURCES / name for name in ("begin.mjs", "model.mjs", "predict.mjs", "page.css")),
    FOLDER / CLIENT,
)
_WORKER = "worker.js"
_SNAPSHOTS = "snapshots"
_RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def site(project: Project, name: str | None, out: Path) -> Path:
    """Write a static web page that runs the latest package of a distillation to the folder `out`. Return `out`.

    `name` is the distillation. It is optional if there is only one. Replaces the whole folder if an earlier call wrote
    it. Copies the project's own page from `pages/<distillation>`. Without that page, tabular and language models get a
    form, and other models raise ConfigurationError. Installs onnxruntime-web with npm if it is missing. For a model
    with a `device`, creates a signing key if it is missing, and adds the newest snapshot to the page. If each owner has
    a snapshot, the page gets it from the API instead. Raises DataError if `out` has other files, or if the snapshot
    does not fit the package.
    """
    artifacts = Artifacts.of(project, name)
    package, distillation = artifacts.last_package(), artifacts.declared.name
    manifest, own = read_package(package), project.root / "pages" / distillation
    has_form = bool(manifest.inputs) and not manifest.reads_text
    if not own.is_dir() and not has_form and manifest.generation is None:
        problem = Problem(f"distillation {distillation}", f"{own} does not exist", "a folder with an index.html")
        raise ConfigurationError("pages", [problem])
    if out.exists() and not (out / NOTE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(str(out), "contains other files", expected="a new folder, or one that this command wrote")

    def write(folder: Path) -> None:
        write_files(folder, package, manifest, own)
        label = project.definitions.distillations[distillation].spine.label.name
        note = {**_expected(project, package), "label": label, **_on_device(project, manifest, folder)}
        write_note(folder, note)

    publish(out, write)
    return out


def write_files(folder: Path, package: Path, manifest: Manifest, own: Path | None) -> None:
    runtime = installed() / "node_modules" / NAME / "dist"
    form = "form" if manifest.generation is None else "text"
    for shared in (*_SHARED, *([] if manifest.generation is None else [FOLDER / name for name in GENERATORS])):
        shutil.copy(shared, folder)
    if own is not None and own.is_dir():
        shutil.copytree(own, folder, dirs_exist_ok=True)
    else:
        shutil.copy(SOURCES / f"{form}.mjs", folder)
        shutil.copy(SOURCES / f"{form}.html", folder / "index.html")
    shutil.copytree(package, folder / "package")
    (folder / "ort").mkdir()
    for file in _RUNTIME:
        shutil.copy(runtime / file, folder / "ort")


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    (folder / NOTE).write_text(json.dumps(note), encoding="utf-8")
    (folder / _WORKER).write_text(_worker(folder), encoding="utf-8")


def api_path(page: Path) -> str:
    snapshot = json.loads((page / NOTE).read_text(encoding="utf-8")).get("snapshot")
    return "" if snapshot is None or snapshot["files"] else f"/{snapshot['url']}/…"


def _expected(project: Project, package: Path) -> dict[str, Any]:
    manifest, precision = read_package(package), serving_profile(project, package).precision
    if manifest.generation is not None and precision == "int8":
        # Browsers cannot run int8 files of language models, which round activations.
        precision = min((each.precision for each in manifest.variants if each.precision != "int8"), default=precision)
    return {"contract": manifest.contract, "precision": precision}


def _on_device(project: Project, manifest: Manifest, folder: Path) -> dict[str, Any]:
    if manifest.device is None:
        return {}
    service, key, where = manifest.device.service, signer(project).public_key, f"snapshot of {manifest.device.service}"
    remedy = "run `isthmus features snapshot`"
    if manifest.device.owner is None:
        copy(project, service, folder / _SNAPSHOTS)
        data = (folder / _SNAPSHOTS / service).read_bytes()
    else:
        data = _example(snapshot_folder(project, service), where, remedy)
    header, _ = read_header(data, where)
    if header.hash != manifest.device.hash or (header.owner and header.owner[0]) != manifest.device.owner:
        raise DataError(where, f"has another contract or owner than the package: {header.hash[:12]}",
                        expected=manifest.device.hash[:12], remedy=f"{remedy}, and `isthmus model export`")  # fmt: skip
    views = kept_views(project.applied(), service)
    try:
        require_sealed(read_snapshot(data, views, where), key, where)
    except DataError as error:
        raise DataError(where, error.found, expected=error.expected, remedy=remedy) from error
    snapshot = {
        # Files of owners come from the API: a static folder must not contain the rows of all owners.
        "url": f"{_SNAPSHOTS}/{service}",
        "files": manifest.device.owner is None,
        "key": key,
        # As text, because JavaScript numbers are not exact at this size.
        "now": None if project.fixed_now is None else str(project.fixed_now),
    }
    if manifest.device.instead is None:
        return {"snapshot": snapshot}
    package = Artifacts.of(project, manifest.device.instead).last_package()
    shutil.copytree(package, folder / "instead")
    return {"snapshot": snapshot, "instead": _expected(project, package)}


def _example(place: SnapshotFolder, where: str, remedy: str) -> bytes:
    """Return the file of the first owner. Its contract, owner name and signature are checked for all owners' files."""
    latest = place.latest()
    if latest is None or latest.owner is None:
        raise DataError(where, "has no files of owners", remedy=remedy)
    with open_owners(place.owners(latest.snapshot)) as owners:
        _, _, file = next(iter(owners))
        return file.data


def _worker(folder: Path) -> str:
    """Return the service worker's code. It contains a hash of all files, so that browsers reload changed pages."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
    kept = {name: content for name, content in files.items() if not name.startswith(f"{_SNAPSHOTS}/")}
    version = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in kept.values())).hexdigest()[:16]
    text = (SOURCES / _WORKER).read_text(encoding="utf-8")
    text = text.replace('VERSION = ""', f'VERSION = "{version}"')
    return text.replace("FILES = []", f"FILES = {json.dumps(['./', *kept])}")
