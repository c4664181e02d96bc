"""The module Dagster loads: the assets of the project in `ISTHMUS_ROOT`, or in the working folder."""

from isthmus.orchestration.assets import build_definitions
from isthmus.orchestration.project import Project, environment_root

defs = build_definitions(Project.find(environment_root()))
