"""The reference of a text task: TF-IDF of words and a linear model, fitted to the labels."""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

_WORDS = r"(?u)\b\w\w+\b|^\W*(?:\w\W+)*\w?$"
"""The usual words of two letters and more. A text without one counts as a word, so that no vocabulary is empty."""


def classifier(features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    model = LogisticRegression(C=10, max_iter=1000)
    return _fitted(OneVsRestClassifier(model) if labels.ndim > 1 else model, features, labels)


def regression(features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    return _fitted(Ridge(alpha=1.0), features, labels)


def _fitted(model: Any, features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    words = TfidfVectorizer(sublinear_tf=True, max_features=50_000, token_pattern=_WORDS)
    read = ColumnTransformer([("words", words, features.columns[0])])
    return make_pipeline(read, model).fit(features.fillna(""), labels)
