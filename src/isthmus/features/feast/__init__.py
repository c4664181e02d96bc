"""The plug-in classes for Feast, each loaded on access. Only this package imports Feast."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import typeguard


# Half of Feast's import time is spent on recompiling its classes with type checks of arguments, which we do not need.
# This import runs before all modules of this package.
class _TorchOnDemand(ModuleType):
    """Replacement for Feast's module, which imports torch at once (1.4 s) for tensor responses that few users need."""

    @staticmethod
    def get_torch() -> ModuleType:
        return import_module("torch")


if "feast" not in sys.modules:
    sys.modules["feast.torch_wrapper"] = _TorchOnDemand("feast.torch_wrapper")
_typechecked = typeguard.typechecked
typeguard.typechecked = lambda target: target  # type: ignore[assignment]  # none of its overloads fits
try:
    with warnings.catch_warnings():
        # Feast's dependencies emit deprecation warnings.
        warnings.simplefilter("ignore")
        import_module("feast")
finally:
    typeguard.typechecked = _typechecked


def __getattr__(name: str) -> Any:
    # `feature_store.yaml` files of earlier versions name the classes in this package.
    return getattr(import_module("isthmus.feast"), name)
