"""Teachers that are estimators in the style of scikit-learn."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.teacher import LEAST, Teacher
from isthmus.features.errors import ConfigurationError, Problem


class EstimatorTeacher(Teacher):
    """A teacher that is a fitted estimator with `predict_proba`, `decision_function` or `predict`.

    Possible keys:

    * "probabilities": `predict_proba`, (rows, classes);
    * "logits": the logarithm of the probabilities, clipped at the smallest normal float32; without `predict_proba`,
      the `decision_function`;
    * "predictions": `predict`.

    A batch is the argument of these methods; a tensor is converted to an array. The default key is "logits", or
    "predictions" for an estimator without classes; the default name is the class name. Do not fit the estimator again.

    Raises a ConfigurationError if the estimator cannot compute a key.
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
        # With several targets this is a list, which `_array` rejects.
        labels = [str(label) for label in classes] if isinstance(classes, np.ndarray) else None
        super().__init__(name or type(estimator).__name__, keys, labels=labels, version=version)
        self._require_outputs(able)
        self.estimator = estimator

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Tensor):
            batch = batch.cpu().numpy()
        outputs: dict[str, Any] = {}
        if hasattr(self.estimator, "predict_proba") and {"probabilities", "logits"} & set(self.keys):
            outputs["probabilities"] = self._array(self.estimator.predict_proba(batch))
            outputs["logits"] = np.log(np.maximum(outputs["probabilities"], LEAST))
        elif "logits" in self.keys:
            outputs["logits"] = self._array(self.estimator.decision_function(batch))
        if "predictions" in self.keys:
            outputs["predictions"] = self._array(self.estimator.predict(batch))
        return outputs

    def _array(self, output: Any) -> np.ndarray[Any, Any]:
        if isinstance(output, list):
            problem = Problem("outputs", f"a list of {len(output)} arrays, one per target", "a single target")
            raise ConfigurationError(self.where, [problem])
        return np.asarray(output)

    @property
    def runtime(self) -> str:
        library = type(self.estimator).__module__.partition(".")[0]
        return f"{library} {getattr(sys.modules[library], '__version__', '')}".strip()

    def _identity(self) -> Any:
        return ["estimator", fingerprint(self.estimator, versioned=bool(self.version))]
