"""Converts a student to a zipped Core ML package. Run with `python -m`, it is the child process that converts."""

import io
import json
import sys
import uuid
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from isthmus.distill.onnx.quantize import COMPRESSED, LEAST_TABLE
from isthmus.distill.runtimes.coreml.process import LIBRARIES, MODEL, WEIGHTS
from isthmus.distill.runtimes.exportedprogram import conversions, serve
from isthmus.distill.runtimes.network import Converted, Portable
from isthmus.distill.types import Index

_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date in a zip, for reproducible bytes."""

_UNUSED = ("executorch", "sklearn", "torchao")
"""Packages that coremltools imports if they are installed, for ten seconds. It needs them for other models."""


def files(portable: Portable, _train: Index, precisions: Collection[str]) -> Mapping[str, Callable[[], Converted]]:
    names = [f"{portable.part}.{each}.mlpackage.zip" for each in ("fp32", *COMPRESSED) if each in {"fp32", *precisions}]
    return conversions(portable, names, LIBRARIES, "isthmus.distill.runtimes.coreml.export")


def _convert(program: ExportedProgram, file: str) -> bytes:
    sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]
    # These imports take three seconds.
    import coremltools

    precision = file.split(".")[1]
    names = [*pytree.tree_unflatten([*range(program.call_spec.out_spec.num_leaves)], program.call_spec.out_spec)]
    # Core ML computes fp16 files in 16 bits; their outputs would be in 16 bits, too.
    half = precision == "fp16"
    model = coremltools.convert(
        program.run_decompositions(),
        compute_precision=coremltools.precision.FLOAT16 if half else coremltools.precision.FLOAT32,
        minimum_deployment_target=coremltools.target.iOS16,
        outputs=[coremltools.TensorType(name=name, dtype=np.float32 if half else None) for name in names],
    )  # fmt: skip
    if precision == "w8":
        model = _with_small_weights(model)
    spec = model.get_spec()
    spec.description.metadata.Clear()  # contains the date
    parts = {MODEL: spec.SerializeToString(deterministic=True)}
    weights = Path(model.weights_dir) / "weight.bin"
    if weights.is_file():
        parts[WEIGHTS] = weights.read_bytes()
    return _zipped(parts, file.removesuffix(".zip"))


def _with_small_weights(model: Any) -> Any:
    from coremltools.optimize import coreml

    config = coreml.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=LEAST_TABLE)
    return coreml.linear_quantize_weights(model, config=coreml.OptimizationConfig(global_config=config))


def _zipped(parts: Mapping[str, bytes], folder: str) -> bytes:
    files = {"Manifest.json": json.dumps(_manifest(parts), indent=4, sort_keys=True).encode() + b"\n"}
    files |= {f"Data/{name}": data for name, data in parts.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{folder}/{name}", _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _manifest(parts: Mapping[str, bytes]) -> dict[str, Any]:
    described = {MODEL: "CoreML Model Specification", str(PurePosixPath(WEIGHTS).parent): "CoreML Model Weights"}
    if WEIGHTS not in parts:
        del described[str(PurePosixPath(WEIGHTS).parent)]
    ids = {path: str(uuid.uuid5(uuid.NAMESPACE_URL, path)) for path in described}
    entries = {
        ids[path]: {
            "author": "com.apple.CoreML", "description": description, "name": path.rpartition("/")[2], "path": path
        }
        for path, description in described.items()
    }  # fmt: skip
    return {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": ids[MODEL]}


if __name__ == "__main__":
    serve(_convert)
