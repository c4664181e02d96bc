"""Drift of a package's recent inputs and scores from its training set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import Array
from isthmus.features.contract.schema import Column
from isthmus.features.days import DAY
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.production import InputDrift
from isthmus.features.quality.drift import drift, windows
from isthmus.features.quality.statistics import SAMPLE, FeatureStatistics, measure
from isthmus.features.types import Float64
from isthmus.features.values.arrow import micros, to_arrow
from isthmus.features.values.columns import Values
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.monitoring.answers import PackageAnswers
from isthmus.orchestration.monitoring.labels import EVENT
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.served import Group, ServedAnswers, predict_all
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import open_package

# Compared answers: the last week that has any.
WINDOW = 7 * DAY
SCORE = "score"


def served_drift(
    project: Project, declared: Distillation, folder: Path, answered: PackageAnswers
) -> tuple[int, tuple[InputDrift, ...]]:
    """Measure how far the recent inputs and scores of a package have drifted from its training set.

    Compares the answers of the week up to the latest answer with the training set of the package in `folder`, with at
    most 65,536 rows of each. Answers under another contract than the latest one's are left out. Drift is judged against
    the usual variation between parts of the training set that cover as much time as the answers. Return the start of
    the week, in microseconds since 1970 UTC, and the drift of each input and of the score. Raise IsthmusError if the
    training set, the contract or a table is gone, or the tables lack all rows that Redis returned.
    """
    at = micros(answered.part["at"])
    at = np.where(at <= project.now(), at, 0)  # its clock is ahead
    since = int(at.max()) - WINDOW
    recent = np.flatnonzero(at >= since)
    contracts = answered.part["contract"].take(pa.array(recent))
    recent = recent[pc.equal(contracts, answered.part["contract"][int(at.argmax())]).to_numpy()]
    ids = answered.part["id"].take(pa.array(_spread(recent)))
    answers = ServedAnswers(project, folder)
    found = [group for _, group in answers.predictions(answers.table.by_id(ids))]
    groups = [group for group in found if isinstance(group, Group)]
    if not groups and isinstance(problem := found[-1], IsthmusError):
        raise problem
    model, moments = groups[0].predictor.model, np.concatenate([group.at for group in groups])
    served = pa.concat_tables([_fed(group) for group in groups])
    if not len(served):
        raise DataError("the rows that Redis gave", "are not in the history", expected="at least one that is")
    examples = Artifacts(project, declared).training_set(open_package(folder).manifest.training_set).table()
    examples = examples.take(pa.array(_spread(np.arange(len(examples)))))
    learned = columns(examples, model.inputs)
    inputs = {item.name: Column(item.name, item.dtype) for item in model.inputs}
    now = {name: served.select([name]) for name in inputs}
    before = {name: _arrow(model.inputs, learned).select([name]) for name in inputs}
    if SCORE not in inputs:
        inputs[SCORE] = Column(SCORE, Float64)
        now[SCORE] = pa.table({SCORE: _score(answered.outputs[np.isin(answered.answer, recent)])})
        before[SCORE] = pa.table({SCORE: _score(predict_all(model, learned))})
    end, length = int(micros(examples[EVENT]).max()), max(int(moments.max() - moments.min()), DAY)
    return since, tuple(
        _drift(column, now[column.name], before[column.name].append_column(EVENT, examples[EVENT]), end, length)
        for column in inputs.values()
    )


def _fed(group: Group) -> pa.Table:
    rows, known = group.served()
    return _arrow(group.predictor.model.inputs, group.inputs(rows)).filter(pa.array(known))


def _drift(column: Column, now: pa.Table, before: pa.Table, end: int, length: int) -> InputDrift:
    sides = [_measured(column, table) for table in (before, now)]
    usual = windows([column], before, end, length)[column.name]
    result = drift(sides[0], sides[1], usual)
    return InputDrift(
        name=column.name, rows=result.rows, psi=result.psi, ks=result.ks, wasserstein=result.wasserstein,
        exceeded=result.exceeded,
    )  # fmt: skip


def _measured(column: Column, table: pa.Table) -> FeatureStatistics:
    return measure([column], table.select([column.name]).combine_chunks().to_batches())[1][column.name]


def _arrow(inputs: Sequence[ModelInput], values: Mapping[str, Values]) -> pa.Table:
    return pa.table({item.name: to_arrow(values[item.name], item.dtype) for item in inputs})


def _score(outputs: Array) -> Array:
    flat = outputs.reshape(len(outputs), -1).astype(np.float64)
    best: Array = flat[:, 0] if flat.shape[1] == 1 else flat.max(1)
    return best


def _spread(places: Any) -> Any:
    if len(places) <= SAMPLE:
        return places
    return places[np.linspace(0, len(places) - 1, SAMPLE).astype(np.int64)]
