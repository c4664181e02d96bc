"""What many verbs are asked for, and the project they are asked about."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project

ProjectOption = Annotated[
    Path | None, typer.Option("--project", help="Project folder; by default the nearest isthmus.toml upwards.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
NameArgument = Annotated[str | None, typer.Argument(help="Distillation; may be left out where there is only one.")]


def open_project(folder: Path | None) -> "Project":
    """The project that `--project` named, or the nearest one upwards."""
    from isthmus.orchestration.project import Project

    return Project(folder) if folder else Project.find(Path.cwd())
