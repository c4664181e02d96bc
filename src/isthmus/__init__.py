"""The names that a `definitions.py` needs: declarations, decorators, types, preparation steps and errors.

Importing this module loads no third-party library: the code behind a name is imported when the name is first used. It
also adds an import hook, which says where former private modules have moved.
"""

# ruff: noqa: F405 - names of the star import

from typing import TYPE_CHECKING

from isthmus.lazy import lazily
from isthmus.moved import install

if TYPE_CHECKING:
    from isthmus.declarations import *  # noqa: F403

install()

__all__ = [
    "Array",
    "Avro",
    "Bag",
    "Binary",
    "Bool",
    "Bytes",
    "Causal",
    "Classes",
    "Clip",
    "ConfigurationError",
    "ContractMismatch",
    "Count",
    "DataError",
    "DecodingSettings",
    "DependencyError",
    "Distillation",
    "Embed",
    "Embedding",
    "Encoder",
    "Entity",
    "Expect",
    "FeatureService",
    "FeatureView",
    "Field",
    "FileStream",
    "Float32",
    "Float64",
    "Gate",
    "GateFailed",
    "Hashed",
    "Image",
    "Impute",
    "Int32",
    "Int64",
    "Isotonic",
    "IsthmusError",
    "Json",
    "Kafka",
    "Log1p",
    "Lora",
    "Max",
    "Mean",
    "Min",
    "MobileNet",
    "Monitor",
    "Number",
    "OneHot",
    "Onnx",
    "Ordinal",
    "PackageError",
    "Picture",
    "Pretrained",
    "Protobuf",
    "PrunedEncoder",
    "Rank",
    "RedisStream",
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
    "Sum",
    "Tabular",
    "TeacherFunction",
    "TeacherOutputs",
    "Temperature",
    "Text",
    "UNet",
    "UnixTimestamp",
    "aggregate",
    "push",
    "request_transform",
    "spine",
    "training_data",
    "transform",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(__name__, {"isthmus.declarations": " ".join(__all__)})
