"""Tests of the effect and of the definitions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from definitions import FOR_TEACHER, SPLIT
from painting import effect
from photographs import PHOTOGRAPHS

from isthmus.project import Project
from isthmus.tasks import split_by_value


def test_ink_is_where_dark_meets_light() -> None:
    image = torch.full((1, 3, 40, 60), 0.3)
    image[..., 30:] = 0.7
    row = effect(image)[0].mean(0)[20].numpy()
    assert row[20:30].min() < 0.15
    assert np.ptp(row[35:]) < 0.1


def test_the_student_has_drawings_of_the_rocket_alone() -> None:
    names = pa.chunked_array([[*PHOTOGRAPHS]])
    train = names.take(split_by_value(names, SPLIT).train)
    assert {*train.to_pylist()} == {*FOR_TEACHER, "rocket"}


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["effects"]
