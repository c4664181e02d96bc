"""The project in Dagster: `build_definitions`, the component, the translator and the resource.

Each name is loaded on access: the processes that compile the outline or run a step do not load Dagster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.orchestration.graph.assets import build_definitions
    from isthmus.orchestration.graph.component import IsthmusProjectComponent
    from isthmus.orchestration.graph.resource import IsthmusResource
    from isthmus.orchestration.graph.translator import IsthmusTranslator, Node

__all__ = ["IsthmusProjectComponent", "IsthmusResource", "IsthmusTranslator", "Node", "build_definitions"]
_MODULES = {
    "IsthmusProjectComponent": "component", "IsthmusResource": "resource", "IsthmusTranslator": "translator",
    "Node": "translator", "build_definitions": "assets",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
