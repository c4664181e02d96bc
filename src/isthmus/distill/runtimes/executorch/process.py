"""Runs an ExecuTorch program in a child process, which needs only torch and executorch."""

from collections.abc import Callable
from typing import Any

from isthmus.distill.runtimes import process
from isthmus.distill.runtimes.libraries import libraries
from isthmus.distill.runtimes.process import Description, Loaded, serve
from isthmus.distill.types import Array

LIBRARIES = libraries("ExecuTorch", "executorch")

_KINDS = {0: "uint8", 3: "int32", 4: "int64", 6: "float", 7: "double", 11: "bool"}
"""Element types by torch's ScalarType number."""


class ExecuTorchProgram(process.Program):
    libraries, package = LIBRARIES, "executorch"


def _prepare() -> Callable[[bytes], Loaded]:
    import torch

    # The core of `executorch.runtime`, which would also import all exporters and take ten times as long.
    from executorch.extension.pybindings import _C as runtime  # noqa: N811 - a module

    torch.set_num_threads(1)
    runtime._unsafe_reset_threadpool(1)

    def as_tensor(array: Array) -> Any:
        tensor = torch.from_numpy(array.copy())
        # ExecuTorch rejects the zero strides of an empty array.
        return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)

    def load(model: bytes) -> Loaded:
        program = runtime._load_program_from_buffer(
            model, program_verification=runtime.Verification.InternalConsistency
        )
        method = program.load_method("forward")
        meta = method.method_meta()

        # The default argument keeps the program alive: the method uses its memory.
        def run(tensors: list[Array], _program: Any = program) -> list[Array]:
            return [tensor.numpy() for tensor in method([as_tensor(array) for array in tensors])]

        return Loaded(
            [_described(meta.input_tensor_meta(place)) for place in range(meta.num_inputs())],
            [_described(meta.output_tensor_meta(place)) for place in range(meta.num_outputs())],
            run,
        )

    return load


def _described(meta: Any) -> Description:
    return Description(_KINDS.get(meta.dtype(), f"elements of kind {meta.dtype()}"), tuple(meta.sizes()))


if __name__ == "__main__":
    serve(_prepare)
