"""Options that many verbs share, and the project that they work on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project

ProjectOption = Annotated[
    Path | None, typer.Option("--project", help="Project folder; by default the nearest isthmus.toml upwards.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Also write the page here, which needs no network.")]
OutOption = Annotated[Path, typer.Option(help="Where to write; what this command wrote there before is replaced.")]
NameArgument = Annotated[str | None, typer.Argument(help="Distillation; may be left out where there is only one.")]


def open_project(folder: Path | None) -> "Project":
    """The project in `folder`, else the nearest project upwards."""
    from isthmus.orchestration.project import Project

    return Project(folder) if folder else Project.find(Path.cwd())
