"""Runs a LiteRT model in a child process, which needs only ai-edge-litert."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isthmus.distill.runtimes import process
from isthmus.distill.runtimes.libraries import libraries
from isthmus.distill.runtimes.process import Description, Loaded, ProgramRejected, serve
from isthmus.distill.types import Array
from isthmus.package.inputs import Feeds

LIBRARIES = libraries("LiteRT", "litert")

_ELEMENTS = {
    "bool": "bool", "uint8": "uint8", "int32": "int32", "int64": "int64", "float32": "float", "float64": "double",
}  # fmt: skip


class LiteRTProgram(process.Program):
    """A LiteRT model in a child process. Its sizes are fixed: `ask` pads inputs with zeros, and cuts outputs back."""

    libraries, package = LIBRARIES, "ai_edge_litert"

    def ask(self, feeds: Feeds) -> dict[str, Array]:
        padded, sizes = dict(feeds), dict[str, int]()
        for tensor in self._tensors:
            array = feeds[tensor.name]
            missing = []
            for name, size in zip(tensor.shape[1:], array.shape[1:], strict=False):
                most = self._max_sizes.get(str(name), size)
                if size > most:
                    raise ProgramRejected(f"{name} is {size}, at most {most} is allowed")
                missing.append(most - size)
                sizes[str(name)] = size
            if any(missing):
                padded[tensor.name] = np.pad(array, [(0, 0), *((0, count) for count in missing)])
        outputs = super().ask(padded)
        return {
            tensor.name: _cut(outputs[tensor.name], [sizes.get(str(name)) for name in tensor.shape[1:]])
            for tensor in self._outputs
        }


def _prepare() -> Callable[[bytes], Loaded]:
    from ai_edge_litert.interpreter import Interpreter

    def load(model: bytes) -> Loaded:
        interpreter = Interpreter(model_content=model, num_threads=1)
        runner = interpreter.get_signature_runner()
        inputs, outputs = runner.get_input_details(), runner.get_output_details()

        def run(tensors: list[Array]) -> list[Array]:
            answers = runner(**dict(zip(inputs, tensors, strict=True)))
            return [np.asarray(answers[name]) for name in outputs]

        return Loaded(_described(inputs), _described(outputs), run)

    return load


def _cut(array: Array, sizes: Sequence[int | None]) -> Array:
    if array.ndim != 1 + len(sizes):
        raise ProgramRejected(f"an output has {array.ndim} axes instead of {1 + len(sizes)}")
    return array[(slice(None), *map(slice, sizes))]


def _described(details: dict[str, Any]) -> list[Description]:
    described = []
    for name, detail in details.items():
        kind = np.dtype(detail["dtype"]).name
        described.append(Description(_ELEMENTS.get(kind, kind), tuple(detail["shape"].tolist()), name))
    return described


if __name__ == "__main__":
    serve(_prepare)
