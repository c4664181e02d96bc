"""Estimators in the style of scikit-learn as teachers."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.teacher import Teacher
from isthmus.features.errors import ConfigurationError, Problem

_LEAST = np.finfo(np.float32).tiny


class EstimatorTeacher(Teacher):
    """A fitted estimator: what has `predict_proba`, `decision_function` or `predict`.

    Keys: "probabilities" (rows, classes); "logits", their logarithm (no less than that of the smallest float32), of
    which the softmax gives them back, or without `predict_proba` what `decision_function` gives; "predictions", of
    `predict`. A batch is what these take; a tensor becomes an array.

    Args:
        estimator: fitted. It must not be fitted again.
        keys: the outputs that are asked for; by default the logits, or the predictions of what has no classes.
        version: changes the fingerprint where it cannot see a change by itself.
        name: for messages; by default that of the class.

    Raises:
        ConfigurationError: it cannot give a key.
    """

    def __init__(
        self, estimator: Any, keys: Sequence[str] | None = None, *, version: str = "", name: str | None = None
    ) -> None:
        methods = {
            "probabilities": ("predict_proba",),
            "logits": ("predict_proba", "decision_function"),
            "predictions": ("predict",),
        }
        able = [key for key, ways in methods.items() if any(hasattr(estimator, way) for way in ways)]
        if keys is None:
            keys = ["logits" if "logits" in able else "predictions"]
        classes = getattr(estimator, "classes_", None)
        # Of several targets it is a list of arrays; they are refused when they are asked for.
        labels = [str(label) for label in classes] if isinstance(classes, np.ndarray) else None
        super().__init__(name or type(estimator).__name__, keys, labels=labels, version=version)
        absent = [Problem(f"output {key}", f"it gives {', '.join(able) or 'nothing'}", key) for key in keys if
                  key not in able]  # fmt: skip
        if absent:
            raise ConfigurationError(self.where, absent)
        self.estimator = estimator

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Tensor):
            batch = batch.cpu().numpy()
        found: dict[str, Any] = {}
        sure = hasattr(self.estimator, "predict_proba")
        if sure and {"probabilities", "logits"} & set(self.keys):
            found["probabilities"] = self._array(self.estimator.predict_proba(batch))
            found["logits"] = np.log(np.maximum(found["probabilities"], _LEAST))
        elif "logits" in self.keys:
            found["logits"] = self._array(self.estimator.decision_function(batch))
        if "predictions" in self.keys:
            found["predictions"] = self._array(self.estimator.predict(batch))
        return found

    def _array(self, given: Any) -> np.ndarray[Any, Any]:
        if isinstance(given, list):
            found = f"a list of {len(given)} arrays: it has several targets"
            raise ConfigurationError(self.where, [Problem("outputs", found, "one target")])
        return np.asarray(given)

    @property
    def runtime(self) -> str:
        """The estimator's library."""
        library = type(self.estimator).__module__.partition(".")[0]
        return f"{library} {getattr(sys.modules[library], '__version__', '')}".strip()

    def _identity(self) -> Any:
        return ["estimator", fingerprint(self.estimator, versioned=bool(self.version))]
