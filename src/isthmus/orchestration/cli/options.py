"""Options that many verbs share, and the project that they work on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.features.files import is_url

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project


def _text(value: str) -> str:
    if is_url(value):
        raise typer.BadParameter(
            f"{value} is a URL. Give a local path, and copy the file from or to the storage with the storage's own tool"
        )
    return value


def _path(value: Path | str) -> Path:
    return Path(_text(str(value)))


def local(about: str, *, text: bool = False) -> dict[str, Any]:
    """Return the arguments of an option or argument whose value is a file or a folder of this machine.

    A `text` may also be something else that `about` names. A URL is refused before the verb begins.
    """
    about = f"{about.removesuffix('.')}. A local path, not a URL."
    return {"parser": _text if text else _path, "metavar": "TEXT" if text else "PATH", "help": about}


ProjectOption = Annotated[
    Path | None, typer.Option("--project", **local("Project folder; by default the nearest isthmus.toml upwards."))
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
HtmlOption = Annotated[Path | None, typer.Option(**local("Also write the page to this file. It needs no network."))]
OutOption = Annotated[Path, typer.Option(**local("Where to write; what this command wrote there before is replaced."))]
NameArgument = Annotated[str | None, typer.Argument(help="Distillation; may be left out where there is only one.")]


def open_project(folder: Path | None) -> "Project":
    """The project in `folder`, else the nearest project upwards."""
    from isthmus.orchestration.project import Project

    return Project(folder) if folder else Project.find(Path.cwd())
