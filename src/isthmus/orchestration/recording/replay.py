"""`replay`: what recorded answers rest on, computed again from the history and the packages, to the bit.

The rows of each answer are joined from the offline tables at its moment, its request transforms and its model are run
over them, and whatever is not as it was recorded has a cause.
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

from isthmus.features import clock
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DependencyError, GateFailed, IsthmusError, PackageError, RequestError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.progress import Progress, silent
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Mask
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import absence
from isthmus.orchestration.recording.mismatches import Cause, Causes, Recorded
from isthmus.orchestration.recording.provenance import Origins, groups, predicted, view_answers
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
from isthmus.orchestration.recording.tensors import Writer, differing
from isthmus.package.manifest import open_package
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.columns import computed
from isthmus.serving.recorder.digest import digests

EXAMPLES = 10
"""Answers that a report names, of each cause."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not as it was recorded, or that nobody can compute again.

    Attributes:
        id: of the answer.
        at: its moment.
        cause: one of `Cause`.
        found: what differs, and why, in a sentence.
    """

    id: str
    at: str
    cause: str
    found: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome.

    Attributes:
        answers: that were computed again.
        rows: of their requests.
        same: answers that are the same to the bit.
        causes: of the others, how many by cause.
        differences: the first of each cause.
    """

    answers: int = 0
    rows: int = 0
    same: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    differences: Sequence[Difference] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def replay(
    project: Project, identity: str | None = None, between: tuple[datetime, datetime] | None = None, *,
    package: Path | None = None, progress: Progress = silent,
) -> Replay:  # fmt: skip
    """Computes answers again: that with an id, or those of a time, the first moment included and the last not.

    With a package, it answers instead of that which did.

    Raises:
        RequestError: there is no such answer, neither or both are asked for, or the time is empty.
        DataError: the table cannot be read.
        DependencyError: a text is to be written again, and the extra `generate` is not installed.
        PackageError: the package is none.
    """
    if (identity is None) == (between is None):
        raise RequestError("replay", "takes the id of an answer, or a time", expected="ID, or --between A B")
    condition = ds.field("id") == identity
    if between is not None:
        first, end = (clock.micros(_zoned(moment)) for moment in between)
        if first >= end:
            raise RequestError("range", "is empty", expected="a first moment before the second")
        first, end = (pa.scalar(moment, pa.int64()).cast(pa.timestamp("us", tz="UTC")) for moment in (first, end))
        condition = (ds.field("at") >= first) & (ds.field("at") < end)
    if package is not None:
        open_package(package)
    progress("reading recorded answers", 0.0)
    answers = RecordedAnswers.of(project).read(condition)
    if not len(answers):
        if identity is not None:
            raise absence(project, identity)
        raise RequestError("recorded answers", "there is none of that time in the table",
                           remedy="run `isthmus recorded`; they may also be older than `keep_days`")  # fmt: skip
    return _Replay(project, answers, package, progress).run()


def require_same(report: Replay) -> None:
    """Raises a GateFailed if an answer differs."""
    if report.causes:
        named = ", ".join(f"{count:,} by {cause}" for cause, count in report.causes.items())
        raise GateFailed("replay", f"{report.answers - report.same:,} of {report.answers:,} answers differ: {named}",
                         expected="all the same")  # fmt: skip


def _zoned(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Found:
    """The cause of each answer of a group that differs, the first one found."""

    causes: dict[int, tuple[Cause, str]] = field(default_factory=dict)

    def add(self, places: Iterable[int], cause: Cause, found: str) -> None:
        for place in places:
            self.causes.setdefault(int(place), (cause, found))


class _Replay:
    def __init__(self, project: Project, answers: pa.Table, package: Path | None, progress: Progress) -> None:
        self._project, self._answers, self._package, self._progress = project, answers, package, progress
        self._origins = Origins(project, package)
        self._causes = Causes(project, self._origins.offline)

    def run(self) -> Replay:
        counts, shown = Counter[Cause](), dict[Cause, list[Difference]]()
        rows = 0
        parts = list(groups(self._answers))
        for number, part in enumerate(parts):
            self._progress("computing answers again", number / len(parts))
            found = _Found()
            self._group(part, found, partial(self._written, number, len(parts)))
            rows += int(pc.sum(part["rows"]).as_py())
            ids, at = part["id"], part["at"]
            for place, (cause, why) in sorted(found.causes.items()):
                counts[cause] += 1
                if len(examples := shown.setdefault(cause, [])) < EXAMPLES:
                    moment = at[place].as_py().isoformat().replace("+00:00", "Z")
                    examples.append(Difference(ids[place].as_py(), moment, cause.value, why))
        self._progress("all answers are computed again", 1.0)
        differing = [difference for examples in shown.values() for difference in examples]
        total = len(self._answers)
        return Replay(total, rows, total - counts.total(), {c.value: n for c, n in counts.most_common()}, differing)

    def _written(self, number: int, parts: int, done: float) -> None:
        self._progress("writing texts again", (number + done) / parts)

    def _group(self, part: pa.Table, found: _Found, progress: Callable[[float], None]) -> None:
        """Computes answers of one kind again, by the same contract, package and features."""
        one = part.slice(0, 1).to_pylist()[0]
        everything = range(len(part))
        contract = self._origins.contract(one["contract"])
        if contract is None:
            found.add(
                everything,
                Cause.CONTRACT,
                f"contract {one['contract'][:12]} is gone: neither the project nor a package has it",
            )
            return
        graphs = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        try:
            reader: Lookup | Predictor | Writer
            if one["route"] == "infer":
                tensors = TensorPredictor(contract, self._origins.model(one["package"], one["variant"]))
                for place, cause, why in differing(part, tensors, self._causes, another=self._package is not None):
                    found.add([place], cause, why)
                return
            if one["route"] == "generate":
                model = self._origins.model(one["package"], one["variant"])
                reader = Writer(contract, model, graphs, another=self._package is not None)
            elif one["route"] == "predict":
                model = self._origins.model(one["package"], one["variant"])
                if not model.inputs:
                    raise PackageError(f"package {model.manifest.name}", "predicts no rows of features")
                reader = Predictor(contract, model, graphs)
            else:
                reader = lookup_of(contract, one["request"].encode(), graphs)
        except DependencyError:
            raise
        except IsthmusError as error:
            cause = Cause.CONTRACT if one["route"] == "lookup" else Cause.PACKAGE
            found.add(everything, cause, str(error))
            return
        except msgspec.MsgspecError as error:
            found.add(everything, Cause.KEY, unreadable(error))
            return
        if not isinstance(reader, Lookup):
            reads, read = (
                ", ".join(sorted(names)) for names in ([view.name for view in reader.plan.views], one["views"])
            )
            if reads != read:
                # The request need not have the keys of what another package reads.
                digest = reader.model.deployment.digest[:12]
                found.add(
                    everything, Cause.PACKAGE, f"package {digest} reads {reads or 'nothing'}, not {read or 'nothing'}"
                )
                return
        histories = {}
        for name, known in zip(one["views"], one["hashes"], strict=True):
            history = self._origins.history(contract.views[name])
            if isinstance(history, IsthmusError) or contract.views[name].hash != known:
                found.add(everything, Cause.HISTORY, str(history))
                return
            histories[name] = history
        bodies = self._origins.bodies(part, contract, one["hashed"])
        if isinstance(reader, Predictor):
            requests = read_predictions(reader, bodies)
        elif isinstance(reader, Writer):
            requests = read_prompts(reader.prompt, bodies)
        else:
            requests = read_lookups(reader, contract, bodies)
        for place, why in requests.unread.items():
            found.add([place], Cause.KEY, why)
        if not requests.rows.any():
            return
        recorded = Recorded.of(part, requests.rows)
        stored = self._stored(contract, histories, requests, recorded, found)
        if isinstance(reader, Predictor):
            self._predictions(reader, requests, stored, recorded, found)
        elif isinstance(reader, Writer):
            # Token by token: not where it is known already that the prompt is another.
            places = [place for place in np.flatnonzero(requests.rows).tolist() if place not in found.causes]
            texts = reader.differing(bodies, requests, stored, recorded, self._causes, places)
            for number, differs in enumerate(texts, 1):
                progress(number / len(places))
                if differs:
                    found.add([differs[0]], *differs[1:])
        elif reader.computes:
            self._computed(reader, requests, stored, recorded, found)

    def _stored(
        self, contract: Contract, histories: Mapping[str, ViewHistory], requests: Requests, recorded: Recorded,
        found: _Found,
    ) -> dict[str, StoredRows]:  # fmt: skip
        """What the history has of each view, compared with what Redis had."""
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
                    found.add([int(recorded.answer[row])], cause, why)
            stored[name] = now
        return stored

    def _predictions(
        self, predictor: Predictor, requests: Requests, stored: Mapping[str, StoredRows], recorded: Recorded,
        found: _Found,
    ) -> None:  # fmt: skip
        inputs = predictor.inputs(requests.fields, view_answers(stored))
        same_inputs = digests(inputs) == recorded.digest.view(np.uint64)
        outputs, count = predicted(predictor.model, inputs), len(same_inputs)
        equal = _equal(outputs.reshape(count, -1), recorded.outputs.reshape(count, -1))
        for place in np.unique(recorded.answer[~(equal & same_inputs)]).tolist():
            rows = slice(int(recorded.starts[place]), int(recorded.starts[place] + recorded.rows[place]))
            own = {name: values.take(rows) for name, values in inputs.items()}
            # As it was asked for: in others' company, the last bits of a float may be others.
            again = predictor.model.predict(own)
            then = recorded.outputs.reshape(count, -1)[rows]
            if _equal(again.reshape(len(then), -1), then).all() and same_inputs[rows].all():
                continue
            said, was = (part.ravel()[:3].tolist() for part in (again, then))
            model = predictor.model.deployment
            if self._package is not None:
                found.add(
                    [place],
                    Cause.PACKAGE,
                    f"package {model.digest[:12]} says {said}, {recorded.package[:12]} said {was}",
                )
            elif not same_inputs[rows].all():
                found.add(
                    [place],
                    Cause.ENGINE,
                    f"its inputs are others, from the same rows and fields: {self._causes.runtime(recorded, place)}",
                )
            else:
                found.add(
                    [place], Cause.ENGINE, f"the model says {said}, then {was}: {self._causes.runtime(recorded, place)}"
                )

    def _computed(
        self, lookup: Lookup, requests: Requests, stored: Mapping[str, StoredRows], recorded: Recorded, found: _Found
    ) -> None:
        values = computed(lookup.compute(requests.fields, view_answers(stored)))
        same = digests(values) == recorded.digest.view(np.uint64)
        for place in np.unique(recorded.answer[~same]).tolist():
            found.add(
                [place], Cause.ENGINE, f"request transforms compute otherwise: {self._causes.runtime(recorded, place)}"
            )


def _equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Mask:
    if left.shape != right.shape:
        return np.zeros(len(right), bool)
    left, right = (np.ascontiguousarray(side, np.float32) for side in (left, right))
    same: Mask = ((left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))).all(axis=1)
    return same
