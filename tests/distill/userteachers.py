"""Teachers as users write them, for tests: each function is named in a declaration."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

CALLS: list[int] = []
"""The number of rows of each call of a teacher."""
FAILS: list[bool] = []
FILE = Path("weights.txt")


def known(features: Any) -> Any:
    """Leave out the features without a value, which scikit-learn's boosting refuses."""
    return features.drop(columns=["empty", "silent"])


def fitted(features: Any, labels: Any) -> Any:
    model = HistGradientBoostingClassifier(max_iter=20, categorical_features="from_dtype", random_state=0)
    return make_pipeline(FunctionTransformer(known), model).fit(features, labels)


def fitted_numbers(features: Any, labels: Any) -> Any:
    model = HistGradientBoostingRegressor(categorical_features="from_dtype", random_state=0)
    return make_pipeline(FunctionTransformer(known), model).fit(features, labels)


def unfittable(features: Any, labels: Any) -> Any:
    return HistGradientBoostingClassifier().fit(features[["empty"]], labels)


def pipeline(features: Any, labels: Any) -> Any:
    texts = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["carrier"]), remainder="drop")
    return make_pipeline(texts, LogisticRegression()).fit(features, labels)


def ideal(features: Any) -> Any:
    """The probability from which the labels are drawn, where the inputs are known."""
    distance, secret = features["distance"].fillna(800.0), features["secret"]
    logit = (distance - 800) / 300 + (features["hour"] > 12) + (features["carrier"] == "AA") + secret - 1
    return 1 / (1 + np.exp(-logit.to_numpy()))


class Service:
    """A model behind a service, which counts its calls."""

    def predict(self, features: Any) -> Any:
        CALLS.append(len(features))
        if FAILS:
            raise ConnectionError("the service is down")
        return ideal(features)


def service() -> Any:
    return Service()


def counted() -> Any:
    """A function of its own that counts its calls and does not fail."""

    def answer(features: Any) -> Any:
        CALLS.append(len(features))
        return ideal(features)

    return answer


def abstains() -> Any:
    """Does not answer in the morning."""
    return lambda features: np.where(features["hour"] < 6, np.nan, ideal(features))


def names() -> Any:
    """Names a class, as a language model does, and refuses a part."""

    def answer(features: Any) -> list[str | None]:
        late = features["secret"].to_numpy()
        return [None if value > 2 else ("early", "on time", "late")[np.digitize(value, (0, 1.0))] for value in late]

    return answer


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LazyLinear(1)).eval()


def too_many(features: Any, labels: Any, more: Any) -> Any:
    return features, labels, more


def percent() -> Any:
    return lambda features: 100 * ideal(features)


def nothing() -> Any:
    return 3


def unnamed() -> Any:
    return lambda features: np.full((len(features), 3), 1 / 3)


def late_names() -> Any:
    return lambda features: [None, np.nan, "late"][: len(features)]


def late_lists() -> Any:
    return lambda features: ([None, None, [0.2, 0.7, 0.1]][: len(features)], ["early", "late", "on time"])


class Reversed:
    classes_ = (1, 0)

    def predict_proba(self, features: Any) -> Any:
        return np.stack([ideal(features), 1 - ideal(features)], 1)


def reversed_classes() -> Any:
    return Reversed()


def unseeded(features: Any, labels: Any) -> Any:
    """Draws its weights from NumPy's own generator, as scikit-learn does without a random_state."""
    weights = np.random.rand(1)[0]
    return lambda rows: np.clip(ideal(rows) * weights, 0, 1)
