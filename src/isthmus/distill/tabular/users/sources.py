"""Sources of a user's predictions for a table: code, a model in ONNX format, or outputs computed elsewhere."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.compute as pc
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from isthmus.distill.language.teachers import DeclaredTeacher, Onnx, TeacherFunction, TeacherOutputs, function_of
from isthmus.distill.onnx.runtime import session
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tabular.users.prediction import Form, Prediction
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.types import Array, Index
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, IsthmusError, Problem, one_of
from isthmus.features.pointintime.join import cast, moments
from isthmus.features.pointintime.spine import spine_rows
from isthmus.features.types import UnixTimestamp
from isthmus.features.values.arrow import ARROW
from isthmus.package.inputs import ModelInput

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("probabilities", "logits", "log_probabilities", "values")


class TeacherRows(NamedTuple):
    """The rows of a training set, as a user's model sees them.

    Attributes:
        table: the training set.
        inputs: features of the teacher.
        train: numbers of the training rows, int64.
        labels: labels to fit a model to, one per row of the table: 0 and 1, class names, numbers, or relevance.
        classes: names of the label's classes; None for other labels.
        recipe: plain data that identifies the table, the label and the training rows.
        spine: declaration of the training examples, which names their join keys.
        root: folder of the project, to which paths are relative.
        threads: threads that a model may use.
        numeric: True for a Number or a Rank: a model gives values, not probabilities.
    """

    table: pa.Table
    inputs: Sequence[ModelInput]
    train: Index
    labels: Array
    classes: Sequence[str] | None
    recipe: Mapping[str, Any]
    spine: Spine
    root: Path
    threads: int
    numeric: bool

    def columns(self, rows: Index) -> Columns:
        return columns(self.table.take(rows), self.inputs)


class PredictionSource(ABC):
    """A declared teacher: predicts for rows of the training set, by their numbers, or for new rows."""

    name: str
    runtime: str
    costly = False
    refuses: bool

    def __init__(self, rows: TeacherRows) -> None:
        self._rows = rows

    @property
    def where(self) -> str:
        return f"teacher {self.name}"

    @abstractmethod
    def identity(self) -> Any:
        """Return plain data that changes when the predictions may change."""

    @abstractmethod
    def predict(self, rows: Columns) -> Prediction:
        """Predict for new rows, given as a column per feature."""

    def predict_rows(self, rows: Index) -> Prediction:
        return self.predict(self._rows.columns(rows))

    def size(self) -> tuple[int, int] | None:
        return None

    def _file(self, name: str) -> Path:
        path = self._rows.root / name
        if not path.exists():
            raise DataError(self.where, f"{name} not found", expected=f"a file in {self._rows.root}")
        return path


class _FunctionSource(PredictionSource):
    runtime = "Python"
    costly = True

    def __init__(self, declared: TeacherFunction, rows: TeacherRows) -> None:
        super().__init__(rows)
        self.name, self._declared = declared.function, declared
        self.refuses = declared.missing == "refuse"
        self._function = _imported(declared.function, self.where)
        self._fits = len(_required(self._function))
        if self._fits not in (0, 2):
            found = f"takes {self._fits} arguments"
            raise ConfigurationError(self.where, [Problem("function", found, "no argument, or features and labels")])

    def identity(self) -> Any:
        version = self._declared.version
        files = {name: _digest(self._file(name)) for name in self._declared.files}
        return ["function", fingerprint(self._function, versioned=bool(version)), files, version, self._fits]

    def predict(self, rows: Columns) -> Prediction:
        frame, model = self._frame(rows), self._model
        with self._running(f"a call with {len(frame):,} rows"):
            return self._predicted(model, frame)

    @cached_property
    def _model(self) -> Any:
        if not self._fits:
            with self._running("building the model"):
                return self._function()
        train = self._rows.train
        frame = self._frame(self._rows.columns(train))
        with self._running(f"fitting a model to {len(train):,} rows"), _seeded():
            return self._function(frame, self._rows.labels[train])

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Limit threads, and name the teacher in an error of the user's code or of a service."""
        try:
            with threadpool_limits(self._rows.threads):
                yield
        except IsthmusError:
            raise
        except Exception as error:
            raise DependencyError(
                self.where, f"{what} raised {type(error).__name__}: {error}",
                remedy="correct the function and run the same command again: outputs so far are cached",
            ) from error  # fmt: skip

    @cached_property
    def _categories(self) -> Mapping[str, Array]:
        """The texts of each feature in the training part, sorted: the categories of its column."""
        texts = [item.name for item in self._rows.inputs if item.is_category]
        known = {name: pc.unique(self._rows.table[name].take(self._rows.train)).drop_null() for name in texts}
        return {name: np.sort(values.to_numpy(zero_copy_only=False)) for name, values in known.items()}

    def _frame(self, rows: Columns) -> "pd.DataFrame":
        import pandas as pd

        frame: dict[str, Any] = {}
        for item in self._rows.inputs:
            values = rows[item.name]
            if item.is_category:
                texts = values.data.astype(object)
                texts[~values.valid] = None
                frame[item.name] = pd.Categorical(texts, categories=self._categories[item.name])
            else:
                frame[item.name] = np.where(values.valid, values.data.astype(np.float64), np.nan)
        return pd.DataFrame(frame)

    def _predicted(self, model: Any, frame: "pd.DataFrame") -> Prediction:
        """Predict with the first of `predict_proba`, `decision_function`, `predict` and a call that the model has."""
        known = getattr(model, "classes_", None)
        names = None if known is None else [str(name) for name in np.ravel(np.asarray(known, dtype=object))]
        if isinstance(model, nn.Module):
            return self._forward(model, frame, names)
        if hasattr(model, "predict_proba"):
            return Prediction("probabilities", _floats(model.predict_proba(frame), self.where), names)
        if hasattr(model, "decision_function"):
            return Prediction("logits", _floats(model.decision_function(frame), self.where), names)
        predict = getattr(model, "predict", model)
        if not callable(predict):
            expected = "predict_proba, decision_function, predict, or a function"
            raise ConfigurationError(self.where, [Problem("model", f"a {type(model).__name__}", expected)])
        output = predict(frame)
        if isinstance(output, tuple) and len(output) == 2:
            output, names = output[0], [str(name) for name in output[1]]
        listed = output.tolist() if hasattr(output, "tolist") else output
        if isinstance(listed, list):
            listed = [None if _is_missing(each) else each for each in listed]
            named = any(isinstance(each, str) for each in listed)
            if named or (self._rows.classes and listed and all(each is None for each in listed)):
                return self._one_hot(listed)
            output = _filled(listed)
        return Prediction("values" if self._rows.numeric else "probabilities", _floats(output, self.where), names)

    def _forward(self, network: nn.Module, frame: "pd.DataFrame", names: Sequence[str] | None) -> Prediction:
        texts = [str(name) for name, kind in frame.dtypes.items() if kind == "category"]
        if texts:
            expected = "features that are numbers, or a function that prepares the texts"
            raise ConfigurationError(self.where, [Problem("features", f"{', '.join(texts)} are texts", expected)])
        if network.training:
            raise ConfigurationError(self.where, [Problem("network", "is in training mode", "network.eval()")])
        with torch.inference_mode():
            output = network(torch.from_numpy(frame.to_numpy(np.float32)))
        if isinstance(output, tuple) and len(output) == 2:
            output, names = output[0], [str(name) for name in output[1]]
        return Prediction(
            "values" if self._rows.numeric else "logits", _floats(output.cpu().numpy(), self.where), names
        )

    def _one_hot(self, names: Sequence[str | None]) -> Prediction:
        """Convert class names to probabilities of 0 and 1; None becomes a row without an answer."""
        classes = [*(self._rows.classes or ("0", "1"))]
        places = {name: place for place, name in enumerate(classes)}
        if unknown := sorted({str(name) for name in names if name is not None and name not in places}):
            raise DataError(f"{self.where}: classes", f"{unknown[0]!r}", expected=one_of(classes))
        numbers = np.full((len(names), len(classes)), np.nan)
        known = [row for row, name in enumerate(names) if name is not None]
        numbers[known] = np.eye(len(classes))[[places[str(names[row])] for row in known]]
        return Prediction("probabilities", numbers, classes)

    def size(self) -> tuple[int, int] | None:
        if not isinstance(self._model, nn.Module):
            return None
        weights = [*self._model.parameters()]
        return sum(each.numel() for each in weights), sum(each.nbytes for each in weights)


def _imported(name: str, where: str) -> Callable[..., Any]:
    try:
        function = function_of(name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(where, [Problem(name, f"cannot be imported ({error})")]) from error
    if not callable(function):
        raise ConfigurationError(where, [Problem(name, f"is a {type(function).__name__}", "a function")])
    return function  # type: ignore[no-any-return]


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind in kinds]


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators that libraries draw from without a seed of their own, so that a fit can be repeated."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        np.random.set_state(state)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType"


def _filled(rows: Sequence[Any]) -> Any:
    """Replace None by NaN, or by a row of NaN if the other rows are lists."""
    width = next((len(row) for row in rows if isinstance(row, list | tuple)), None)
    gap: Any = np.nan if width is None else [np.nan] * width
    return [gap if row is None else row for row in rows]


def _floats(output: Any, where: str) -> Array:
    try:
        return np.asarray(output, np.float64)
    except (TypeError, ValueError) as error:
        problem = Problem("output", f"a {type(output).__name__}: {error}", "an array of numbers")
        raise ConfigurationError(where, [problem]) from error


class _OnnxSource(PredictionSource):
    runtime = f"ONNX Runtime {ort.__version__}"

    def __init__(self, declared: Onnx, rows: TeacherRows) -> None:
        super().__init__(rows)
        self.name, self._declared = declared.path, declared
        self.refuses = declared.missing == "refuse"

    def identity(self) -> Any:
        declared = self._declared
        classes = None if declared.classes is None else list(declared.classes)
        return ["onnx", _digest(self._file(declared.path)), declared.output, declared.gives, classes, self.runtime]

    @cached_property
    def _session(self) -> ort.InferenceSession:
        return session(self._file(self._declared.path).read_bytes(), self._rows.threads)

    def size(self) -> tuple[int, int]:
        """Return the number of the model's numbers and the bytes of its file."""
        import onnx

        path = self._file(self._declared.path)
        tensors = onnx.load(path, load_external_data=False).graph.initializer
        return sum(int(np.prod(each.dims)) for each in tensors), path.stat().st_size

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
        numbers = _floats(self._session.run([name], self._feeds(rows))[0], self.where)
        classes = self._declared.classes
        return Prediction(form, numbers, None if classes is None else [*classes])

    def _feeds(self, rows: Columns) -> dict[str, Array]:
        wanted, names = self._session.get_inputs(), [item.name for item in self._rows.inputs]
        frozen = [each.name for each in wanted if each.shape and isinstance(each.shape[0], int)]
        if frozen:
            found = f"input {frozen[0]} has a fixed number of rows"
            raise ConfigurationError(self.where, [Problem(self.name, found, "a first axis without a fixed size")])
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
        numbers = [np.where(rows[i.name].valid, rows[i.name].data.astype(float), np.nan) for i in self._rows.inputs]
        return np.stack(numbers, 1).astype(np.float64 if kind == "tensor(double)" else np.float32)

    def _column(self, rows: Columns, wanted: Any) -> Array:
        values = rows[wanted.name]
        kind = _TYPES.get(wanted.type)
        if kind is None:
            expected = one_of(sorted(_TYPES))
            raise ConfigurationError(self.where, [Problem(f"input {wanted.name}", f"type {wanted.type}", expected)])
        if kind is object:
            column = np.where(values.valid, values.data, "").astype(object)
        elif np.dtype(kind).kind == "f":
            column = np.where(values.valid, values.data.astype(np.float64), np.nan).astype(kind)
        elif not values.valid.all():
            found = f"{int((~values.valid).sum())} nulls, for an input of type {wanted.type}"
            raise DataError(f"{self.where}: {wanted.name}", found, expected="a value in every row, or a float input")
        else:
            column = values.data.astype(kind)
        return column[:, None] if len(wanted.shape) == 2 else column


_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(string)": object,
}  # fmt: skip
_FLOATING = ("tensor(float)", "tensor(double)", "tensor(float16)")


class _StoredSource(PredictionSource):
    runtime = "a file of outputs"

    def __init__(self, declared: TeacherOutputs, rows: TeacherRows) -> None:
        super().__init__(rows)
        self.name, self._declared = declared.path, declared
        self.refuses = declared.missing == "refuse"

    def identity(self) -> Any:
        classes = None if self._declared.classes is None else list(self._declared.classes)
        return ["outputs", _digest(self._file(self._declared.path)), classes]

    def predict(self, rows: Columns) -> Prediction:  # noqa: ARG002 - it has no answer for any
        raise DataError(self.where, f"has outputs only for rows of {self.name}", expected="a teacher that can run",
                        remedy="declare a TeacherFunction or an Onnx to explain other rows")  # fmt: skip

    def predict_rows(self, rows: Index) -> Prediction:
        form, numbers, classes = self._stored
        places = self._places[rows]
        chosen = numbers[places]
        chosen[places < 0] = np.nan
        return Prediction(form, chosen, classes)

    @cached_property
    def _read(self) -> tuple[str, pa.Table]:
        spine = self._rows.spine
        types = {name: dtype for entity in spine.entities for name, dtype in entity.join_keys.items()}
        types["event_timestamp"] = UnixTimestamp
        source = spine_rows(self._file(self._declared.path), types)
        if absent := [name for name in types if name not in source.schema.names]:
            found = f"{self.name} lacks the column {', '.join(absent)}"
            raise DataError(self.where, found, expected=f"the columns {', '.join(types)} and one of outputs")
        outputs = [name for name in _COLUMNS if name in source.schema.names]
        if outputs == ["log_probabilities"] and not {"classes"} <= {*source.schema.names}:
            found = f"{self.name} has log_probabilities, and no column classes"
            raise DataError(self.where, found, expected="lists of class names beside the lists of numbers")
        if len(outputs) != 1:
            found = f"{self.name} has the columns {', '.join(source.schema.names)}"
            raise DataError(self.where, found, expected=f"one of {', '.join(_COLUMNS)}")
        wanted = [*types, *outputs, *(["classes"] if outputs == ["log_probabilities"] else [])]
        batches = [batch.select(wanted) for batch in source.batches()]
        table = pa.Table.from_batches(batches, schema=pa.schema([source.schema.field(name) for name in wanted]))
        try:
            keys = {name: cast(table, name, ARROW[types[name].name], 0) for name in types if name != "event_timestamp"}
            keys["event_timestamp"] = pa.chunked_array([pa.array(moments(table, 0))])
        except DataError as error:
            raise DataError(f"{self.where}: {self.name}", f"{error.where} {error.found}", expected=error.expected,
                            remedy=error.remedy) from None  # fmt: skip
        return outputs[0], pa.table({**keys, **{name: table[name] for name in wanted if name not in keys}})

    @cached_property
    def _places(self) -> Index:
        """The row of the file for each row of the training set, -1 if there is none."""
        _, stored = self._read
        ours, names = self._rows.table, stored.column_names[: stored.num_columns - 1]
        names = [name for name in names if name in stored.column_names and name not in _COLUMNS]
        left = {name: cast(ours, name, stored[name].type, 0) for name in names if name != "event_timestamp"}
        left["event_timestamp"] = pa.chunked_array([pa.array(moments(ours, 0))])
        numbered = pa.table({**left, "ours": np.arange(len(ours))})
        joined = numbered.join(stored.select(names).append_column("theirs", pa.array(np.arange(len(stored)))), names)
        if len(joined) > len(ours):
            twice = joined.group_by("ours").aggregate([("theirs", "count")])
            row = twice.filter(pc.greater(twice["theirs_count"], 1))["ours"][0].as_py()
            key = ", ".join(f"{name} {ours[name][row].as_py()}" for name in names)
            raise DataError(self.where, f"{self.name} has several rows for {key}", expected="one row for each example")
        places = np.full(len(ours), -1, np.int64)
        places[joined["ours"].to_numpy()] = pc.fill_null(joined["theirs"], -1).to_numpy()
        return places

    @cached_property
    def _stored(self) -> Prediction:
        name, table = self._read
        column = table[name].combine_chunks()
        listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or _fixed(column.type)
        if listed == (name == "values") and name in ("values", "log_probabilities"):
            expected = "a number for each row" if listed else "lists in a Parquet file"
            raise DataError(f"{self.where}: {name}", f"a column of type {column.type}", expected=expected)
        if not listed:
            try:
                numbers = pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                expected = "numbers, or lists of numbers in a Parquet file"
                raise DataError(f"{self.where}: {name}", str(error), expected=expected) from error
            return Prediction("values" if name == "values" else _form(name), numbers, self._declared.classes)
        if name == "log_probabilities":
            return self._top_k(column, table["classes"].combine_chunks())
        widths = pc.unique(pc.list_value_length(column).drop_null())
        if len(widths) != 1:
            raise DataError(f"{self.where}: {name}", f"lists of {len(widths)} lengths", expected="one number per class")
        numbers = np.full((len(column), widths[0].as_py()), np.nan)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        flat = pc.cast(column.drop_null().flatten(), pa.float64()).to_numpy(zero_copy_only=False)
        numbers[known] = flat.reshape(-1, numbers.shape[1])
        return Prediction(_form(name), numbers, self._declared.classes)

    def _top_k(self, column: pa.Array, names: pa.Array) -> Prediction:
        """Spread the mass that the k classes leave evenly over the classes that a row does not name."""
        lengths, theirs = (pc.list_value_length(each).to_numpy(zero_copy_only=False) for each in (column, names))
        if not np.array_equal(lengths, theirs, equal_nan=True):
            raise DataError(f"{self.where}: classes", "lists of other lengths than log_probabilities", expected="equal")
        codes = names.flatten().dictionary_encode()
        named = [str(name) for name in codes.dictionary.to_pylist()]
        classes = [*dict.fromkeys([*(self._rows.classes or ("0", "1")), *named])]
        counts = np.nan_to_num(lengths).astype(np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        mass = np.exp(pc.cast(column.flatten(), pa.float64()).to_numpy(zero_copy_only=False))
        numbers = np.zeros((len(counts), len(classes)))
        columns = np.array([classes.index(name) for name in named], np.int64)
        numbers[rows, columns[codes.indices.to_numpy(zero_copy_only=False)]] = mass
        others = len(classes) - counts
        rest = np.maximum(0.0, 1 - numbers.sum(1)) / np.maximum(others, 1)
        numbers = np.where(numbers > 0, numbers, rest[:, None])
        numbers[counts == 0] = np.nan
        return Prediction("probabilities", numbers, classes)


def _form(name: str) -> Form:
    return "logits" if name == "logits" else "probabilities"


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as content:
                sha.update(f"{file.relative_to(path)} {file.stat().st_size} ".encode())
                sha.update(hashlib.file_digest(content, "sha256").digest())
    return sha.hexdigest()


def sources(
    declared: Sequence[tuple[DeclaredTeacher, float]], rows: TeacherRows
) -> list[tuple[PredictionSource, float]]:
    """Create the source of predictions of each declared teacher, with its weight. Imports functions, loads no model."""
    return [(_source(teacher, rows), weight) for teacher, weight in declared]


def _source(declared: DeclaredTeacher, rows: TeacherRows) -> PredictionSource:
    if isinstance(declared, TeacherFunction):
        return _FunctionSource(declared, rows)
    return _OnnxSource(declared, rows) if isinstance(declared, Onnx) else _StoredSource(declared, rows)
