"""Recorded predictions as rows of an attribution, with three forms of their features: ideal, served and fed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.tensors import columns
from isthmus.features import clock
from isthmus.features.contract.schema import Column, Contract
from isthmus.features.days import DAY, Days
from isthmus.features.errors import DataError, IsthmusError, RequestError
from isthmus.features.values.arrow import ARROW, micros, to_arrow
from isthmus.features.values.columns import Ints, Mask, Values, from_python
from isthmus.orchestration.artifacts import Artifacts, TrainingSet
from isthmus.orchestration.attribution.inputs import TIME, TrainingRows
from isthmus.orchestration.attribution.report import skipped
from isthmus.orchestration.attribution.scores import ChosenRows, PackageModels
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import SKEW, Features
from isthmus.orchestration.recording.nearest import nearest
from isthmus.orchestration.recording.requests import sent_keys
from isthmus.orchestration.recording.served import Group, ServedAnswers, key_values
from isthmus.orchestration.recording.storedrows import from_history
from isthmus.package.manifest import Package
from isthmus.serving.recorder.digest import digests

# Ideal features are joined from the current history as of the answer's time. The row that Redis returned is the
# history's row with the recorded times and hash. A digest confirms which features the model was fed.
PREDICT = "predict"
# Column of answer ids; an answer of several rows appears several times.
ID = "isthmus_answer"


@dataclass(frozen=True)
class RecordedRows:
    """Recorded predictions in the columns of a training set; n rows.

    Attributes:
        rows: rows with the ideal features, and the label of the matching training row, null without one.
        served: student inputs: the stored features that Redis returned, and the ideal request fields.
        fed: student inputs: the stored features that Redis returned, and the request fields that were sent.
        matched: mask of rows that have a matching training row, shape (n,).
        keys: join keys that were sent.
        left_out: number of skipped rows by reason.
    """

    rows: TrainingRows
    served: pa.Table
    fed: pa.Table
    scores: Numbers
    matched: Mask
    keys: Sequence[str]
    fields: Sequence[str]
    left_out: dict[str, int]

    def select(self, mask: Mask, why: str) -> "RecordedRows":
        if mask.all():
            return self
        places, left_out = np.flatnonzero(mask), dict(self.left_out)
        left_out[why] = left_out.get(why, 0) + len(mask) - len(places)
        served, fed = (table.take(pa.array(places)) for table in (self.served, self.fed))
        return replace(
            self, rows=self.rows.take(places), served=served, fed=fed, scores=self.scores[places],
            matched=self.matched[places], left_out=left_out,
        )  # fmt: skip


class PackagePredictions(NamedTuple):
    """Recorded predictions of one package in one precision. `left_out` counts skipped rows by reason."""

    served: ServedAnswers
    package: Package
    precision: str
    part: pa.Table
    left_out: dict[str, int]


def predictions(served: ServedAnswers, declared: Distillation, days: Days | None = None) -> PackagePredictions:
    """Read the recorded predictions of the package of a distillation that made the most recent one, to explain them.

    Other packages and precisions than the last one are left out. With `days`, only predictions in these days are read.
    `left_out` of the result counts, by reason, the rows of the distillation's other packages, of other precisions, and
    of packages that are gone. Raise RequestError if there is no prediction.
    """
    first, end = (None, None) if days is None else (clock.moment(day * DAY) for day in (days.first, days.end))
    answers = served.read(route=PREDICT, first=first, end=end)
    packages, left_out = dict[str, Package](), dict[str, int]()
    for digest in pc.unique(answers["package"]).to_pylist():
        try:
            package = served.package(digest)
        except IsthmusError as error:
            left_out[str(error)] = _count(answers.filter(pc.equal(answers["package"], digest)))
            continue
        if package.manifest.name == declared.name:
            packages[digest] = package
    own = answers.filter(pc.is_in(answers["package"], pa.array(packages, pa.string())))
    if not len(own):
        why = "; ".join(f"{count:,} other rows: {reason}" for reason, count in left_out.items())
        raise RequestError(
            f"recorded answers of {declared.name}",
            f"the table has no prediction{'' if days is None else f' from {days}'}{f' ({why})' if why else ''}",
            expected="predictions of a server that has `[server.record]`", remedy="run `isthmus answers collect`",
        )  # fmt: skip
    last = own.slice(int(np.argmax(micros(own["at"]))), 1).to_pylist()[0]
    part = own.filter(pc.equal(own["package"], last["package"]))
    if skipped := _count(own) - _count(part):
        left_out["another package answered"] = skipped
    precision = _precision(last["variant"])
    same = pc.starts_with(part["variant"], f"{precision}/")
    if skipped := _count(part.filter(pc.invert(same))):
        left_out["another precision answered"] = skipped
    return PackagePredictions(served, packages[last["package"]], precision, part.filter(same), left_out)


def prediction(served: ServedAnswers, identity: str) -> PackagePredictions:
    part = served.answer(identity)
    route, package, variant = (part[name][0].as_py() for name in ("route", "package", "variant"))
    if route != PREDICT:
        kind = {"lookup": "is a lookup", "generate": "is a text"}.get(route, "has tensors")
        raise RequestError(f"answer {identity}", f"{kind} and has no score", expected="the id of a prediction",
                           remedy=f"run `isthmus answers replay {identity}`")  # fmt: skip
    return PackagePredictions(served, served.package(package), _precision(variant), part, {})


def _precision(variant: str) -> str:
    return variant.partition("/")[0]


def _count(answers: pa.Table) -> int:
    return int(pc.sum(answers["rows"]).as_py() or 0)


def load_recorded(artifacts: Artifacts, answers: PackagePredictions, models: PackageModels) -> ChosenRows:
    examples = artifacts.latest_training_set() or artifacts.training_set(models.material.training_set)
    found = recorded_rows(artifacts.declared, answers, examples)
    found = _with_teacher(artifacts.declared, answers.served, found, models)
    features = Features.of(
        *(columns(table, models.scores.student_inputs) for table in (found.rows.table, found.served, found.fed))
    )
    unknown = {}
    if found.fields and not found.matched.any():
        unknown[SKEW] = "the training set has none of these rows, so the request fields are assumed to be right"
    return ChosenRows(
        found.rows, features, found.left_out, unknown, None, found.scores, int(found.matched.sum()), found.keys
    )


def recorded_rows(declared: Distillation, answers: PackagePredictions, examples: TrainingSet) -> RecordedRows:
    """Recompute the features of recorded predictions, and give each prediction the label of its row in a training set.

    A prediction matches the training row that has the same join keys and is nearest in time, unless another
    prediction is nearer to that row. `Distillation.monitor` sets the largest distance in time and may name other
    columns to match by. The request fields of the training row count as the ideal ones. Inputs that only the
    teacher reads are missing. A prediction without a match gets a null label. Predictions that cannot be recomputed
    exactly are skipped and counted in `left_out`. Raise DataError if no row is left.
    """
    contract = answers.served.project.applied()
    keys = {column.name: column for column in _keys(contract, declared)}
    request = {
        column.name: column
        for name in (declared.student.name, declared.teacher.name)
        for column in contract.raw_inputs(name)
        if column.available == "request"
    }
    parts, left_out = [], Counter(answers.left_out)
    for part, group in answers.served.predictions(answers.part):
        if isinstance(group, IsthmusError):
            left_out[str(group)] += _count(part)
            continue
        parts.append(_tables(group, keys))
        if unread := _count(part) - len(group.answer):
            left_out["their requests cannot be read: see `isthmus answers replay`"] += unread
    _require(len(parts), declared, left_out)
    table, fed, marks = (pa.concat_tables(tables) for tables in zip(*parts, strict=True))
    questions = examples.table()
    by = list(declared.monitor.match or contract.spines[declared.spine.name].key_names)
    places = _training_places(table, questions, by, declared.monitor.within // clock.MICROSECOND)
    matches = questions.take(pa.array(places, mask=places < 0))
    served, label = fed, declared.spine.label.name
    for name in [name for name in request if name in matches.column_names]:
        values = matches[name].cast(ARROW[request[name].dtype.name])
        if name in served.column_names:
            served = with_column(served, name, pc.if_else(pa.array(places >= 0), values, served[name]))
            table = with_column(table, name, served[name])
        elif name not in table.column_names:
            table = with_column(table, name, values)
    table = with_column(table, label, matches[label])
    score, known, alike = (column.to_numpy() for column in marks.columns)
    found = RecordedRows(
        TrainingRows(examples, table, np.arange(len(table))), served, fed, score, places >= 0,
        [name for name in keys if table[name].null_count < len(table)],
        [name for name in request if name in served.column_names], dict(left_out),
    )  # fmt: skip
    found = found.select(known, "the row that Redis returned is not in the history: see `isthmus answers replay`")
    found = found.select(alike[known], "the model was fed different inputs: see `isthmus answers replay`")
    _require(len(found.scores), declared, found.left_out)
    return found


def _tables(group: Group, columns: Mapping[str, Column]) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return the rows of a group of answers as three tables: ideal inputs, fed inputs, and marks.

    The first table also has answer ids, keys and times. The mark `known` is True if the history has the row that Redis
    returned. `alike` is True if the fed inputs have the recorded digest. `score` is the recorded score.
    """
    inputs = [Column(item.name, item.dtype) for item in group.predictor.model.inputs]
    served, known = group.served()
    ideal, fed = group.inputs(group.now), group.inputs(served)
    table = {ID: group.answers["id"].take(pa.array(group.answer)).combine_chunks()}
    table |= {name: _arrow(_key(group, column), column) for name, column in columns.items()}
    table[TIME] = pa.array(group.at).cast(ARROW["UnixTimestamp"])
    table |= {column.name: _arrow(ideal[column.name], column) for column in inputs}
    marks = {"score": group.outputs.astype(np.float64), "known": known, "alike": digests(fed) == group.digest}
    return (
        pa.table(table),
        pa.table({column.name: _arrow(fed[column.name], column) for column in inputs}),
        pa.table(marks),
    )


def _key(group: Group, column: Column) -> Values:
    name, requests = column.name, group.requests
    if name in requests.keys:
        return from_python(requests.keys[name], column.dtype)
    if name in requests.fields:
        return requests.fields[name]
    return from_python(sent_keys(group.bodies, requests.rows, column), column.dtype)


def _arrow(values: Values, column: Column) -> pa.Array:
    return to_arrow(values, column.dtype).cast(ARROW[column.dtype.name])


def _with_teacher(
    declared: Distillation, served: ServedAnswers, found: RecordedRows, models: PackageModels
) -> RecordedRows:
    """Add the teacher's ideal inputs, and skip rows that lack one. Raise DataError if no row is left."""
    contract, table = served.project.applied(), found.rows.table
    inputs, request = models.material.teacher_inputs, models.requests
    at, lacking = micros(table[TIME]), np.zeros(len(table), bool)
    names: list[str] = []
    for view_name in dict.fromkeys(view for view, _ in contract.stored_features(declared.teacher.name)):
        view = contract.views[view_name]
        missing = [
            column for column in view.fields
            if (view_name, column.name) in contract.stored_features(declared.teacher.name)
            and view.full_name(column.name) not in table.column_names
        ]  # fmt: skip
        if not missing:
            continue
        history = served.history(view)
        keys = {}
        for column in view.keys:
            values = table[column.name].combine_chunks()
            if values.null_count:
                names.append(column.name)
                lacking |= pc.is_null(values).to_numpy(zero_copy_only=False)
            keys[column.name] = key_values(values)
        now = from_history(history, view, keys, at)
        for column in missing:
            table = with_column(table, view.full_name(column.name), _arrow(now.columns[column.name], column))
    sent = {*found.served.column_names, *(column.name for column in _keys(contract, declared))}
    for name in [column.name for column in contract.raw_inputs(declared.teacher.name) if column.available == "request"]:
        values = table[name].combine_chunks()
        # Request fields that only the teacher reads are known from the training set only.
        absent = ~found.matched if name not in sent else np.zeros(len(table), bool)
        if name not in found.served.column_names and name in sent:
            absent = pc.is_null(values).to_numpy(zero_copy_only=False)
        if absent.any():
            names.append(name)
            lacking |= absent
    complete, refused = request.complete(columns(table, request.graph_inputs(inputs)))
    for item in inputs:
        if item.name not in table.column_names:
            table = with_column(table, item.name, to_arrow(complete[item.name], item.dtype))
    whole = replace(found, rows=found.rows._replace(table=table))
    why = f"their requests lack {', '.join(dict.fromkeys(names))}, which the teacher reads"
    whole = whole.select(~lacking, why).select(~refused[~lacking], "a request transform refuses them")
    _require(len(whole.scores), declared, whole.left_out)
    return whole


def _keys(contract: Contract, declared: Distillation) -> list[Column]:
    spine = contract.spines[declared.spine.name].keys
    read = [
        view for name in (declared.teacher.name, declared.student.name) for view, _ in contract.stored_features(name)
    ]
    views = [column for view in dict.fromkeys(read) for column in contract.views[view].keys]
    return list({column.name: column for column in (*spine, *views)}.values())


def _training_places(table: pa.Table, examples: pa.Table, by: Sequence[str], tolerance: int) -> Ints:
    if not {*by} <= {*table.column_names}:
        return np.full(len(table), -1)
    keys = examples.select(by)
    return nearest(table.select(by).cast(keys.schema), micros(table[TIME]), keys, micros(examples[TIME]), tolerance)


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _require(rows: int, declared: Distillation, left_out: Mapping[str, int]) -> None:
    if not rows:
        found = "; ".join(skipped(count, why) for why, count in left_out.items()) or "none has rows"
        raise DataError(f"recorded answers of {declared.name}", found, expected="an answer that can be recomputed")
