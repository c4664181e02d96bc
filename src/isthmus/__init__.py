"""Isthmus: one definition of a feature, one contract, one verdict.

Everything a `definitions.py` needs is here; importing it loads no third-party library.
"""

from dataclasses import is_dataclass

from isthmus.distill.declaration import Distillation, Search, Tabular
from isthmus.distill.gates import Gate
from isthmus.distill.labels import Binary, Classes, Isotonic, Monitor, Number, Rank, Temperature
from isthmus.distill.language.causal import Causal
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.distill.language.lora import Lora
from isthmus.distill.settings import Settings
from isthmus.features.definition.expectations import Expect
from isthmus.features.definition.failure import declared
from isthmus.features.definition.spec import (
    Entity,
    FeatureService,
    FeatureView,
    Field,
    RequestSource,
    RequestTransform,
    Snapshot,
    Source,
    Spine,
)
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
    DependencyError,
    GateFailed,
    IsthmusError,
    PackageError,
    RequestError,
)
from isthmus.features.types import Array, Bool, Bytes, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.moved import install
from isthmus.orchestration.server.push import push
from isthmus.orchestration.training.notebook import training_data
from isthmus.transforms.decorators import request_transform, spine, transform
from isthmus.transforms.preparation.steps import Clip, Embed, Hashed, Impute, Log1p, OneHot, Ordinal, Standardize

install()

__all__ = [
    "Array",
    "Binary",
    "Bool",
    "Bytes",
    "Causal",
    "Classes",
    "Clip",
    "ConfigurationError",
    "ContractMismatch",
    "DataError",
    "DecodingSettings",
    "DependencyError",
    "Distillation",
    "Embed",
    "Entity",
    "Expect",
    "FeatureService",
    "FeatureView",
    "Field",
    "Float32",
    "Float64",
    "Gate",
    "GateFailed",
    "Hashed",
    "Impute",
    "Int32",
    "Int64",
    "Isotonic",
    "IsthmusError",
    "Log1p",
    "Lora",
    "Monitor",
    "Number",
    "OneHot",
    "Ordinal",
    "PackageError",
    "Rank",
    "RequestError",
    "RequestSource",
    "RequestTransform",
    "Search",
    "Settings",
    "Snapshot",
    "Source",
    "Spine",
    "Standardize",
    "String",
    "Tabular",
    "Temperature",
    "UnixTimestamp",
    "push",
    "request_transform",
    "spine",
    "training_data",
    "transform",
]

for _name, _kind in {**vars(Expect), **{_name: globals()[_name] for _name in __all__}}.items():
    if isinstance(_kind, type) and is_dataclass(_kind):
        _kind.__init__ = declared(_kind.__init__, _name)  # type: ignore[method-assign]
