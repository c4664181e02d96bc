"""Predictions of a model that a user's function builds: scikit-learn, XGBoost, LightGBM, torch, or a service."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from isthmus.distill.language.teachers import TeacherFunction, function_of
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tabular.users.sources import IMAGE, PredictionSource, TeacherRows, digest, numbers, to_floats
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, IsthmusError, Problem, one_of

if TYPE_CHECKING:
    import pandas as pd


class FunctionSource(PredictionSource):
    runtime = "Python"
    costly = True

    def __init__(self, declared: TeacherFunction, rows: TeacherRows) -> None:
        super().__init__(declared.function, declared.missing, rows)
        self._declared = declared
        self._function = _imported(declared.function, self.where)
        self._fits = len(_required(self._function))
        if self._fits not in ((0, 2) if len(rows.labels) else (0,)):
            found, labels = f"takes {self._fits} arguments", ", or features and labels" if len(rows.labels) else ""
            raise ConfigurationError(self.where, [Problem("function", found, f"no argument{labels}")])

    def identity(self) -> Any:
        version = self._declared.version
        files = {name: digest(self._file(name)) for name in self._declared.files}
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
        except Exception as error:  # the user's code or a service may raise anything
            raise DependencyError(
                self.where, f"{what} raised {type(error).__name__}: {error}",
                remedy="correct the function and run the same command again: outputs so far are cached",
            ) from error  # fmt: skip

    @cached_property
    def _categories(self) -> Mapping[str, Array]:
        """The texts of each feature in the training part, sorted: the categories of its column."""
        texts = [item.name for item in self._rows.inputs if item.is_category and item.name not in self._rows.texts]
        known = {name: pc.unique(self._rows.table[name].take(self._rows.train)).drop_null() for name in texts}
        return {name: np.sort(values.to_numpy(zero_copy_only=False)) for name, values in known.items()}

    def _frame(self, rows: Columns) -> "pd.DataFrame | Array":
        import pandas as pd

        if self._rows.images is not None:
            return rows[IMAGE].data
        frame: dict[str, Any] = {}
        for item in self._rows.inputs:
            values = rows[item.name]
            if item.is_category:
                texts = values.data.astype(object)
                texts[~values.valid] = None
                known = self._categories.get(item.name)
                frame[item.name] = texts if known is None else pd.Categorical(texts, categories=known)
            else:
                frame |= dict(zip(item.elements, numbers(item, values).T, strict=True))
        return pd.DataFrame(frame)

    def _predicted(self, model: Any, frame: "pd.DataFrame | Array") -> Prediction:
        """Predict with the first of `predict_proba`, `decision_function`, `predict` and a call that the model has."""
        known = getattr(model, "classes_", None)
        names = None if known is None else [str(name) for name in np.ravel(np.asarray(known, dtype=object))]
        if self._rows.several and (known is None or not all(isinstance(name, str) for name in known)):
            # Models of scikit-learn number the columns of their labels.
            names = [*(self._rows.classes or ())] if self._fits else None
        if isinstance(model, nn.Module):
            return self._forward(model, frame, names)
        if hasattr(model, "predict_proba"):
            output = model.predict_proba(frame)
            if self._rows.several and isinstance(output, list):  # an array (n, 2) per class
                output = np.stack([each[:, 1] for each in output], 1)
            return Prediction("probabilities", to_floats(output, self.where), names)
        if hasattr(model, "decision_function"):
            return Prediction("logits", to_floats(model.decision_function(frame), self.where), names)
        predict = getattr(model, "predict", model)
        if not callable(predict):
            expected = "predict_proba, decision_function, predict, or a function"
            raise ConfigurationError(self.where, [Problem("model", f"a {type(model).__name__}", expected)])
        output = predict(frame)
        if isinstance(output, tuple) and len(output) == 2:
            output, names = output[0], [str(name) for name in output[1]]
        several = getattr(output, "ndim", 1) > 1 and output.dtype.kind == "f"
        listed = output.tolist() if hasattr(output, "tolist") and not several else output
        if isinstance(listed, list):
            listed = [None if _is_missing(each) else each for each in listed]
            given = [name for each in listed for name in self._names(each)]
            named = any(isinstance(name, str) for name in given)
            if named or (self._rows.classes and listed and all(name is None for name in given)):
                return self._one_hot(listed)
            output = _filled(listed)
        return Prediction("values" if self._rows.numeric else "probabilities", to_floats(output, self.where), names)

    def _forward(self, network: nn.Module, frame: "pd.DataFrame | Array", names: Sequence[str] | None) -> Prediction:
        texts = [name for name in self._categories if self._rows.images is None]
        if texts:
            expected = "features that are numbers, or a function that prepares the texts"
            raise ConfigurationError(self.where, [Problem("features", f"{', '.join(texts)} are texts", expected)])
        if network.training:
            raise ConfigurationError(self.where, [Problem("network", "is in training mode", "network.eval()")])
        with torch.inference_mode():
            output = network(torch.from_numpy(np.asarray(frame, np.float32)))
        if isinstance(output, tuple) and len(output) == 2:
            output, names = output[0], [str(name) for name in output[1]]
        return Prediction(
            "values" if self._rows.numeric else "logits", to_floats(output.cpu().numpy(), self.where), names
        )

    def _one_hot(self, answers: Sequence[Any]) -> Prediction:
        """Convert class names, or lists of them, to probabilities of 0 and 1; None becomes a row without an answer."""
        classes = [*(self._rows.classes or ("0", "1"))]
        places = {name: place for place, name in enumerate(classes)}
        known = {row: [*map(str, self._names(answer))] for row, answer in enumerate(answers) if answer is not None}
        if unknown := sorted({name for names in known.values() for name in names} - {*classes}):
            raise DataError(f"{self.where}: classes", f"{unknown[0]!r}", expected=one_of(classes))
        numbers = np.full((len(answers), len(classes)), np.nan)
        for row, names in known.items():
            numbers[row] = 0
            numbers[row, [places[name] for name in names]] = 1
        return Prediction("probabilities", numbers, classes)

    def _names(self, answer: Any) -> Sequence[Any]:
        return answer if self._rows.several and isinstance(answer, list) else [answer]

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
