"""ONNX Runtime: sessions, predictions and the ORT format."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import onnx
import onnxruntime as ort

from isthmus.distill.onnx.ortbytes import IDENTIFIER, canonical, operators
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DependencyError, Problem
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import Element, TensorInfo
from isthmus.package.replay import session_options

_OLDEST, _IR_VERSION, _VERSIONS = "1.19", 10, {"": 21, "ai.onnx.ml": 5}
"""The oldest tested ONNX Runtime release, the IR version it reads, and its operator set versions by domain."""
_CONTRIBUTED = {"MatMulNBits": "1.22", "GatherBlockQuantized": "1.23"} | dict.fromkeys(
    ("BiasGelu", "FusedConv", "FusedGemm", "FusedMatMul", "MatMulIntegerToFloat", "QGemm", "QLinearAdd", "QLinearMul",
     "QuickGelu", "SkipLayerNormalization"), _OLDEST
)  # fmt: skip
"""The first release of ONNX Runtime in which each contributed operator has the attributes that export writes.

`benchmarks/oldest_runtime.py` tries the statements with real releases.
"""

Run = Callable[[Feeds], dict[str, Array]]
"""A function that runs a model: input tensors by name to outputs by name."""
_SHOWN = 300
_DECOMPRESSING = ("ConstantFolding", "FuseFp16InitializerToFp32NodeTransformer")
"""Optimizations that convert constants to float32."""


def session(model: bytes, threads: int, folder: Path | None = None) -> ort.InferenceSession:
    """Open a model in ONNX Runtime, on the CPU with `threads` threads, to compute predictions with `predict`.

    `model` is the content of an ONNX or ORT file. `folder` has the files of weights that the model names, if there are
    any. Raises a ConfigurationError if ONNX Runtime rejects the model.
    """
    options = session_options(threads)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return _opened(model, options)


def _opened(model: bytes, options: ort.SessionOptions, without: Sequence[str] = ()) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*without] or None
        )
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        raise _refused(error, "cannot open a session") from error


def predict(opened: ort.InferenceSession, feeds: Feeds) -> Array:
    """Compute a prediction: run an opened session on input tensors, by name, and return its first output.

    Raises a ConfigurationError if ONNX Runtime fails on these inputs.
    """
    return _outputs(opened, None, feeds)[0]


def ask(opened: ort.InferenceSession, feeds: Feeds) -> dict[str, Array]:
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, _outputs(opened, names, feeds), strict=True))


def _outputs(opened: ort.InferenceSession, names: Sequence[str] | None, feeds: Feeds) -> list[Array]:
    try:
        outputs: list[Array] = opened.run(names, feeds)
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        fed = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in feeds.items())
        raise _refused(error, f"fails on {fed}") from error
    return outputs


def _refused(error: Exception, what: str) -> Exception:
    if isinstance(error, OSError | MemoryError) or "alloc" in str(error):
        return error
    reason = " ".join(str(error).rpartition("Status Message: ")[2].split())[:_SHOWN]
    problem = Problem("ONNX Runtime", f"{what}: {reason}", "a graph that accepts the tensors of `feeds`")
    return ConfigurationError("the student's graph", [problem], remedy="correct `model` or `feeds` of the task")


def oldest_runtime(model: bytes) -> str:
    """Return the oldest ONNX Runtime release known to run a model, such as "1.19", for the manifest of a package.

    `model` is the content of an ONNX or ORT file. If no older release is known to work, return the installed release.
    """
    newest, is_ort = ".".join(ort.__version__.split(".")[:2]), model[4:8] == IDENTIFIER
    if is_ort:
        versions, used = operators(model)
    else:
        loaded = onnx.load_model_from_string(model)
        if loaded.ir_version > _IR_VERSION:
            return newest
        versions = {opset.domain: opset.version for opset in loaded.opset_import}
        used = {(node.domain, node.op_type) for node in loaded.graph.node}
    if any(versions[domain] > version for domain, version in _VERSIONS.items() if domain in versions):
        return newest
    releases = [_OLDEST, *(_CONTRIBUTED.get(name, newest) for domain, name in used if domain not in _VERSIONS)]
    oldest = max(releases, key=lambda release: int(release.split(".")[1]))
    # An optimized file may use attributes of the runtime that wrote it.
    return newest if is_ort and oldest != _OLDEST else oldest


def tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    kind = value.type.tensor_type
    element: Any = onnx.TensorProto.DataType.Name(kind.elem_type)
    if element.lower() not in get_args(Element):
        raise DependencyError(f"tensor {value.name}", f"has element type {element}",
                              expected="|".join(get_args(Element)), remedy="cast it within the graph")  # fmt: skip
    shape = tuple(
        int(size.dim_value) if size.HasField("dim_value") else size.dim_param or f"{value.name}_{axis}"
        for axis, size in enumerate(kind.shape.dim)
    )
    return TensorInfo(value.name, element.lower(), shape)


def optimized(model: onnx.ModelProto) -> onnx.GraphProto:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        options = session_options(1)
        options.optimized_model_filepath = str(file)
        options.log_severity_level = 3  # silence the warning that the file is specific to this processor
        _opened(model.SerializeToString(), options, ["ConstantSharing"])
        return onnx.load(file).graph


def ort_format(model: bytes, *, compressed: bool = False) -> bytes:
    """Convert the content of an ONNX file to the content of an ORT file that runs on any CPU.

    `compressed` keeps the weights that `compress_weights` wrote; otherwise ONNX Runtime would store them as floats.
    Writes a temporary file. Raises a ConfigurationError if ONNX Runtime cannot open the model. Raises a DependencyError
    if the disk is full, or if the installed ONNX Runtime writes an unknown version of the format.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.ort"
        options = session_options(1)
        options.optimized_model_filepath = str(file)
        options.add_session_config_entry("session.save_model_format", "ORT")
        # NCHWc layouts depend on the processor: ONNX Runtime's converter also skips them for other targets.
        try:
            _opened(model, options, ["NchwcTransformer", *(_DECOMPRESSING if compressed else ())])
        except ConfigurationError as error:
            if "Failed to save" not in str(error):
                raise
            raise DependencyError(str(file), f"cannot be written ({error})", remedy="free disk space there") from error
        try:
            return canonical(file.read_bytes())
        except ValueError as error:
            raise DependencyError(
                f"onnxruntime {ort.__version__}",
                f"writes ORT files this release does not know: {error}",
                expected="onnxruntime 1.31",
                remedy="install onnxruntime 1.31",
            ) from error
