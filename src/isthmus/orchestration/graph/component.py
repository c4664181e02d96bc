"""The component: three lines of YAML declare the complete graph of a project."""

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
    """Options of `dg scaffold defs`."""

    project: str = Field(default=".", description="Folder of the Isthmus project, from the root of the Dagster project")


class IsthmusProjectScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes the `defs.yaml` of a project."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """The type of the options."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Writes the file, with the project's folder relative to the root of the Dagster project."""
        folder = (request.params or ScaffoldParams()).project
        root = "{{ project_root }}" if folder == "." else "{{ project_root }}/" + folder
        dg.scaffold_component(request, {"project": root})


@dg.scaffold_with(IsthmusProjectScaffolder)
@dataclass
class IsthmusProjectComponent(StateBackedComponent, Resolvable):
    """The graph of an Isthmus project.

        type: isthmus.orchestration.graph.IsthmusProjectComponent
        attributes:
          project: "{{ project_root }}"

    The project is compiled once, in its own process, and the outline is the component's state: the code server loads
    neither feast nor pyspark nor torch. `dagster dev` and `dg dev` compile again when definitions change; elsewhere run
    `dg utils refresh-defs-state` when the image is built.

    To change the names, groups and owners of assets, derive from it and override `translator`.

    Attributes:
        project: folder of the project, with its isthmus.toml.
        defs_state: where the state is stored.
    """

    project: str
    defs_state: ResolvedDefsStateConfig = field(default_factory=DefsStateConfigArgs.local_filesystem)

    @property
    def translator(self) -> IsthmusTranslator:
        """Turns nodes into asset specs."""
        return IsthmusTranslator()

    @property
    def resource(self) -> IsthmusResource:
        """Runs the steps."""
        return IsthmusResource(project=self.project)

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Where the state is stored, under a name that is the project's own."""
        return DefsStateConfig.from_args(self.defs_state, default_key=f"IsthmusProject[{Path(self.project).name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        """Compiles the project and writes its outline."""
        state_path.parent.mkdir(parents=True, exist_ok=True)
        state_path.write_bytes(msgspec.json.encode(outline(Path(self.project).resolve())))

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002 - Dagster's signature
        """Builds the graph from the outline in the state."""
        if state_path is None:
            problem = Problem(self.project, "has not been compiled", "its state")
            raise ConfigurationError("IsthmusProjectComponent", [problem], remedy="run `dg utils refresh-defs-state`")
        state = msgspec.json.decode(state_path.read_bytes(), type=Outline)
        # The state may be from where the image was built, in another folder.
        here = msgspec.structs.replace(state, root=str(Path(self.project).resolve()))
        return build_definitions(here, translator=self.translator, resource=self.resource)
