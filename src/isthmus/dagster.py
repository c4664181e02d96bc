"""Put a project into Dagster: definitions, the component, the resource and the translator."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.orchestration.graph.assets import build_definitions
    from isthmus.orchestration.graph.component import IsthmusProjectComponent
    from isthmus.orchestration.graph.resource import IsthmusResource
    from isthmus.orchestration.graph.translator import IsthmusTranslator
    from isthmus.orchestration.steps.step import AssetNode

__all__ = [
    "AssetNode",
    "IsthmusProjectComponent",
    "IsthmusResource",
    "IsthmusTranslator",
    "build_definitions",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.orchestration.graph.assets": "build_definitions",
            "isthmus.orchestration.graph.component": "IsthmusProjectComponent",
            "isthmus.orchestration.graph.resource": "IsthmusResource",
            "isthmus.orchestration.graph.translator": "IsthmusTranslator",
            "isthmus.orchestration.steps.step": "AssetNode",
        },
    )
