"""Quality that a deployment loses against the package before it, and the rollback if it loses too much."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation.confidence import paired_loss
from isthmus.distill.gates import LOST, Gate, bounds_on
from isthmus.distill.types import Array
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.production import QualityLoss
from isthmus.features.values.columns import Mask
from isthmus.orchestration.models.release import undo
from isthmus.orchestration.monitoring.answers import PackageAnswers
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.served import ServedAnswers, predict_all
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.predict.model import DeployedModel

_PLACE = "place"
# Accepted probability, per look, of rolling back a deployment that is within its bound.
CHANCE = 1e-4


def deployment_losses(
    project: Project, declared: Distillation, deployment: Deployment | None, answers: PackageAnswers, labels: Array,
    chosen: Mask,
) -> tuple[QualityLoss, ...]:  # fmt: skip
    """Compute how much quality the deployed package loses against the previous one, for each declared loss bound.

    Runs the previous package on the stored rows of all labeled answers since the deployment. `answers` has the recorded
    answers, `labels` the label of each of their rows, and `chosen` the mask of labels that count. A loss has no value
    if there is no package to go back to, or too few labels. The result is empty if the distillation declares no loss
    bound, nothing is deployed, or `answers` come from another package or precision. Raise PackageError if the previous
    package is gone or damaged.
    """
    bounds = bounds_on(declared.bounds, LOST)
    if not bounds or deployment is None or (answers.package, answers.precision) != deployment.runtime_key[:2]:
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
        served = ServedAnswers(project)
        again = served.table.by_id(answers.part["id"].take(pa.array(places)))
        former[np.isin(answers.answer, places)] = rescore(served, again, DeployedModel(before))[:, 0]
    chosen &= np.isfinite(former)
    return tuple(_loss(bound, before, labels[chosen], answers.outputs[chosen, 0], former[chosen]) for bound in bounds)


def rescore(served: ServedAnswers, answers: pa.Table, model: DeployedModel) -> Array:
    """Run another model on the rows of recorded predictions, to compare it with the model that answered.

    An answer can have several rows. Return float64 (n, outputs of the model) for the n rows of all answers, in order. A
    row is NaN if its request cannot be read, or if its stored row, its contract or an input of `model` is missing.
    """
    count = answers["rows"].to_numpy().astype(np.int64)
    starts = np.cumsum(count) - count
    outputs = np.full((int(count.sum()), 1), np.nan)
    for part, group in served.predictions(answers.append_column(_PLACE, pa.array(np.arange(len(answers)))), model):
        if isinstance(group, IsthmusError):
            continue
        rows, known = group.served()
        scores = predict_all(model, group.inputs(rows)).reshape(len(known), -1)
        if outputs.shape[1] != scores.shape[1]:
            outputs = np.full((len(outputs), scores.shape[1]), np.nan)
        offset = np.arange(len(scores)) - group.starts[group.answer]
        places = starts[part[_PLACE].to_numpy()][group.answer] + offset
        outputs[places] = np.where(known[:, None], scores, np.nan)
    return outputs


def _loss(bound: Gate, before: Deployment, labels: Array, scores: Array, former: Array) -> QualityLoss:
    measure = bound.metric.partition(".")[2]
    most = bound.at_most or 0.0
    known = QualityLoss(measure=measure, at_most=most, former=before.digest, rows=len(labels))
    try:
        found = paired_loss(measure, labels, scores, former)
    except DataError:
        return known
    return msgspec.structs.replace(known, value=found.value, least=found.least(CHANCE))


def roll_back_if_worse(project: Project, deployment: Deployment, losses: Sequence[QualityLoss]) -> str:
    loss = next((loss for loss in losses if loss.beyond), None)
    if loss is None:
        return ""
    try:
        done = undo(project, deployment, describe_loss(loss))
    except IsthmusError as error:
        return f"{deployment.digest[:12]} could not be undone, although {describe_loss(loss)}: {error}"
    return f"{deployment.digest[:12]} was undone: {describe_loss(loss)}" if done else ""


def describe_loss(loss: QualityLoss) -> str:
    if not loss.former:
        return "no rollback possible: nothing was deployed before, it was itself restored, or `probation_seconds` is 0"
    against = f"against {loss.former[:12]} in the same {loss.rows:,} labeled answers"
    if loss.value is None or loss.least is None:
        return f"the loss of {loss.measure} {against} is not known"
    found = f"it loses {loss.value:.4g} of {loss.measure} {against}, at least {loss.least:.4g}"
    return f"{found}; the bound is {loss.at_most:g}"
