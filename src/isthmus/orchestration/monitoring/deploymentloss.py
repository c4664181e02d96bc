"""What a deployment loses of its production quality beside the one before it, and the way back from it."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import LOST, Distillation, Gate
from isthmus.distill.evaluation.paired import lost
from isthmus.distill.types import Array
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.production import Loss
from isthmus.features.values.columns import Mask
from isthmus.orchestration.models.release import undo
from isthmus.orchestration.monitoring.answers import Answered
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.predictions import read
from isthmus.orchestration.recording.provenance import Origins, groups, predict_all
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.predict.model import Model

_PLACE = "place"
CHANCE = 1e-4
"""How likely it may be, at one look, that a deployment is undone which loses no more than it may."""


def losses(
    project: Project, declared: Distillation, deployment: Deployment | None, answers: Answered, labels: Array,
    chosen: Mask,
) -> tuple[Loss, ...]:  # fmt: skip
    """What the deployment in force loses of each measure that has a bound; nothing if these answers are another's.

    The package before it is asked what was answered since the deployment, with the same stored rows, and both are
    compared row by row. So what is hard for both is no noise, and a world that changes for both is no loss.

    `answers` are n rows of a package in a precision, `labels` theirs, shape (n,), and `chosen` the rows whose labels
    count, shape (n,).

    Raises:
        PackageError: the package before it is gone, or damaged.
    """
    bounds = [bound for bound in declared.bounds if bound.metric.startswith(f"{LOST}.")]
    if not bounds or deployment is None or (answers.package, answers.precision) != deployment.runs[:2]:
        return ()
    if deployment.probation is None:
        return tuple(Loss(measure=bound.metric.partition(".")[2], at_most=bound.at_most or 0.0) for bound in bounds)
    before = deployment.probation.before
    since = pa.scalar(deployment.deployed_at, pa.int64()).cast(answers.part["written"].type)
    chosen = chosen & pc.greater_equal(answers.part["written"], since).to_numpy()[answers.answer]
    former = np.full(len(chosen), np.nan)
    if chosen.any():
        places = np.unique(answers.answer[chosen])
        former[np.isin(answers.answer, places)] = _asked(project, answers.part["id"].take(pa.array(places)), before)
    chosen &= np.isfinite(former)
    return tuple(_loss(bound, before, labels[chosen], answers.outputs[chosen, 0], former[chosen]) for bound in bounds)


def _asked(project: Project, ids: pa.ChunkedArray, before: Deployment) -> Array:
    """What the model of a deployment says to recorded predictions, row by row."""
    answers = RecordedAnswers.of(project).named(ids)
    return rescore(Origins(project), answers, Model(before))[:, 0]


def rescore(origins: Origins, answers: pa.Table, model: Model) -> Array:
    """Return the model's outputs for every row of recorded predictions, in order: float64 (n, width).

    A row is NaN if it cannot be computed: its stored row is not in the history, its request cannot be read or lacks an
    input of this model, or its contract is gone.
    """
    count = answers["rows"].to_numpy().astype(np.int64)
    starts = np.cumsum(count) - count
    outputs = np.full((int(count.sum()), 1), np.nan)
    for group in groups(answers.append_column(_PLACE, pa.array(np.arange(len(answers))))):
        try:
            part = read(origins, group, model)
        except IsthmusError:
            continue
        rows = part.requests.rows
        scores = predict_all(model, part.inputs(part.served)).reshape(len(part.known), -1)
        if outputs.shape[1] != scores.shape[1]:
            outputs = np.full((len(outputs), scores.shape[1]), np.nan)
        places = np.repeat(starts[group[_PLACE].to_numpy()], rows)
        offset = np.arange(len(scores)) - np.repeat(np.cumsum(rows) - rows, rows)
        outputs[places + offset] = np.where(part.known[:, None], scores, np.nan)
    return outputs


def _loss(bound: Gate, before: Deployment, labels: Array, scores: Array, former: Array) -> Loss:
    measure = bound.metric.partition(".")[2]
    most = bound.at_most or 0.0
    known = Loss(measure=measure, at_most=most, former=before.digest, rows=len(labels))
    try:
        found = lost(measure, labels, scores, former)
    except DataError:
        return known
    return msgspec.structs.replace(known, value=found.value, least=found.least(CHANCE))


def take_back(project: Project, deployment: Deployment, found: Sequence[Loss]) -> str:
    """Undoes a deployment that loses more than it may; says that, or why it cannot be done; "" if it loses no more."""
    loss = next((loss for loss in found if loss.beyond), None)
    if loss is None:
        return ""
    try:
        done = undo(project, deployment, said(loss))
    except IsthmusError as error:
        return f"{deployment.digest[:12]} is not undone, though {said(loss)}: {error}"
    return f"{deployment.digest[:12]} was undone: {said(loss)}" if done else ""


def said(loss: Loss) -> str:
    """A loss in words."""
    if not loss.former:
        return "no way back: nothing was deployed before it, or it was gone back to, or `probation_seconds` is 0"
    beside = f"beside {loss.former[:12]} in the same {loss.rows:,} labelled answers"
    if loss.value is None or loss.least is None:
        return f"what it loses of {loss.measure} {beside} is not known"
    found = f"it loses {loss.value:.4g} of {loss.measure} {beside}, {loss.least:.4g} at the least"
    return f"{found}; it may lose {loss.at_most:g}"
