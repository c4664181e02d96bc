"""Converts a student to a LiteRT model.

`python -m isthmus.distill.runtimes.litert.export` is the process that converts.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.export import ExportedProgram

from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.exportedprogram import convert, serve
from isthmus.distill.runtimes.litert.process import LIBRARIES, Program
from isthmus.distill.runtimes.network import Converted, Portable, in_process
from isthmus.distill.types import Index
from isthmus.features.errors import GateFailed

__all__ = ["LIBRARIES", "converted", "files", "running"]


def files(of: Portable, _train: Index) -> Mapping[str, Callable[[], Converted]]:
    """A file in fp32, with what makes it."""
    return {f"{of.part}.fp32.tflite": partial(converted, of)}


def converted(of: Portable) -> Converted:
    """The model for a row at a time; the same student has the same bytes. Raises a GateFailed if there can be none.

    The converter refuses dimensions of torch.export: sizes that the graph leaves open are the maximum, and filled up.
    """
    file = f"{of.part}.fp32.tflite"
    opened = [size for size, largest in of.max_sizes(file, LIBRARIES.name).items() if largest > 1]
    if unfixed := [size for size in opened if size not in of.padded]:
        raise GateFailed(
            file,
            f"{LIBRARIES.name} cannot convert the student: {unfixed[0]}, a size that the graph leaves open, may differ",
            expected="tensors whose sizes but the rows are the same in each call",
            remedy=f"name it in the task, padded = [{unfixed[0]!r}], if zeros that fill it up change no answer; or run "
            "the files in ONNX or ORT format",
        )
    return convert(of, file, LIBRARIES, "isthmus.distill.runtimes.litert.export", tuple(opened))


def running(program: Converted, of: Portable) -> AbstractContextManager[Run]:
    """Runs a model within the context. Raises a GateFailed if LiteRT refuses it."""
    return in_process(Program, program, of)


def _convert(program: ExportedProgram) -> bytes:
    # These imports take eight seconds.
    import litert_torch

    assert program.example_inputs is not None  # noqa: S101 - `convert` exports with them
    _, examples = program.example_inputs
    wide = any(tensor.element_size() == 8 for tensor in examples.values())
    model = litert_torch.convert(program.module(), sample_kwargs=examples, strict_export=False, enable_x64=wide)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        model.export(str(path))
        return path.read_bytes()


if __name__ == "__main__":
    serve(_convert)
