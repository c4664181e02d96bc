"""`page`: a folder of files that runs the last package in a browser, from any server of files."""

import json
import shutil
from pathlib import Path

from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.files import publish
from isthmus.features.package.manifest import read_package
from isthmus.orchestration.artifacts import Artifacts, serving_profile
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.web import NAME, SOURCES, installed

NOTE = "page.json"
_SHARED = ("begin.mjs", "model.mjs", "page.css")
_RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def site(project: Project, name: str | None, out: Path) -> Path:
    """Writes the folder, and replaces what an earlier call wrote there.

    The page is `pages/<distillation>` of the project. A model of rows needs none: it gets a form.

    Raises:
        ConfigurationError: there is no page for a model that is not a model of rows.
        DataError: there is no package, or the folder holds something else.
        DependencyError: the runtime for browsers cannot be installed.
        PackageError: the package is damaged.
    """
    artifacts = Artifacts.of(project, name)
    package, distillation = artifacts.last_package(), artifacts.declared.name
    manifest, own = read_package(package), project.root / "pages" / distillation
    if not own.is_dir() and not manifest.inputs:
        problem = Problem(f"distillation {distillation}", f"there is no {own}", "a folder with an index.html")
        raise ConfigurationError("pages", [problem])
    if out.exists() and not (out / NOTE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(str(out), "holds something else", expected="a new folder, or one that this command wrote")
    runtime = installed() / "node_modules" / NAME / "dist"

    def write(folder: Path) -> None:
        for file in _SHARED:
            shutil.copy(SOURCES / file, folder)
        if own.is_dir():
            shutil.copytree(own, folder, dirs_exist_ok=True)
        else:
            shutil.copy(SOURCES / "form.mjs", folder)
            shutil.copy(SOURCES / "form.html", folder / "index.html")
        shutil.copytree(package, folder / "package")
        (folder / "ort").mkdir()
        for file in _RUNTIME:
            shutil.copy(runtime / file, folder / "ort")
        note = {"contract": manifest.contract, "precision": serving_profile(project, package).precision}
        (folder / NOTE).write_text(json.dumps(note), encoding="utf-8")

    publish(out, write)
    return out
