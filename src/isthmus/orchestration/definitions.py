"""Module that Dagster loads, with the definitions of the project at `ISTHMUS_ROOT` or in the working folder."""

import os
from pathlib import Path

from isthmus.orchestration.graph.assets import build_definitions
from isthmus.orchestration.settings import find

defs = build_definitions(find(Path(os.environ.get("ISTHMUS_ROOT", "."))))
