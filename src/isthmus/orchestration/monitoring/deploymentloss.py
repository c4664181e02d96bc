"""Quality that a deployment loses against the package before it, and the rollback if it loses too much."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation.confidence import lost
from isthmus.distill.gates import LOST, Gate, bounds_on
from isthmus.distill.types import Array
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.production import QualityLoss
from isthmus.features.values.columns import Mask
from isthmus.orchestration.models.release import undo
from isthmus.orchestration.monitoring.answers import PackageAnswers
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.predictions import read
from isthmus.orchestration.recording.provenance import Origins, groups, predict_all
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.predict.model import DeployedModel

_PLACE = "place"
# Accepted probability, per look, of rolling back a deployment that is within its bound.
CHANCE = 1e-4


def losses(
    project: Project, declared: Distillation, deployment: Deployment | None, answers: PackageAnswers, labels: Array,
    chosen: Mask,
) -> tuple[QualityLoss, ...]:  # fmt: skip
    """Compute what the current deployment loses of each bounded measure; empty if the answers are not its own.

    The previous package is run on everything answered since the deployment, with the same stored rows, and both are
    compared row by row. Rows that are hard for both do not add noise, and drift that hurts both does not count as a
    loss.

    `answers` has n rows, `labels` their labels, shape (n,), and `chosen` the rows whose labels count, shape (n,).

    Raises:
        PackageError: the previous package is gone or damaged.
    """
    bounds = bounds_on(declared.bounds, LOST)
    if not bounds or deployment is None or (answers.package, answers.precision) != deployment.runs[:2]:
        return ()
    if deployment.probation is None:
        return tuple(
            QualityLoss(measure=bound.metric.partition(".")[2], at_most=bound.at_most or 0.0) for bound in bounds
        )
    before = deployment.probation.before
    since = pa.scalar(deployment.deployed_at, pa.int64()).cast(answers.part["written"].type)
    chosen = chosen & pc.greater_equal(answers.part["written"], since).to_numpy()[answers.answer]
    former = np.full(len(chosen), np.nan)
    if chosen.any():
        places = np.unique(answers.answer[chosen])
        former[np.isin(answers.answer, places)] = _scores_before(
            project, answers.part["id"].take(pa.array(places)), before
        )
    chosen &= np.isfinite(former)
    return tuple(_loss(bound, before, labels[chosen], answers.outputs[chosen, 0], former[chosen]) for bound in bounds)


def _scores_before(project: Project, ids: pa.ChunkedArray, before: Deployment) -> Array:
    answers = RecordedAnswers.of(project).named(ids)
    return rescore(Origins(project), answers, DeployedModel(before))[:, 0]


def rescore(origins: Origins, answers: pa.Table, model: DeployedModel) -> Array:
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


def _loss(bound: Gate, before: Deployment, labels: Array, scores: Array, former: Array) -> QualityLoss:
    measure = bound.metric.partition(".")[2]
    most = bound.at_most or 0.0
    known = QualityLoss(measure=measure, at_most=most, former=before.digest, rows=len(labels))
    try:
        found = lost(measure, labels, scores, former)
    except DataError:
        return known
    return msgspec.structs.replace(known, value=found.value, least=found.least(CHANCE))


def take_back(project: Project, deployment: Deployment, found: Sequence[QualityLoss]) -> str:
    """Roll back a deployment that loses more than allowed.

    Returns a sentence that says so or why the rollback failed, or "" if no loss exceeds its bound.
    """
    loss = next((loss for loss in found if loss.beyond), None)
    if loss is None:
        return ""
    try:
        done = undo(project, deployment, describe_loss(loss))
    except IsthmusError as error:
        return f"{deployment.digest[:12]} could not be undone, although {describe_loss(loss)}: {error}"
    return f"{deployment.digest[:12]} was undone: {describe_loss(loss)}" if done else ""


def describe_loss(loss: QualityLoss) -> str:
    """Describe a loss."""
    if not loss.former:
        return "no rollback possible: nothing was deployed before, it was itself restored, or `probation_seconds` is 0"
    against = f"against {loss.former[:12]} in the same {loss.rows:,} labeled answers"
    if loss.value is None or loss.least is None:
        return f"the loss of {loss.measure} {against} is not known"
    found = f"it loses {loss.value:.4g} of {loss.measure} {against}, at least {loss.least:.4g}"
    return f"{found}; the bound is {loss.at_most:g}"
