from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from isthmus.distill.dataset import tensors
from isthmus.distill.device import resolve
from isthmus.distill.preparation import Prepare, compiled
from isthmus.distill.student import Student
from isthmus.distill.train import Examples, train
from isthmus.features.errors import DependencyError, GateFailed
from isthmus.features.profiles import TrainingProfile
from tests.distill.support import HOUR, PROFILE, STUDENT, declaration, learn, training_set


def student_and_examples(seed: int = 0) -> tuple[Student, Examples]:
    table = training_set(600)
    data = tensors(table, STUDENT)
    labels = torch.from_numpy(table["late"].to_numpy().copy()).float()
    numbers, places = map(torch.from_numpy, prepare()(data))
    return Student(prepare(), (8,), 0.1, seed), Examples(numbers, places, labels, 4 * labels - 2)


@cache
def prepare() -> Prepare:
    learned = learn(training_set(600))(declaration().plan(STUDENT), 600 * HOUR)
    return Prepare(learned, compiled(learned))


def fitted(profile: TrainingProfile = PROFILE, **changes: object) -> tuple[dict[str, torch.Tensor], list[str]]:
    student, examples = student_and_examples()
    notes: list[str] = []
    train(student, examples, examples, declaration(**changes), profile, lambda text, _done: notes.append(text))
    return student.state_dict(), notes


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_same_seed_gives_the_same_bits_whatever_ran_before() -> None:
    first, _ = fitted()
    torch.rand(3)
    assert same(first, fitted()[0])
    assert not same(first, fitted(seed=1)[0])
    assert not same(first, fitted(soft_weight=0.0)[0])


def test_training_leaves_the_global_state_alone() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    fitted()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_the_profile_is_obeyed() -> None:
    threads: set[int] = set()
    student, examples = student_and_examples()
    profile = TrainingProfile(epochs=3, batch=8192, threads=2)
    train(student, examples, examples, declaration(), profile, lambda *_: threads.add(torch.get_num_threads()))
    assert threads == {2}
    _, notes = fitted(profile)
    assert [note.split(":")[0] for note in notes] == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]
    assert not same(fitted(replace(PROFILE, batch=96))[0], fitted()[0])


def test_the_best_epoch_is_kept() -> None:
    student, examples = student_and_examples()
    # Validation labels against the training labels: every epoch is worse than the one before.
    against = replace(examples, labels=1 - examples.labels)
    epochs = train(student, examples, against, declaration(), TrainingProfile(epochs=4, batch=64), lambda *_: None)
    best = int(np.argmax([epoch["validation_auc"] for epoch in epochs]))
    other, _ = student_and_examples()
    steps: list[dict[str, torch.Tensor]] = []
    train(
        other,
        examples,
        against,
        declaration(),
        TrainingProfile(epochs=4, batch=64),
        lambda *_: steps.append({name: value.clone() for name, value in other.state_dict().items()}),
    )
    assert best < 3
    assert same(student.state_dict(), steps[best])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_weights() -> None:
    student, examples = student_and_examples()
    before = {name: value.clone() for name, value in student.state_dict().items()}
    examples.teacher[5] = torch.inf
    examples.teacher[6] = torch.nan
    with pytest.raises(GateFailed, match=r"step \d+ of 40, epoch 1: loss is nan.*Lower learning_rate"):
        train(student, examples, examples, declaration(), PROFILE, lambda *_: None)
    assert same(before, student.state_dict())


def test_cuda_trains_or_is_said_to_be_missing() -> None:
    if torch.cuda.is_available():
        assert resolve(replace(PROFILE, device="auto"))[0].type == "cuda"
        assert not same(fitted(replace(PROFILE, device="cuda"))[0], fitted(replace(PROFILE, epochs=1))[0])
        return
    with pytest.raises(DependencyError, match="torch sees no CUDA device") as raised:
        fitted(replace(PROFILE, device="cuda"))
    assert 'device = "cpu"' in raised.value.remedy
    assert resolve(replace(PROFILE, device="auto"))[0].type == "cpu"


def test_bf16_trains_or_is_said_to_be_missing() -> None:
    profile = replace(PROFILE, precision="bf16")
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert not same(fitted(profile)[0], fitted()[0])
    else:
        with pytest.raises(DependencyError, match='Set precision = "fp32"'):
            fitted(profile)
