"""Options shared by many verbs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.features.files import is_url

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project


def _text(value: str) -> str:
    if is_url(value):
        raise typer.BadParameter(
            f"{value} is a URL. Pass a local path, and copy files from or to the storage with its own tools"
        )
    return value


def _path(value: Path | str) -> Path:
    return Path(_text(str(value)))


def local(about: str, *, text: bool = False) -> dict[str, Any]:
    about = f"{about.removesuffix('.')}. A local path, not a URL."
    return {"parser": _text if text else _path, "metavar": "TEXT" if text else "PATH", "help": about}


ProjectOption = Annotated[
    Path | None,
    typer.Option("--project", **local("Project folder (default: nearest folder upwards with isthmus.toml).")),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, the rest to stderr.")]
HtmlOption = Annotated[Path | None, typer.Option(**local("Also write the report as a self-contained HTML page."))]
OutOption = Annotated[Path, typer.Option(**local("Folder to write. Files from an earlier run are replaced."))]
DISTILLATION = "Distillation. Optional if there is only one."
TARGET = "ssh:HOST, adb, adb:SERIAL, or the command of a Python, such as an emulator's."
NameArgument = Annotated[str | None, typer.Argument(help=DISTILLATION)]


def open_project(folder: Path | None) -> "Project":
    from isthmus.orchestration.project import Project

    return Project(folder) if folder else Project.find(Path.cwd())
