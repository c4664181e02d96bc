"""The module Dagster loads: the graph of the project in `ISTHMUS_ROOT`, or in the working folder."""

from isthmus.orchestration.graph import build_definitions
from isthmus.orchestration.settings import environment_root

defs = build_definitions(environment_root())
