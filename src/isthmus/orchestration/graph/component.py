"""The component: three lines of YAML are the whole graph of a project."""

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
from isthmus.orchestration.graph.outline import Outline, outline
from isthmus.orchestration.graph.resource import IsthmusResource
from isthmus.orchestration.graph.translator import IsthmusTranslator


class ScaffoldParams(BaseModel):
    """What `dg scaffold defs` asks for."""

    project: str = Field(default=".", description="Folder of the Isthmus project, from the root of the Dagster project")


class IsthmusProjectScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes the `defs.yaml` of a project."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """What is asked for."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Writes it."""
        place = (request.params or ScaffoldParams()).project
        root = "{{ project_root }}" if place == "." else "{{ project_root }}/" + place
        dg.scaffold_component(request, {"project": root})


@dg.scaffold_with(IsthmusProjectScaffolder)
@dataclass
class IsthmusProjectComponent(StateBackedComponent, Resolvable):
    """The graph of an Isthmus project.

        type: isthmus.orchestration.graph.IsthmusProjectComponent
        attributes:
          project: "{{ project_root }}"

    What is shown of the project is compiled once, in a process of its own, and kept as the component's state: the code
    server loads neither feast nor pyspark nor torch. `dagster dev` and `dg dev` compile anew when definitions change;
    elsewhere `dg utils refresh-defs-state` does, where the image is built.

    To name assets, groups and owners otherwise, derive from it and override `translator`.

    Attributes:
        project: folder of the project, the one with isthmus.toml.
        defs_state: where the state is kept.
    """

    project: str
    defs_state: ResolvedDefsStateConfig = field(default_factory=DefsStateConfigArgs.local_filesystem)

    @property
    def translator(self) -> IsthmusTranslator:
        """What nodes are in Dagster."""
        return IsthmusTranslator()

    @property
    def resource(self) -> IsthmusResource:
        """What runs the steps."""
        return IsthmusResource(project=self.project)

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Where the state is kept, under a name of the project's own."""
        return DefsStateConfig.from_args(self.defs_state, default_key=f"IsthmusProject[{Path(self.project).name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        """Compiles the project and writes what is shown of it."""
        state_path.parent.mkdir(parents=True, exist_ok=True)
        state_path.write_bytes(msgspec.json.encode(outline(Path(self.project).resolve())))

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002 - Dagster's signature
        """The graph of what was kept."""
        if state_path is None:
            problem = Problem(self.project, "has not been compiled", "its state")
            raise ConfigurationError("IsthmusProjectComponent", [problem], remedy="run `dg utils refresh-defs-state`")
        kept = msgspec.json.decode(state_path.read_bytes(), type=Outline)
        # The state may have been made where the image was built, in another folder.
        here = msgspec.structs.replace(kept, root=str(Path(self.project).resolve()))
        return build_definitions(here, translator=self.translator, resource=self.resource)
