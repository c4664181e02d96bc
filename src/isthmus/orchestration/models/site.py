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
_FORM = ("form.mjs",)
_RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def site(project: Project, name: str | None, out: Path) -> Path:
    """Writes the folder, and gives it.

    What lies in `pages/<distillation>` of the project is its page. A model of rows needs none: it gets a form.

    Args:
        project: the project, with a package.
        name: the distillation; may be left out where there is only one.
        out: where to write; what an earlier call wrote there is replaced.

    Raises:
        ConfigurationError: there is no page for a model that is not one of rows.
        DataError: there is no package, or something else is in the folder.
        DependencyError: the runtime for browsers cannot be had.
        PackageError: the package is damaged.
    """
    declared = project.distillation(name)
    package = Artifacts(project, declared).last_package()
    manifest, own = read_package(package), project.root / "pages" / declared.name
    if not own.is_dir() and not manifest.inputs:
        problem = Problem(f"distillation {declared.name}", f"there is no {own}", "a folder with an index.html")
        raise ConfigurationError("pages", [problem])
    if out.exists() and not (out / NOTE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(str(out), "holds something else", expected="a new folder, or one that this command wrote")
    runtime = installed() / "node_modules" / NAME / "dist"

    def write(folder: Path) -> None:
        for file in _SHARED if own.is_dir() else (*_SHARED, *_FORM):
            shutil.copy(SOURCES / file, folder)
        if own.is_dir():
            shutil.copytree(own, folder, dirs_exist_ok=True)
        else:
            shutil.copy(SOURCES / "form.html", folder / "index.html")
        shutil.copytree(package, folder / "package")
        (folder / "ort").mkdir()
        for file in _RUNTIME:
            shutil.copy(runtime / file, folder / "ort")
        made_for = {"contract": manifest.contract, "precision": serving_profile(project, package).precision}
        (folder / NOTE).write_text(json.dumps(made_for), encoding="utf-8")

    publish(out, write)
    return out
