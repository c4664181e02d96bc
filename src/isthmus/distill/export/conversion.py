"""Export a student as ONNX graphs in all precisions."""

from collections.abc import Sequence

import onnx

from isthmus.distill.onnx.quantize import COMPRESSED, MIXED, compress_weights, quantize, quantize_mixed
from isthmus.distill.onnx.runtime import ort_format
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import evenly_spaced, in_batches

OPTIONAL = (MIXED, *COMPRESSED)
"""Precisions that export makes only for a profile or a task that names them, by size. Their ORT files fold nothing."""

CALIBRATION_ROWS = 2048

CALIBRATION_BYTES = 256 << 20
"""Maximum bytes of all calibration rows together, as many as 341 images of 256 x 256 pixels in three channels."""


def in_precision(task: Task, model: onnx.ModelProto, precision: str, edges: Sequence[Case]) -> bytes:
    if precision == "fp32":
        return bytes(model.SerializeToString(deterministic=True))
    if precision in COMPRESSED:
        return compress_weights(model, precision, task.quantized)
    train = task.material.parts.train
    size = sum(tensor.nbytes for tensor in task.feeds(train[:1]).values())
    count = min(CALIBRATION_ROWS, max(task.at_once, CALIBRATION_BYTES // max(1, size)))
    rows = train[evenly_spaced(len(train), count)]
    calibration = [task.feeds(batch) for batch in in_batches(rows, task.at_once)]
    convert = quantize_mixed if precision == MIXED else quantize
    return convert(model, [*calibration, *(case.feeds for case in edges)], task.quantized)


def in_ort_format(model: bytes, precision: str) -> bytes:
    return ort_format(model, compressed=precision in OPTIONAL)
