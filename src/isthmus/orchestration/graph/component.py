"""Dagster component that adds the graph of an Isthmus project from three lines of YAML."""

from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import msgspec
from dagster.components import Resolvable
from dagster.components.component.state_backed_component import StateBackedComponent
from dagster.components.utils.defs_state import DefsStateConfig, DefsStateConfigArgs, ResolvedDefsStateConfig
from pydantic import BaseModel, Field

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.orchestration.graph.assets import build_definitions
from isthmus.orchestration.graph.outline import outline
from isthmus.orchestration.graph.resource import IsthmusResource
from isthmus.orchestration.graph.translator import IsthmusTranslator
from isthmus.orchestration.steps.outline import Outline


class ScaffoldParams(BaseModel):
    project: str = Field(default=".", description="Folder of the Isthmus project, from the root of the Dagster project")


class IsthmusProjectScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Scaffolder that writes a component's `defs.yaml`, with the folder of the Isthmus project."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        folder = (request.params or ScaffoldParams()).project
        root = "{{ project_root }}" if folder == "." else "{{ project_root }}/" + folder
        dg.scaffold_component(request, {"project": root})


@dg.scaffold_with(IsthmusProjectScaffolder)
@dataclass
class IsthmusProjectComponent(StateBackedComponent, Resolvable):
    """All assets, checks and sensors of an Isthmus project.

        type: isthmus.orchestration.graph.IsthmusProjectComponent
        attributes:
          project: "{{ project_root }}"

    The project is compiled in a separate process, and the result is stored as the component's state. The code server
    therefore loads neither feast nor pyspark nor torch. `dagster dev` and `dg dev` recompile when definitions change.
    In a deployment, run `dg utils refresh-defs-state` when you build the image.

    To change names, groups or owners of assets, subclass the component and override `translator`.

    Attributes:
        project: folder of the project; it contains isthmus.toml.
        defs_state: storage of the component's state; the local file system by default.
    """

    project: str
    defs_state: ResolvedDefsStateConfig = field(default_factory=DefsStateConfigArgs.local_filesystem)

    @property
    def translator(self) -> IsthmusTranslator:
        """Translator that gives the Dagster assets their names, groups and owners. Override it to change these."""
        return IsthmusTranslator()

    @property
    def resource(self) -> IsthmusResource:
        """Dagster resource that runs each step in a local process of its own. Override it to run steps elsewhere."""
        return IsthmusResource(project=self.project)

    @property
    def defs_state_config(self) -> DefsStateConfig:
        return DefsStateConfig.from_args(self.defs_state, default_key=f"IsthmusProject[{Path(self.project).name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        state_path.parent.mkdir(parents=True, exist_ok=True)
        state_path.write_bytes(msgspec.json.encode(outline(Path(self.project).resolve())))

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002 - Dagster's signature
        if state_path is None:
            problem = Problem(self.project, "has not been compiled", "its state")
            raise ConfigurationError("IsthmusProjectComponent", [problem], remedy="run `dg utils refresh-defs-state`")
        state = msgspec.json.decode(state_path.read_bytes(), type=Outline)
        # The image may have been built with the project in another folder.
        here = msgspec.structs.replace(state, root=str(Path(self.project).resolve()))
        return build_definitions(here, translator=self.translator, resource=self.resource)
