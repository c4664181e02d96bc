"""Tests of frames, of the effect and of the definitions."""

from pathlib import Path

import numpy as np
import torch
from painting import effect
from photographs import PAN, SIDE, cut, digest, photograph, places

from isthmus.project import Project


def test_a_frame_is_known_by_its_pixels() -> None:
    image = photograph("coffee")
    frame, neighbor = cut(image, 10, 20), cut(image, 10 + PAN[0], 20 + PAN[1])
    assert frame.shape == (SIDE, SIDE, 3)
    assert digest(frame) == digest(frame.copy()) != digest(neighbor)


def test_every_frame_has_a_neighbor() -> None:
    corners = list(places("rocket"))
    assert {(x + PAN[0], y + PAN[1]) for x, y in corners[::2]} == set(corners[1::2])


def test_ink_is_where_dark_meets_light() -> None:
    image = torch.full((1, 3, 40, 60), 0.3)
    image[..., 30:] = 0.7
    row = effect(image)[0].mean(0)[20].numpy()
    assert row[20:30].min() < 0.15
    assert np.ptp(row[35:]) < 0.1


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["effects"]
