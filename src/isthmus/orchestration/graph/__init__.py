"""Dagster integration: `build_definitions`, the component, the translator and the resource.

Names are imported on first access, so that processes that compile the outline or run a step do not load Dagster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.orchestration.graph.assets import build_definitions
    from isthmus.orchestration.graph.component import IsthmusProjectComponent
    from isthmus.orchestration.graph.resource import IsthmusResource
    from isthmus.orchestration.graph.translator import AssetNode, IsthmusTranslator

__all__ = ["AssetNode", "IsthmusProjectComponent", "IsthmusResource", "IsthmusTranslator", "build_definitions"]
_MODULES = {
    "IsthmusProjectComponent": "component", "IsthmusResource": "resource", "IsthmusTranslator": "translator",
    "AssetNode": "translator", "build_definitions": "assets",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
