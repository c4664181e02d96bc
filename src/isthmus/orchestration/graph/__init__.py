"""The project in Dagster: `build_definitions`, the component, the translator and the resource."""

from isthmus.orchestration.graph.assets import build_definitions
from isthmus.orchestration.graph.component import IsthmusProjectComponent
from isthmus.orchestration.graph.resource import IsthmusResource
from isthmus.orchestration.graph.translator import IsthmusTranslator, Node

__all__ = ["IsthmusProjectComponent", "IsthmusResource", "IsthmusTranslator", "Node", "build_definitions"]
