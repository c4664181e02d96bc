"""The module Dagster loads: the graph of the project around `ISTHMUS_ROOT`, or around the working folder."""

import os
from pathlib import Path

from isthmus.orchestration.graph import build_definitions
from isthmus.orchestration.settings import find

defs = build_definitions(find(Path(os.environ.get("ISTHMUS_ROOT", "."))))
