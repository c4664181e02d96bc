"""The options that many verbs have."""

from pathlib import Path
from typing import Annotated

import typer

ProjectOption = Annotated[
    Path | None, typer.Option("--project", help="Project folder; by default the nearest isthmus.toml upwards.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
