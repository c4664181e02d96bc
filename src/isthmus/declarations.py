"""The names of `isthmus`, which imports this module when the first of them is used."""

# ruff: noqa: F401 - `isthmus` re-exports them

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
from isthmus.orchestration.server.push import push
from isthmus.orchestration.training.notebook import training_data
from isthmus.transforms.decorators import request_transform, spine, transform
from isthmus.transforms.preparation.steps import Clip, Embed, Hashed, Impute, Log1p, OneHot, Ordinal, Standardize

for _name, _kind in {**vars(Expect), **globals()}.items():
    if isinstance(_kind, type) and is_dataclass(_kind):
        _kind.__init__ = declared(_kind.__init__, _name)  # type: ignore[method-assign]
