from typing import Any

import pytest
import torch
from torch import nn

from isthmus.distill.losses.initialization import Choice
from isthmus.features.errors import ConfigurationError
from isthmus.losses import drop_layers


def layers(count: int, width: int = 8) -> nn.ModuleList:
    made = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16, batch_first=True) for _ in range(count))
    with torch.no_grad():
        for number, layer in enumerate(made):
            for parameter in layer.parameters():
                parameter.normal_().add_(number)
    return made


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("choice", "indexes"),
    [("first", [0, 1, 2]), ("last", [3, 4, 5]), (2, [0, 2, 4]), (1, [0, 1, 2]), ([5, 0, 5], [5, 0, 5])],
)
def test_the_chosen_layers_are_copied_in_order(choice: Choice, indexes: list[int]) -> None:
    teacher, student = layers(6), layers(3)
    report = drop_layers(teacher, student, choice)
    for place, index in enumerate(indexes):
        assert same(student[place], teacher[index])
        copied = report[place]
        assert (copied.student, copied.teacher) == (f"layer {place}", f"layer {index}")
        assert copied.tensors == len(list(teacher[index].parameters()))
        assert copied.numbers == sum(parameter.numel() for parameter in teacher[index].parameters())
    assert len(report) == len(indexes)
    with torch.no_grad():
        next(student[0].parameters()).zero_()
    assert not same(student[0], teacher[indexes[0]])


def test_the_student_answers_as_a_teacher_of_those_layers() -> None:
    teacher, student = layers(4), layers(2)
    drop_layers(teacher, student, [1, 3])
    tokens = torch.randn(2, 5, 8)
    expected = teacher[3].eval()(teacher[1].eval()(tokens))
    torch.testing.assert_close(student[1].eval()(student[0].eval()(tokens)), expected)


def test_pairs_are_copied_too_and_keep_the_student_s_type() -> None:
    theirs, ours = nn.Embedding(10, 8), nn.Embedding(10, 8).half()
    norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    norms[0].running_mean = torch.arange(8.0)
    report = drop_layers(layers(2), layers(1), "last", pairs={"embeddings": (theirs, ours), "norm": norms})
    assert torch.equal(ours.weight, theirs.weight.half())
    assert same(*norms)
    assert [(copied.student, copied.tensors) for copied in report] == [("layer 0", 12), ("embeddings", 1), ("norm", 5)]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([0, 1], "2 layers; expected 3"),
        ([0, 1, 6], "layer 6; expected the teacher's layers 0 to 5"),
        ([-1, 0, 1], "layer -1"),
        (3, "layer 6; expected"),
        (0, "every 0th layer; expected a number above 0"),
        ("middle", '"middle"|\'middle\'; expected "first", "last"'),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        drop_layers(layers(6), layers(3), choice)


@pytest.mark.parametrize("choice", ["first", "last", 1])
def test_a_student_of_more_layers_is_refused(choice: Choice) -> None:
    with pytest.raises(ConfigurationError, match="expected the teacher's layers 0 to 1"):
        drop_layers(layers(2), layers(3), choice)


def test_other_widths_are_refused_with_every_tensor_and_nothing_is_copied() -> None:
    teacher, student = layers(2), nn.ModuleList([*layers(1), *layers(1, width=4)])
    before = [tensor.clone() for tensor in student.state_dict().values()]
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {"head": (nn.Linear(8, 2, bias=False), nn.Linear(8, 2))}
    with pytest.raises(ConfigurationError) as refusal:
        drop_layers(teacher, student, "first", pairs=pairs)
    problems = {problem.where: (problem.found, problem.expected) for problem in refusal.value.problems}
    assert problems["layer 1: linear1.weight"] == ("(16, 8) in the teacher", "(16, 4), as in the student")
    assert problems["head: bias"] == ("absent in the teacher", "(2,), as in the student")
    assert not any(where.startswith("layer 0") for where in problems)
    after = student.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
