"""Predictions of a user's model in ONNX format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError

from isthmus.distill.language.teachers import Onnx, within
from isthmus.distill.onnx.runtime import ask, session
from isthmus.distill.tabular.users.prediction import Form, Prediction
from isthmus.distill.tabular.users.sources import IMAGE, PredictionSource, TeacherRows, digest, numbers, to_floats
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, Problem, one_of


class OnnxSource(PredictionSource):
    runtime = f"ONNX Runtime {ort.__version__}"

    def __init__(self, declared: Onnx, rows: TeacherRows) -> None:
        super().__init__(declared.path, declared.missing, rows)
        self._declared = declared

    def identity(self) -> Any:
        declared = self._declared
        classes = None if declared.classes is None else list(declared.classes)
        own = [digest(self._file(declared.path)), declared.output, declared.gives, classes, self.runtime]
        weights = {name: digest(path) for name, path in self._weights.items()}
        return ["onnx", *own, *([weights] if weights else [])]

    @cached_property
    def _content(self) -> tuple[int, set[str]]:
        """The number of weights, and the names of files that have some of them."""
        try:
            model = onnx.load(self._file(self._declared.path), load_external_data=False)
        except DecodeError:  # ONNX Runtime says what is wrong with it
            return 0, set()
        tensors = [*_all_tensors(model.graph)]
        external = [each for each in tensors if each.data_location == onnx.TensorProto.EXTERNAL]
        names = {entry.value for each in external for entry in each.external_data if entry.key == "location"}
        return sum(int(np.prod(each.dims)) for each in tensors), names

    @property
    def _weights(self) -> Mapping[str, Path]:
        """The files of weights beside the model, by the names in the model."""
        folder, (_, names) = Path(self._declared.path).parent, self._content
        for name in names:
            if not within(name):
                problem = Problem("file of weights", repr(name), "a file beside the model or in a folder below")
                raise ConfigurationError(self.where, [problem])
        return {name: self._file(str(folder / name)) for name in sorted(names)}

    @cached_property
    def _session(self) -> ort.InferenceSession:
        path, weights = self._file(self._declared.path), self._weights
        with self._running():
            return session(path.read_bytes(), self._rows.threads, path.parent if weights else None)

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            yield
        except ConfigurationError as error:
            expected = "a model that ONNX Runtime runs on the features"
            problems = [Problem(problem.where, problem.found, expected) for problem in error.problems]
            raise ConfigurationError(self.where, problems) from error

    def size(self) -> tuple[int, int]:
        """Return the number of weights, also those of trees and linear models, and the bytes of all files."""
        files = [self._file(self._declared.path), *self._weights.values()]
        return self._content[0], sum(file.stat().st_size for file in files)

    @cached_property
    def _output(self) -> tuple[str, Form]:
        floating = [each.name for each in self._session.get_outputs() if each.type in _FLOATING]
        named, gives = self._declared.output, self._declared.gives
        if named is None:
            likely = [name for name in floating if name in ("probabilities", "logits", "values")]
            if len(one := likely or floating) != 1:
                found = f"outputs {', '.join(each.name for each in self._session.get_outputs())}"
                remedy = "a classifier of scikit-learn, XGBoost or LightGBM needs zipmap=False when it is converted"
                raise ConfigurationError(self.where, [Problem("output", found, 'output="..."')], remedy=remedy)
            named = one[0]
        if named not in floating:
            raise ConfigurationError(self.where, [Problem("output", repr(named), one_of(floating))])
        form = gives or (named if named in ("probabilities", "logits", "values") else None)
        if form is None and self._rows.numeric:
            form = "values"
        if form is None:
            raise ConfigurationError(
                self.where, [Problem(f"output {named}", "unknown meaning", 'gives="probabilities" or gives="logits"')]
            )
        return named, form  # type: ignore[return-value]

    def predict(self, rows: Columns) -> Prediction:
        name, form = self._output
        feeds = self._feeds(rows)
        with self._running():
            numbers = to_floats(ask(self._session, feeds)[name], self.where)
        classes = self._declared.classes
        return Prediction(form, numbers, None if classes is None else [*classes])

    def _feeds(self, rows: Columns) -> dict[str, Array]:
        wanted, names = self._session.get_inputs(), [item.name for item in self._rows.inputs]
        frozen = [each.name for each in wanted if each.shape and isinstance(each.shape[0], int)]
        if frozen:
            found = f"input {frozen[0]} has a fixed number of rows"
            raise ConfigurationError(self.where, [Problem(self.name, found, "a first axis without a fixed size")])
        if self._rows.images is not None and len(wanted) == 1:
            return {wanted[0].name: rows[IMAGE].data}
        if len(wanted) == 1 and wanted[0].name not in names:
            return {wanted[0].name: self._matrix(rows, wanted[0].type)}
        unknown = [each.name for each in wanted if each.name not in names]
        if unknown:
            raise ConfigurationError(self.where, [Problem(f"input {unknown[0]}", "is not a feature", one_of(names))])
        return {each.name: self._column(rows, each) for each in wanted}

    def _matrix(self, rows: Columns, kind: str) -> Array:
        texts = [item.name for item in self._rows.inputs if item.is_category]
        if texts:
            found = f"a single input, and the features {', '.join(texts)} are texts"
            raise ConfigurationError(self.where, [Problem(self.name, found, "an input for each feature")])
        parts = [numbers(item, rows[item.name]) for item in self._rows.inputs]
        return np.concatenate(parts, 1).astype(np.float64 if kind == "tensor(double)" else np.float32)

    def _column(self, rows: Columns, wanted: Any) -> Array:
        values = rows[wanted.name]
        kind = _TYPES.get(wanted.type)
        if kind is None:
            expected = one_of(sorted(_TYPES))
            raise ConfigurationError(self.where, [Problem(f"input {wanted.name}", f"type {wanted.type}", expected)])
        if kind is object:
            column = np.where(values.valid, values.data, "").astype(object)
        elif np.dtype(kind).kind == "f":
            item = next(item for item in self._rows.inputs if item.name == wanted.name)
            columns = numbers(item, values).astype(kind)
            return columns if item.size is not None or len(wanted.shape) == 2 else columns[:, 0]
        elif not values.valid.all():
            found = f"{int((~values.valid).sum())} nulls, for an input of type {wanted.type}"
            raise DataError(f"{self.where}: {wanted.name}", found, expected="a value in every row, or a float input")
        else:
            column = values.data.astype(kind)
        return column[:, None] if len(wanted.shape) == 2 else column


def _all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all weights of a graph; lists of floats, the weights of trees and linear models, without their values."""
    yield from graph.initializer
    for attribute in (each for node in graph.node for each in node.attribute):
        yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
        if attribute.floats:
            yield onnx.TensorProto(dims=[len(attribute.floats)])
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _all_tensors(inner)


_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(string)": object,
}  # fmt: skip
_FLOATING = ("tensor(float)", "tensor(double)", "tensor(float16)")
