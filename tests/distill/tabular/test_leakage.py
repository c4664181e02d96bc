"""Inputs that say the label: against every pair of rows, and before anything learns from them."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.tabular.leakage import FEW, separation_auc
from isthmus.features.errors import DataError
from isthmus.features.types import Array, Bytes, Float32, Float64, Int64, String
from isthmus.features.values.columns import from_python
from tests.distill.support import run

ROWS = st.lists(st.tuples(st.none() | st.integers(0, 5), st.integers(0, 1)), min_size=60, max_size=90)


def naively(scores: list[int], labels: list[int]) -> float:
    """The share of pairs of a one and a zero that the scores order, either way; a tie is half of one."""
    ones, zeros = ([score for score, label in zip(scores, labels, strict=True) if label == one] for one in (1, 0))
    if min(len(ones), len(zeros)) < FEW:
        return 0.5
    right = sum((a > b) + (a == b) / 2 for a in ones for b in zeros) / (len(ones) * len(zeros))
    return max(right, 1 - right)


@given(ROWS)
def test_numbers_are_ordered_as_all_pairs_say(rows: list[tuple[int | None, int]]) -> None:
    values, labels = [value for value, _ in rows], [label for _, label in rows]
    kept = [(value, label) for value, label in rows if value is not None]
    ordered = naively([value for value, _ in kept], [label for _, label in kept])
    absent = naively([int(value is None) for value in values], labels)
    assert separation_auc(from_python(values, Int64), np.array(labels)) == pytest.approx(
        max(ordered, absent), abs=1e-12
    )


def test_a_text_says_the_label_by_its_share_and_a_key_does_not() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 1000)
    assert separation_auc(from_python([["on time", "late"][label] for label in labels], String), labels) == 1
    noisy = [["on time", "late"][label] if place % 9 else "on time" for place, label in enumerate(labels)]
    assert 0.9 < separation_auc(from_python(noisy, String), labels) < 0.99
    assert separation_auc(from_python([f"row {place}" for place in range(1000)], String), labels) == 0.5
    assert separation_auc(from_python([None] * 1000, String), labels) == 0.5
    assert separation_auc(from_python([[b"on time", b"\xff"][label] for label in labels], Bytes), labels) == 1


def test_an_array_says_the_label_only_by_not_being_there() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 1000)
    vectors = from_python([[float(label), 1.0] for label in labels], Array(Float32))
    assert separation_auc(vectors, labels) == 0.5
    assert separation_auc(from_python([[1.0] if label else None for label in labels], Array(Float32)), labels) == 1


def test_one_long_text_does_not_make_all_rows_long() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 20_000)
    texts = from_python(["x" * 1_000_000, *(f"{n % 7}" for n in range(1, len(labels)))], String)
    tracemalloc.start()
    separation_auc(texts, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert (
        separation_auc(from_python([float(label) if label else float("nan") for label in labels], Float64), labels) == 1
    )


@pytest.mark.parametrize("feature", ["distance", "secret"], ids=["of the student", "of the teacher alone"])
def test_what_is_known_only_after_the_label_is_refused(table: pa.Table, tmp_path: Path, feature: str) -> None:
    """A delay, of which being late is what it means, for those that arrived."""
    draw, late = np.random.default_rng(1), table["late"].to_numpy()
    delay = np.where(late == 1, 15 + draw.exponential(20, len(late)), 15 - draw.exponential(20, len(late)))
    place, notes = table.column_names.index(feature), list[str]()
    leaking = table.set_column(place, feature, pa.array(delay, table[feature].type, mask=draw.random(len(late)) < 0.1))
    with pytest.raises(
        DataError, match=rf"late: inputs: {feature} orders the labels .* AUC of 1\.0000; .*Remove inputs"
    ):
        run(tmp_path, leaking, notes=notes)
    assert not any("teacher outputs" in note for note in notes)
    assert not (tmp_path / "models").exists()
