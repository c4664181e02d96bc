"""Recorded predictions as the rows of an attribution: what could be known, what Redis returned, what the model was fed.

Each row is joined from the current history at its moment. The row that Redis returned is the history's row with the
recorded times and hash. Together with the fields of the request it is what the model was fed; its digest confirms that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.scores import Scores
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.features import clock
from isthmus.features.contract.schema import Column, Contract
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.values.arrow import ARROW, micros, to_arrow
from isthmus.features.values.columns import Ints, Mask, Values, from_python
from isthmus.orchestration.artifacts import Artifacts, TrainingSet
from isthmus.orchestration.attribution.inputs import TIME, TrainingRows
from isthmus.orchestration.attribution.recordings.predictions import PackagePredictions
from isthmus.orchestration.attribution.scores import Choose, ChosenRows
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import SKEW, Features
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.mismatches import Recorded
from isthmus.orchestration.recording.nearest import nearest
from isthmus.orchestration.recording.predictions import read
from isthmus.orchestration.recording.provenance import Origins, groups, key_values
from isthmus.orchestration.recording.requests import sent_keys
from isthmus.orchestration.recording.storedrows import from_history
from isthmus.package.inputs import ModelInput
from isthmus.serving.recorder.digest import digests

# Column of answer ids; an answer of several rows appears several times.
ID = "isthmus_answer"


@dataclass(frozen=True)
class RecordedRows:
    """Recorded predictions in the columns of a training set.

    Attributes:
        rows: rows with the ideal features, and the label if the training set has the same question.
        served: student inputs with the stored features that Redis returned.
        fed: student inputs with the request fields that were sent.
        scores: recorded scores, shape (n,).
        matched: mask of rows that the training set has.
        keys: join keys that were sent.
        fields: request fields that the model reads.
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

    def keep(self, mask: Mask, why: str) -> "RecordedRows":
        """Keep the rows in the mask and count the skipped rows under `why`."""
        if mask.all():
            return self
        places, left_out = np.flatnonzero(mask), dict(self.left_out)
        left_out[why] = left_out.get(why, 0) + len(mask) - len(places)
        served, fed = (table.take(pa.array(places)) for table in (self.served, self.fed))
        return replace(
            self, rows=self.rows.take(places), served=served, fed=fed, scores=self.scores[places],
            matched=self.matched[places], left_out=left_out,
        )  # fmt: skip

    def features(self, read: Sequence[ModelInput]) -> Features:
        """Return a model's inputs in their four forms."""
        return Features.of(*(columns(table, read) for table in (self.rows.table, self.served, self.fed)))

    def unknown(self) -> dict[str, str]:
        """Return the stages without a part, with the reason."""
        if not self.fields or self.matched.any():
            return {}
        return {SKEW: "the training set has none of these rows, so the request fields are assumed to be right"}


def choose_recorded(project: Project, artifacts: Artifacts, answers: PackagePredictions) -> Choose:
    def choose(scores: Scores, material: Material) -> ChosenRows:
        declared = artifacts.declared
        examples = artifacts.latest_training_set() or artifacts.training_set(material.training_set)
        found = recorded_rows(project, declared, answers, examples)
        found = with_teacher(project, declared, found, material.teacher_inputs)
        features, matched = found.features(scores.student_inputs), int(found.matched.sum())
        return ChosenRows(
            found.rows, features, found.left_out, found.unknown(), None, found.scores, matched, found.keys
        )

    return choose


def recorded_rows(
    project: Project, declared: Distillation, answers: PackagePredictions, examples: TrainingSet
) -> RecordedRows:
    """Read the rows of recorded answers, without inputs that only the teacher reads.

    A row of the training set has the same question if it has the same join keys, is nearest in time, and has no other
    answer nearer to it. `Distillation.monitor` sets the tolerance and may name other columns to match by. The request
    fields of the training set are the ideal ones.

    Raises:
        DataError: no row is left.
    """
    reader = _Reader(project, declared)
    parts, left_out = [], dict(answers.left_out)
    for group in groups(answers.part):
        try:
            parts.append(reader.read(group))
        except IsthmusError as error:
            count = int(pc.sum(group["rows"]).as_py())
            left_out[str(error)] = left_out.get(str(error), 0) + count
    _require(len(parts), declared, left_out)
    for why in (why for part in parts for why in part.left_out):
        left_out[why] = left_out.get(why, 0) + sum(part.left_out.get(why, 0) for part in parts)
    table, served, fed = (
        pa.concat_tables([getattr(part, name) for part in parts]) for name in ("table", "served", "fed")
    )
    places = _training_places(table, examples, declared, reader.spine_keys)
    matches = examples.table().take(pa.array(places, mask=places < 0))
    label = declared.spine.label.name
    for name in [name for name in reader.request if name in matches.column_names]:
        values = matches[name].cast(ARROW[reader.request[name].dtype.name])
        if name in served.column_names:
            served = with_column(served, name, pc.if_else(pa.array(places >= 0), values, served[name]))
            table = with_column(table, name, served[name])
        elif name not in table.column_names:
            table = with_column(table, name, values)
    table = with_column(table, label, matches[label])
    found = RecordedRows(
        TrainingRows(examples, table, np.arange(len(table))), served, fed,
        np.concatenate([part.scores for part in parts]),
        places >= 0, [name for name in reader.keys if table[name].null_count < len(table)],
        [name for name in reader.request if name in served.column_names], left_out,
    )  # fmt: skip
    known, alike = (np.concatenate([getattr(part, name) for part in parts]) for name in ("known", "alike"))
    found = found.keep(known, "the row that Redis returned is not in the history: see `isthmus answers replay`")
    found = found.keep(alike[known], "the model was fed different inputs: see `isthmus answers replay`")
    _require(len(found.scores), declared, found.left_out)
    return found


def with_teacher(
    project: Project, declared: Distillation, found: RecordedRows, inputs: Sequence[ModelInput]
) -> RecordedRows:
    """Add the teacher's ideal inputs, and skip rows whose inputs are not known.

    Raises:
        DataError: no row is left.
    """
    contract, origins = project.applied(), Origins(project)
    request = RequestInputs.of(contract, declared.teacher.name)
    table = found.rows.table
    at, lacking = micros(table[TIME]), np.zeros(len(table), bool)
    names: list[str] = []
    for view_name in dict.fromkeys(view for view, _ in contract.read(declared.teacher.name)):
        view = contract.views[view_name]
        missing = [
            column for column in view.fields
            if (view_name, column.name) in contract.read(declared.teacher.name)
            and view.full_name(column.name) not in table.column_names
        ]  # fmt: skip
        if not missing:
            continue
        history = origins.history(view)
        if not isinstance(history, ViewHistory):
            raise history
        keys = {}
        for column in view.keys:
            values = table[column.name].combine_chunks()
            if values.null_count:
                names.append(column.name)
                lacking |= pc.is_null(values).to_numpy(zero_copy_only=False)
            keys[column.name] = key_values(values)
        now = from_history(history, view, keys, at)
        for column in missing:
            values = to_arrow(now.columns[column.name], column.dtype).cast(ARROW[column.dtype.name])
            table = with_column(table, view.full_name(column.name), values)
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
    complete, refused = request.complete(columns(table, request.fed(inputs)))
    for item in inputs:
        if item.name not in table.column_names:
            table = with_column(table, item.name, to_arrow(complete[item.name], item.dtype))
    whole = replace(found, rows=found.rows._replace(table=table))
    why = f"their requests lack {', '.join(dict.fromkeys(names))}, which the teacher reads"
    whole = whole.keep(~lacking, why).keep(~refused[~lacking], "a request transform refuses them")
    _require(len(whole.scores), declared, whole.left_out)
    return whole


def _keys(contract: Contract, declared: Distillation) -> list[Column]:
    """Return the join keys of the spine, and of the views that teacher and student read."""
    spine = contract.spines[declared.spine.name].keys
    read = [view for name in (declared.teacher.name, declared.student.name) for view, _ in contract.read(name)]
    views = [column for view in dict.fromkeys(read) for column in contract.views[view].keys]
    return list({column.name: column for column in (*spine, *views)}.values())


@dataclass(frozen=True)
class _Part:
    """Rows of one group, as in `RecordedRows`.

    Attributes:
        known: mask of rows whose Redis row is in the history.
        alike: mask of rows whose recorded digest equals the digest of `fed`.
    """

    table: pa.Table
    served: pa.Table
    fed: pa.Table
    scores: Numbers
    known: Mask
    alike: Mask
    left_out: Mapping[str, int]


class _Reader:
    def __init__(self, project: Project, declared: Distillation) -> None:
        contract = project.applied()
        self._origins = Origins(project)
        self.spine_keys = contract.spines[declared.spine.name].key_names
        self.keys = {column.name: column for column in _keys(contract, declared)}
        self.request = {
            column.name: column
            for name in (declared.student.name, declared.teacher.name)
            for column in contract.raw_inputs(name)
            if column.available == "request"
        }

    def read(self, part: pa.Table) -> _Part:
        """Read a group of answers.

        Raises:
            IsthmusError: the contract, the package or a history of these answers is gone.
        """
        found = read(self._origins, part)
        requests, recorded = found.requests, found.recorded
        ideal, fed = found.inputs(found.now), found.inputs(found.served)
        types = {item.name: item.dtype for item in found.predictor.model.inputs}
        keys = {
            name: self._key(column, requests.keys, requests.fields, found.bodies, recorded)
            for name, column in self.keys.items()
        }
        table = {ID: part["id"].take(pa.array(recorded.answer)).combine_chunks()} | keys
        table[TIME] = pa.array(recorded.at).cast(ARROW["UnixTimestamp"])
        as_table = [
            pa.table({name: to_arrow(values[name], types[name]).cast(ARROW[types[name].name]) for name in types})
            for values in (ideal, fed)
        ]
        unread = int(pc.sum(part["rows"]).as_py()) - len(recorded.answer)
        return _Part(
            pa.table({**table, **dict(zip(types, as_table[0].columns, strict=True))}), as_table[1], as_table[1],
            recorded.outputs.astype(np.float64), found.known,
            digests(fed) == recorded.digest.view(np.uint64),
            {"their requests cannot be read: see `isthmus answers replay`": unread} if unread else {},
        )  # fmt: skip

    def _key(
        self, column: Column, keys: Mapping[str, Sequence[Any]], fields: Mapping[str, Values],
        bodies: Sequence[bytes | LookupError], recorded: Recorded,
    ) -> pa.Array:  # fmt: skip
        """Return the values of a join key that the model reads by, or that was sent along."""
        name = column.name
        if name in keys:
            values = from_python(keys[name], column.dtype)
        elif name in fields:
            values = fields[name]
        else:
            values = from_python(sent_keys(bodies, recorded.rows, column), column.dtype)
        return to_arrow(values, column.dtype).cast(ARROW[column.dtype.name])


def _training_places(table: pa.Table, examples: TrainingSet, declared: Distillation, keys: Sequence[str]) -> Ints:
    """Return the index of the matching training row, or -1."""
    rows, by = examples.table(), list(declared.monitor.match or keys)
    if not {*by} <= {*table.column_names}:
        return np.full(len(table), -1)
    example_keys = rows.select(by)
    tolerance = declared.monitor.within // clock.MICROSECOND
    row_keys = table.select(by).cast(example_keys.schema)
    return nearest(row_keys, micros(table[TIME]), example_keys, micros(rows[TIME]), tolerance)


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the table with a column added or replaced."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _require(rows: int, declared: Distillation, left_out: Mapping[str, int]) -> None:
    if not rows:
        found = "; ".join(f"{count:,} rows were skipped: {why}" for why, count in left_out.items()) or "none has rows"
        raise DataError(f"recorded answers of {declared.name}", found, expected="an answer that can be recomputed")
