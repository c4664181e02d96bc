"""A deployed model: the package's ORT file in an ONNX Runtime session that has reproduced its golden rows."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from isthmus.features.columns import Values
from isthmus.features.errors import PackageError
from isthmus.features.golden import read_golden
from isthmus.features.manifest import feeds, package_digest, read_contract, read_package
from isthmus.serving.deployment import Deployment, require_rows

GOLDEN_TOLERANCE = 1e-5
"""Largest difference from the recorded outputs: the same file gives other last bits on another CPU."""

_TRIALS = 5

Float32 = np.ndarray[Any, np.dtype[np.float32]]


class Model:
    """The model of a deployment, ready to answer.

    Attributes:
        contract: what its package was made under.
        seconds: how long a prediction of one row takes here, at best.

    Raises:
        PackageError: the package is damaged, is another one, or does not reproduce its golden rows.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        folder = Path(deployment.package)
        manifest = read_package(folder)
        digest = package_digest(folder)
        if digest != deployment.digest:
            raise PackageError(
                f"package {manifest.name}", f"has digest {digest[:12]}",
                expected=f"{deployment.digest[:12]}, as deployed",
                remedy="run `isthmus verify` and `isthmus deploy` for this package",
            )  # fmt: skip
        self.contract = read_contract(folder, manifest)
        self.inputs = manifest.model_inputs
        variant = manifest.variant(deployment.precision)
        self._output = require_rows(manifest)
        try:
            golden = read_golden(folder, manifest)
            cases = [golden.columns(case, self.inputs) for case in golden.cases]
            expected = [case.outputs[variant.file][self._output].array for case in golden.cases]
            self._session = _session(folder / variant.file, deployment.threads)
            found = [self.predict(columns) for columns in cases]
        except PackageError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no base class of their own
            where = f"package {manifest.name}: {variant.file}"
            raise PackageError(where, f"onnxruntime refuses it ({error})", remedy="export the model again") from error
        # Written so that NaN, which compares as false, is refused.
        if not all(map(_same, found, expected)):
            raise PackageError(
                f"package {manifest.name}: {variant.file}", "does not reproduce its golden outputs",
                expected=f"differences of at most {GOLDEN_TOLERANCE:g}", remedy="export it with this onnxruntime",
            )  # fmt: skip

        self.seconds = self._time(cases[0])

    @property
    def threads(self) -> int:
        """CPU threads of one prediction, as the session has them."""
        threads: int = self._session.get_session_options().intra_op_num_threads
        return threads

    def predict(self, columns: Mapping[str, Values]) -> Float32:
        """The model's output for n rows, shape (n,).

        Args:
            columns: a column of n values for every input.

        Raises:
            DataError: a column is missing.
        """
        (output,) = self._session.run([self._output], feeds(self.inputs, columns))
        result: Float32 = np.asarray(output, np.float32).reshape(-1)
        return result

    def _time(self, columns: Mapping[str, Values]) -> float:
        row = {name: Values(values.data[:1], values.valid[:1]) for name, values in columns.items()}
        durations = []
        for _ in range(_TRIALS):
            start = time.perf_counter()
            self.predict(row)
            durations.append(time.perf_counter() - start)
        return min(durations)


def _same(found: Float32, expected: np.ndarray[Any, Any]) -> bool:
    return found.shape == expected.shape and bool(np.abs(found - expected).max(initial=0.0) <= GOLDEN_TOLERANCE)


def _session(file: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
