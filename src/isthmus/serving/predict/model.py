"""A deployed model: the ORT file of a package in ONNX Runtime, checked against the package's golden rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.features.errors import PackageError, RequestError, escape_unprintable
from isthmus.features.values.columns import Values
from isthmus.package.golden import Golden, read_golden
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.package.manifest import open_package, read_contract
from isthmus.package.prompts import decoder_of, open_tokenizer
from isthmus.package.replay import answers, check_input_tensors, open_session, require_reproduced
from isthmus.package.signature import require_signature
from isthmus.serving.deployment.record import Deployment, require_row_output

if TYPE_CHECKING:
    import onnxruntime

_TIMINGS = 5
_TOKENS = 1 << 14
"""Most tokens of the texts that a model reads at once."""
_REASON = "Status Message: "
"""Text in an ONNX Runtime error between the location in the graph and the reason."""
_SHOWN = 300

Float32 = np.ndarray[Any, np.dtype[np.float32]]


class DeployedModel:
    """The loaded model of a deployment. The constructor checks the package and runs its golden rows, which blocks.

    The package must be signed with `public_key` (PEM) and the deployment's own key, unless they are None. Raises a
    PackageError if a signature is missing, or if the package is damaged, another one, or does not reproduce its golden
    rows; a DependencyError if the deployment's device is not available, or if the model generates text without the
    extra `generate`.

    Attributes:
        inputs: inputs of a model of rows; empty for a model of tensors.
        classes: class names in output order; empty if the model returns one number per row.
        several: True if any number of classes may be right.
        rounding: largest difference between the outputs of two processors.
        row: golden row with the fewest nulls, by input, in request form.
        elements: number of input elements of the largest golden case.
        text: tokenizer and decoder of a model that generates text, else None.
        seconds: best measured time to predict a single row here.
        warming: seconds that its first predictions took, on the golden rows.
    """

    def __init__(self, deployment: Deployment, public_key: str | None = None) -> None:
        self.deployment = deployment
        package = open_package(Path(deployment.package))
        manifest, digest = package.manifest, package.files.digest
        if digest != deployment.digest:
            raise PackageError(
                f"package {manifest.name}", f"has digest {digest[:12]}",
                expected=f"{deployment.digest[:12]}, as deployed",
                remedy="run `isthmus verify` and `isthmus deploy` for this package",
            )  # fmt: skip
        # A process that can write a package can also write the deployment file, but not the server's settings.
        for key in dict.fromkeys((public_key, deployment.public_key)):
            if key is not None:
                require_signature(package.files, key)
        self.contract = read_contract(package)
        self.manifest, self.inputs = manifest, package.model_inputs
        longest = [item.tokenizer.tokens for item in self.inputs if item.tokenizer is not None]
        self._texts_at_once = max(1, _TOKENS // longest[0]) if longest else None
        variant = manifest.served(deployment.precision, deployment.device)
        self._output = require_row_output(manifest) if self.inputs else ""
        self.classes, self.several, self.rounding = manifest.classes, manifest.several, manifest.rounding
        golden = read_golden(package)
        check_input_tensors(f"package {manifest.name}", golden, self.inputs)
        self.text = None if manifest.generation is None else (open_tokenizer(package), decoder_of(manifest, variant))
        self._session = open_session(package, variant, deployment.threads, deployment.device)
        began = time.perf_counter()
        outputs = answers(self._session, manifest, variant, [case.feeds for case in golden.cases])
        require_reproduced(golden, manifest, variant, outputs, device=deployment.device)
        self.elements = max(sum(array.size for array in case.feeds.values()) for case in golden.cases)
        self.row, single = self._single(golden)
        self.seconds = _time(single)
        self.warming = time.perf_counter() - began

    @property
    def threads(self) -> int:
        threads: int = self._session.get_session_options().intra_op_num_threads
        return threads

    def for_deployment(self, deployment: Deployment) -> "DeployedModel":
        model = copy(self)
        model.deployment = deployment
        return model

    def predict(self, columns: Mapping[str, Values]) -> Float32:
        if self._texts_at_once is None:
            (output,) = self._session.run([self._output], feeds(self.inputs, columns))
        else:
            output = self._predict_texts(columns, self._texts_at_once)
        result: Float32 = np.asarray(output, np.float32).reshape((-1, len(self.classes)) if self.classes else -1)
        return result

    def _predict_texts(self, columns: Mapping[str, Values], step: int) -> np.ndarray[Any, Any]:
        """Predict `step` rows at a time, because all rows of a call are padded to its longest text."""
        rows = len(next(iter(columns.values())).data)
        parts = [slice(begin, begin + step) for begin in range(0, max(rows, 1), step)]
        fed = (feeds(self.inputs, {name: values.take(part) for name, values in columns.items()}) for part in parts)
        return np.concatenate([self.run(tensors, [self._output])[self._output] for tensors in fed])

    def run(
        self, tensors: Feeds, outputs: Sequence[str], options: "onnxruntime.RunOptions | None" = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run the graph on input tensors by name; return the tensors that `outputs` names. `options` can stop the run.

        Raises RequestError if the graph fails on these inputs. Out of memory, raises the error of ONNX Runtime.
        """
        from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

        try:
            return dict(zip(outputs, self._session.run(list(outputs), tensors, options), strict=True))
        except (Fail, InvalidArgument, RuntimeException) as error:
            reason = escape_unprintable(str(error).partition(_REASON)[2] or str(error)).strip()
            if "alloc" in reason:
                raise
            raise RequestError("inputs", f"the model cannot process them: {reason[:_SHOWN]}",
                               expected="values that its graph is defined for") from error  # fmt: skip

    def _single(self, golden: Golden) -> tuple[dict[str, Any], Callable[[], object]]:
        if not self.inputs:
            smallest = min((case.feeds for case in golden.cases), key=lambda fed: sum(a.size for a in fed.values()))
            return {}, partial(self.run, smallest, [tensor.name for tensor in self.manifest.outputs])
        columns = golden.columns(golden.cases[0], self.inputs)
        texts = [columns[item.name].data for item in self.inputs if item.text]
        first = int(np.argmax([len(text or "") for text in texts[0]])) if texts else 0  # the slowest
        row = {name: values.take(slice(first, first + 1)) for name, values in columns.items()}
        return _fullest(columns, self.inputs), partial(self.predict, row)


def _time(predict: Callable[[], object]) -> float:
    durations = []
    for _ in range(_TIMINGS):
        start = time.perf_counter()
        predict()
        durations.append(time.perf_counter() - start)
    return min(durations)


def unanswered(outputs: Float32) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(np.isnan(outputs).any(axis=tuple(range(1, outputs.ndim))))


def _fullest(columns: Mapping[str, Values], inputs: Sequence[ModelInput]) -> dict[str, Any]:
    valid = np.sum([columns[item.name].valid for item in inputs], axis=0)
    if not valid.size:
        return {}
    row = slice(first := int(valid.argmax()), first + 1)
    return {item.name: columns[item.name].take(row).tolist(item.dtype)[0] for item in inputs}
