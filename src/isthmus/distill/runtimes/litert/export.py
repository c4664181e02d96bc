"""Converts a student to a LiteRT model. Run with `python -m`, it is the child process that converts."""

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.export import ExportedProgram

from isthmus.distill.onnx.quantize import COMPRESSED
from isthmus.distill.runtimes.exportedprogram import conversions, serve
from isthmus.distill.runtimes.litert.process import LIBRARIES
from isthmus.distill.runtimes.network import Converted, Portable
from isthmus.distill.types import Index
from isthmus.features.errors import GateFailed


def files(portable: Portable, _train: Index, precisions: Collection[str]) -> Mapping[str, Callable[[], Converted]]:
    names = [f"{portable.part}.{each}.tflite" for each in ("fp32", *COMPRESSED) if each in {"fp32", *precisions}]
    return conversions(portable, names, LIBRARIES, "isthmus.distill.runtimes.litert.export", partial(_opened, portable))


def _opened(portable: Portable, file: str) -> list[str]:
    opened = [size for size, largest in portable.max_sizes(file, LIBRARIES.name).items() if largest > 1]
    if unfixed := [size for size in opened if size not in portable.padded]:
        raise GateFailed(
            file,
            f"{LIBRARIES.name} cannot convert the student: size {unfixed[0]} is dynamic",
            expected="tensors with fixed sizes, except the rows",
            remedy=f"set padded = [{unfixed[0]!r}] in the task if padding with zeros does not change the outputs, or "
            "use the files in ONNX or ORT format",
        )
    return opened


def _convert(program: ExportedProgram, file: str) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        _whole(program).export(str(path))
        return _compressed(path, file.split(".")[1])


@cache
def _whole(program: ExportedProgram) -> Any:
    # These imports take eight seconds.
    import litert_torch

    assert program.example_inputs is not None  # noqa: S101 - `conversions` exports with them
    _, examples = program.example_inputs
    wide = any(tensor.element_size() == 8 for tensor in examples.values())
    return litert_torch.convert(program.module(), sample_kwargs=examples, strict_export=False, enable_x64=wide)


def _compressed(model: Path, precision: str) -> bytes:
    """Return the model with smaller weights, which LiteRT converts to float32 before it computes."""
    if precision not in COMPRESSED:
        return model.read_bytes()
    from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe

    quantizing = quantizer.Quantizer(str(model))
    if precision == "w8":
        quantizing.load_quantization_recipe(recipe.weight_only_wi8_afp32())
    else:
        weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
        quantizing.update_quantization_recipe(
            regex=".*", operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
            op_config=qtyping.OpQuantizationConfig(
                weight_tensor_config=weights, compute_precision=qtyping.ComputePrecision.FLOAT
            ),
            algorithm_key=algorithm_manager.AlgorithmName.FLOAT_CASTING,
        )  # fmt: skip
    return bytes(quantizing.quantize().quantized_model)


if __name__ == "__main__":
    serve(_convert)
