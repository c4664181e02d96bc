"""Recompute recorded answers from the history and the packages, and compare them bit by bit (`isthmus answers replay`).

The rows of each answer are joined from the offline tables at its moment, and its request transforms and model run over
them. Every difference is reported with a cause.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DependencyError, GateFailed, IsthmusError, PackageError, RequestError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.progress import Progress, silent
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Mask
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import absence
from isthmus.orchestration.recording.mismatches import Cause, Causes, Recorded
from isthmus.orchestration.recording.provenance import Origins, groups, predict_all, view_answers
from isthmus.orchestration.recording.requests import (
    Requests,
    lookup_of,
    read_lookups,
    read_predictions,
    read_prompts,
    unreadable,
)
from isthmus.orchestration.recording.storedrows import StoredRows, from_history
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.recording.tensors import TextWriter, differing
from isthmus.package.manifest import open_package
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.columns import computed
from isthmus.serving.recorder.digest import digests

# Answers that a report names for each cause.
EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """An answer that differs from its record or cannot be recomputed.

    Attributes:
        id: id of the answer.
        at: moment of the answer, ISO 8601.
        cause: value of `Cause`.
        found: explanation in one sentence.
    """

    id: str
    at: str
    cause: str
    found: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay.

    Attributes:
        answers: number of recomputed answers.
        rows: number of rows in their requests.
        same: number of answers that are equal bit by bit.
        causes: number of differing answers by cause.
        differences: first differences of each cause.
    """

    answers: int = 0
    rows: int = 0
    same: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    differences: Sequence[ReplayDifference] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    project: Project, identity: str | None = None, *, first: datetime | None = None, end: datetime | None = None,
    package: Path | None = None, progress: Progress = silent,
) -> Replay:  # fmt: skip
    """Recompute the answer with an id, or all answers from `first` on and before `end`.

    Moments without a time zone are in UTC. If `package` is set, it replaces the package that answered.

    Raises:
        RequestError: no such answer is recorded, the range is empty, or neither or both of an id and a range are given.
        DataError: the table cannot be read.
        DependencyError: an answer is a generated text and the extra `generate` is not installed.
        PackageError: `package` is not a valid package folder.
    """
    if (identity is None) == (first is None and end is None):
        raise RequestError("replay", "needs an answer id or a time range", expected="ID, or --from and --to")
    first, end = _zoned(first), _zoned(end)
    if first and end and first >= end:
        raise RequestError("range", "is empty", expected="a start before the end")
    condition = ds.field("id") == identity if identity is not None else ds.scalar(True)
    if first:
        condition &= ds.field("at") >= first
    if end:
        condition &= ds.field("at") < end
    if package is not None:
        open_package(package)
    progress("reading recorded answers", 0.0)
    answers = RecordedAnswers.of(project).read(condition)
    if not len(answers):
        if identity is not None:
            raise absence(project, identity)
        raise RequestError("recorded answers", "the table has none in that time range",
                           remedy="run `isthmus answers collect`; answers older than `keep_days` are gone")  # fmt: skip
    return _Replay(project, answers, package, progress).run()


def require_same(report: Replay) -> None:
    """Raise GateFailed if an answer differs."""
    if report.causes:
        named = ", ".join(f"{count:,} by {cause}" for cause, count in report.causes.items())
        raise GateFailed("replay", f"{report.answers - report.same:,} of {report.answers:,} answers differ: {named}",
                         expected="all the same")  # fmt: skip


def _zoned(moment: datetime | None) -> datetime | None:
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Mismatches:
    """The first cause found for each differing answer of a group."""

    causes: dict[int, tuple[Cause, str]] = field(default_factory=dict)

    def add(self, places: Iterable[int], cause: Cause, why: str) -> None:
        for place in places:
            self.causes.setdefault(int(place), (cause, why))


class _Replay:
    def __init__(self, project: Project, answers: pa.Table, package: Path | None, progress: Progress) -> None:
        self._project, self._answers, self._package, self._progress = project, answers, package, progress
        self._origins = Origins(project, package)
        self._causes = Causes(project, self._origins.offline)

    def run(self) -> Replay:
        counts, shown = Counter[Cause](), dict[Cause, list[ReplayDifference]]()
        rows = 0
        parts = list(groups(self._answers))
        for number, part in enumerate(parts):
            self._progress("recomputing answers", number / len(parts))
            differences = _Mismatches()
            self._group(part, differences, partial(self._written, number, len(parts)))
            rows += int(pc.sum(part["rows"]).as_py())
            ids, at = part["id"], part["at"]
            for place, (cause, why) in sorted(differences.causes.items()):
                counts[cause] += 1
                if len(examples := shown.setdefault(cause, [])) < EXAMPLES:
                    moment = at[place].as_py().isoformat().replace("+00:00", "Z")
                    examples.append(ReplayDifference(ids[place].as_py(), moment, cause.value, why))
        self._progress("all answers are recomputed", 1.0)
        differing = [difference for examples in shown.values() for difference in examples]
        total = len(self._answers)
        return Replay(total, rows, total - counts.total(), {c.value: n for c, n in counts.most_common()}, differing)

    def _written(self, number: int, parts: int, done: float) -> None:
        self._progress("regenerating texts", (number + done) / parts)

    def _group(self, part: pa.Table, differences: _Mismatches, progress: Callable[[float], None]) -> None:
        """Recompute answers that share contract, package and features."""
        first = part.slice(0, 1).to_pylist()[0]
        all_answers = range(len(part))
        contract = self._origins.contract(first["contract"])
        if contract is None:
            why = f"contract {first['contract'][:12]} is gone: neither the project nor a package has it"
            differences.add(all_answers, Cause.CONTRACT, why)
            return
        graphs = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        try:
            reader: Lookup | Predictor | TextWriter
            if first["route"] == "infer":
                tensors = TensorPredictor(contract, self._origins.model(first["package"], first["variant"]))
                for place, cause, why in differing(part, tensors, self._causes, another=self._package is not None):
                    differences.add([place], cause, why)
                return
            if first["route"] == "generate":
                model = self._origins.model(first["package"], first["variant"])
                reader = TextWriter(contract, model, graphs, another=self._package is not None)
            elif first["route"] == "predict":
                model = self._origins.model(first["package"], first["variant"])
                if not model.inputs:
                    raise PackageError(f"package {model.manifest.name}", "does not predict from rows of features")
                reader = Predictor(contract, model, graphs)
            else:
                reader = lookup_of(contract, first["request"].encode(), graphs)
        except DependencyError:
            raise
        except IsthmusError as error:
            cause = Cause.CONTRACT if first["route"] == "lookup" else Cause.PACKAGE
            differences.add(all_answers, cause, str(error))
            return
        except msgspec.MsgspecError as error:
            differences.add(all_answers, Cause.KEY, unreadable(error))
            return
        if not isinstance(reader, Lookup):
            reads, read = (
                ", ".join(sorted(names)) for names in ([view.name for view in reader.plan.views], first["views"])
            )
            if reads != read:
                # The request may lack the keys that another package needs.
                digest = reader.model.deployment.digest[:12]
                differences.add(
                    all_answers, Cause.PACKAGE, f"package {digest} reads {reads or 'nothing'}, not {read or 'nothing'}"
                )
                return
        histories = {}
        for name, view_hash in zip(first["views"], first["hashes"], strict=True):
            history = self._origins.history(contract.views[name])
            if isinstance(history, IsthmusError) or contract.views[name].hash != view_hash:
                differences.add(all_answers, Cause.HISTORY, str(history))
                return
            histories[name] = history
        bodies = self._origins.bodies(part, contract, first["hashed"])
        if isinstance(reader, Predictor):
            requests = read_predictions(reader, bodies)
        elif isinstance(reader, TextWriter):
            requests = read_prompts(reader.prompt, bodies)
        else:
            requests = read_lookups(reader, contract, bodies)
        for place, why in requests.unread.items():
            differences.add([place], Cause.KEY, why)
        if not requests.rows.any():
            return
        recorded = Recorded.of(part, requests.rows)
        stored = self._stored(contract, histories, requests, recorded, differences)
        if isinstance(reader, Predictor):
            self._predictions(reader, requests, stored, recorded, differences)
        elif isinstance(reader, TextWriter):
            # Generation is slow: skip texts whose prompt is known to differ.
            places = [place for place in np.flatnonzero(requests.rows).tolist() if place not in differences.causes]
            texts = reader.differing(bodies, requests, stored, recorded, self._causes, places)
            for number, differs in enumerate(texts, 1):
                progress(number / len(places))
                if differs:
                    differences.add([differs[0]], *differs[1:])
        elif reader.computes:
            self._computed(reader, requests, stored, recorded, differences)

    def _stored(
        self, contract: Contract, histories: Mapping[str, ViewHistory], requests: Requests, recorded: Recorded,
        differences: _Mismatches,
    ) -> dict[str, StoredRows]:  # fmt: skip
        """Read the history of each view, and note where Redis had other rows."""
        stored = {}
        for name, history in histories.items():
            view = contract.views[name]
            now = from_history(history, view, requests.keys, recorded.at)
            then = recorded.views[name]
            differing = np.flatnonzero(~now.same(then))
            if len(differing):
                keys = {key.name: [requests.keys[key.name][n] for n in differing.tolist()] for key in view.keys}
                causes = self._causes.of(view, history, keys, recorded, differing, now, then)
                for row, (cause, why) in zip(differing.tolist(), causes, strict=True):
                    differences.add([int(recorded.answer[row])], cause, why)
            stored[name] = now
        return stored

    def _predictions(
        self, predictor: Predictor, requests: Requests, stored: Mapping[str, StoredRows], recorded: Recorded,
        differences: _Mismatches,
    ) -> None:  # fmt: skip
        inputs = predictor.inputs(requests.fields, view_answers(stored))
        same_inputs = digests(inputs) == recorded.digest.view(np.uint64)
        outputs, count = predict_all(predictor.model, inputs), len(same_inputs)
        equal = _equal(outputs.reshape(count, -1), recorded.outputs.reshape(count, -1))
        for place in np.unique(recorded.answer[~(equal & same_inputs)]).tolist():
            rows = slice(int(recorded.starts[place]), int(recorded.starts[place] + recorded.rows[place]))
            own = {name: values.take(rows) for name, values in inputs.items()}
            # Rerun in the original batch: other batch sizes may change the last bits of a float.
            again = predictor.model.predict(own)
            then = recorded.outputs.reshape(count, -1)[rows]
            if _equal(again.reshape(len(then), -1), then).all() and same_inputs[rows].all():
                continue
            now, before = (part.ravel()[:3].tolist() for part in (again, then))
            model = predictor.model.deployment
            if self._package is not None:
                why = f"package {model.digest[:12]} returns {now}, {recorded.package[:12]} returned {before}"
                differences.add([place], Cause.PACKAGE, why)
                continue
            runtime = self._causes.runtime(recorded, place)
            if same_inputs[rows].all():
                why = f"the model returns {now}, and returned {before}: {runtime}"
            else:
                why = f"the same rows and fields give different inputs: {runtime}"
            differences.add([place], Cause.ENGINE, why)

    def _computed(
        self, lookup: Lookup, requests: Requests, stored: Mapping[str, StoredRows], recorded: Recorded,
        differences: _Mismatches,
    ) -> None:  # fmt: skip
        values = computed(lookup.compute(requests.fields, view_answers(stored)))
        same = digests(values) == recorded.digest.view(np.uint64)
        for place in np.unique(recorded.answer[~same]).tolist():
            runtime = self._causes.runtime(recorded, place)
            differences.add([place], Cause.ENGINE, f"request transforms compute different values: {runtime}")


def _equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Mask:
    if left.shape != right.shape:
        return np.zeros(len(right), bool)
    left, right = (np.ascontiguousarray(side, np.float32) for side in (left, right))
    same: Mask = ((left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))).all(axis=1)
    return same
