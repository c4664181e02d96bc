"""The public names of the package `isthmus`, which imports this module when the first of them is used.

The import replaces `__init__` of each dataclass here, so that a missing or unknown argument raises a ConfigurationError
in place of a TypeError.
"""

# ruff: noqa: I001 - `X as X` re-exports a name for type checkers

from dataclasses import is_dataclass

# fmt: off
from isthmus.distill.declaration import Distillation as Distillation, Search as Search, Tabular as Tabular
from isthmus.distill.language.teachers import (
    Onnx as Onnx, Pretrained as Pretrained, TeacherFunction as TeacherFunction, TeacherOutputs as TeacherOutputs,
)
from isthmus.distill.gates import Gate as Gate
from isthmus.distill.labels import (
    Binary as Binary, Classes as Classes, Isotonic as Isotonic, Monitor as Monitor, Number as Number, Rank as Rank,
    Temperature as Temperature,
)
from isthmus.distill.language.causal import Causal as Causal
from isthmus.distill.language.decoding import DecodingSettings as DecodingSettings
from isthmus.distill.language.image import (
    Image as Image, MobileNet as MobileNet, Picture as Picture, UNet as UNet,
)
from isthmus.distill.language.lora import Lora as Lora
from isthmus.distill.language.text import (
    Bag as Bag,
    Embedding as Embedding,
    Encoder as Encoder,
    PrunedEncoder as PrunedEncoder,
    Text as Text,
)
from isthmus.distill.settings import Settings as Settings
from isthmus.features.definition.expectations import Expect as Expect
from isthmus.features.definition.failure import explain_arguments
from isthmus.features.definition.spec import (
    Entity as Entity, FeatureService as FeatureService, FeatureView as FeatureView, Field as Field,
    RequestSource as RequestSource, RequestTransform as RequestTransform, Snapshot as Snapshot, Source as Source,
    Spine as Spine,
)
from isthmus.features.definition.streams import (
    Avro as Avro, FileStream as FileStream, Json as Json, Kafka as Kafka, Protobuf as Protobuf,
    RedisStream as RedisStream,
)
from isthmus.features.definition.tiles import (
    Count as Count, Max as Max, Mean as Mean, Min as Min, Sum as Sum,
)
from isthmus.features.errors import (
    ConfigurationError as ConfigurationError, ContractMismatch as ContractMismatch, DataError as DataError,
    DependencyError as DependencyError, GateFailed as GateFailed, IsthmusError as IsthmusError,
    PackageError as PackageError, RequestError as RequestError,
)
from isthmus.features.types import (
    Array as Array, Bool as Bool, Bytes as Bytes, Float32 as Float32, Float64 as Float64, Int32 as Int32,
    Int64 as Int64, String as String, UnixTimestamp as UnixTimestamp,
)
from isthmus.orchestration.server.push import push as push
from isthmus.orchestration.training.notebook import training_data as training_data
from isthmus.transforms.decorators import (
    aggregate as aggregate, request_transform as request_transform, spine as spine, transform as transform,
)
from isthmus.transforms.preparation.steps import (
    Clip as Clip, Embed as Embed, Hashed as Hashed, Impute as Impute, Log1p as Log1p, OneHot as OneHot,
    Ordinal as Ordinal, Standardize as Standardize,
)
# fmt: on

for _name, _kind in {**vars(Expect), **globals()}.items():
    if isinstance(_kind, type) and is_dataclass(_kind):
        _kind.__init__ = explain_arguments(_kind.__init__, _name)  # type: ignore[method-assign]
