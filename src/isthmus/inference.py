"""Run model files and featurizers of a package in Python, and export your own causal language model."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.export.causal import ModelOrigin, export
    from isthmus.distill.onnx.runtime import predict, session
    from isthmus.features.values.columns import from_python
    from isthmus.package.featurizer.interpreter import Head

__all__ = [
    "Head",
    "ModelOrigin",
    "export",
    "from_python",
    "predict",
    "session",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.export.causal": "ModelOrigin export",
            "isthmus.distill.onnx.runtime": "predict session",
            "isthmus.features.values.columns": "from_python",
            "isthmus.package.featurizer.interpreter": "Head",
        },
    )
