"""Runs a LiteRT model in a child process. It needs only ai-edge-litert."""

from collections.abc import Callable
from typing import Any

import numpy as np

from isthmus.distill.portable import process
from isthmus.distill.portable.libraries import libraries
from isthmus.distill.portable.process import Description, Loaded, serve
from isthmus.distill.types import Array

LIBRARIES = libraries("LiteRT", "litert")

_ELEMENTS = {
    "bool": "bool", "uint8": "uint8", "int32": "int32", "int64": "int64", "float32": "float", "float64": "double",
}  # fmt: skip


class Program(process.Program):
    """A model in LiteRT."""

    libraries, package, module = LIBRARIES, "ai_edge_litert", "isthmus.distill.litert.process"


def _prepare(threads: int) -> Callable[[bytes], Loaded]:
    from ai_edge_litert.interpreter import Interpreter

    def load(model: bytes) -> Loaded:
        interpreter = Interpreter(model_content=model, num_threads=threads)
        runner = interpreter.get_signature_runner()
        inputs, outputs = runner.get_input_details(), runner.get_output_details()

        def run(tensors: list[Array]) -> list[Array]:
            answers = runner(**dict(zip(inputs, tensors, strict=True)))
            return [np.asarray(answers[name]) for name in outputs]

        return Loaded(_described(inputs), _described(outputs), run)

    return load


def _described(details: dict[str, Any]) -> list[Description]:
    described = []
    for name, detail in details.items():
        kind = np.dtype(detail["dtype"]).name
        described.append(Description(_ELEMENTS.get(kind, kind), tuple(detail["shape"].tolist()), name))
    return described


if __name__ == "__main__":
    serve(_prepare)
