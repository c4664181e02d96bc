"""The reference of a text task: TF-IDF of words, other inputs and a linear model, fitted to the labels."""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

_WORDS = r"(?u)\b\w\w+\b|^\W*(?:\w\W+)*\w?$"
"""The usual words of two letters and more. A text without one counts as a word, so that no vocabulary is empty."""


def classifier(features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    model = LogisticRegression(C=10, max_iter=1000)
    return _fitted(OneVsRestClassifier(model) if labels.ndim > 1 else model, features, labels)


def regression(features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    return _fitted(Ridge(alpha=1.0), features, labels)


def _fitted(model: Any, features: pd.DataFrame, labels: "np.ndarray[Any, Any]") -> Any:
    """Fit a model to the text in the first column, and to all columns of numbers or categories."""
    words = TfidfVectorizer(preprocessor=_lower, sublinear_tf=True, max_features=50_000, token_pattern=_WORDS)
    numbers = make_pipeline(SimpleImputer(add_indicator=True, keep_empty_features=True), StandardScaler())
    read = ColumnTransformer(
        [
            ("words", words, features.columns[0]),
            ("numbers", numbers, make_column_selector(dtype_include="number")),
            ("categories", OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_include="category")),
        ]
    )
    return make_pipeline(read, model).fit(features, labels)


def _lower(text: str | None) -> str:
    return (text or "").lower()
