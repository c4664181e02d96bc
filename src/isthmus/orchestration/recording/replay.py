"""Recompute recorded answers from history and packages, and compare them bit by bit (`isthmus answers replay`)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from isthmus.features.errors import GateFailed, IsthmusError, RequestError
from isthmus.features.progress import Progress, silent
from isthmus.features.values.columns import Mask
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.mismatches import Causes
from isthmus.orchestration.recording.requests import LIMITS, prompt_of, read_tensors
from isthmus.orchestration.recording.served import (
    Cause,
    Group,
    ServedAnswers,
    UnreadableAnswersError,
    predict_all,
    split_answers,
)
from isthmus.orchestration.recording.storedrows import view_answers
from isthmus.package.generation.decoder import Array
from isthmus.package.generation.prompt import LOGITS, NEW
from isthmus.package.manifest import open_package
from isthmus.package.prompts import generation_of
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.columns import computed
from isthmus.serving.recorder.digest import digests, tensors_digest, text_digest

# Answers that a report names for each cause.
EXAMPLES = 10

# Index of an answer that differs, the cause, and an explanation.
Difference = tuple[int, Cause, str]


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A recorded answer that differs when it is recomputed, or that cannot be recomputed.

    `at` is the time of the answer (ISO 8601, UTC), `cause` a value of `Cause`, and `found` the explanation.
    """

    id: str
    at: str
    cause: str
    found: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay. Recomputed answers count as `same` if they are equal bit by bit.

    `causes` counts the differing answers by cause. `differences` has at most 10 examples of each cause.
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
    """Recompute recorded answers from the history and the models, and compare them bit by bit. Writes nothing.

    Pass either `identity`, the id of one answer, or a time range: `first` (included), `end` (excluded), or both. Times
    without a time zone are UTC. If `package` is set, the model in that folder recomputes the answers instead of the
    models that gave them. Reports different answers, and answers that cannot be recomputed, without raising an error;
    `require_same` raises one for them.

    Raises RequestError if the arguments are invalid or no such answer is recorded. Raises PackageError if `package` is
    damaged. Raises DataError if the table, a contract, or the secret that hashes private join keys cannot be read.
    """
    if (identity is None) == (first is None and end is None):
        raise RequestError("replay", "needs an answer id or a time range", expected="ID, or --from and --to")
    first, end = _zoned(first), _zoned(end)
    if first and end and first >= end:
        raise RequestError("range", "is empty", expected="a start before the end")
    if package is not None:
        open_package(package)
    progress("reading recorded answers", 0.0)
    served = ServedAnswers(project, package)
    answers = served.read(first=first, end=end) if identity is None else served.answer(identity)
    if not len(answers):
        raise RequestError("recorded answers", "the table has none in that time range",
                           remedy="run `isthmus answers collect`; answers older than `keep_days` are gone")  # fmt: skip
    causes = Causes(project)
    counts, shown = Counter[Cause](), dict[Cause, list[ReplayDifference]]()
    parts = list(split_answers(answers))
    for number, part in enumerate(parts):
        progress("recomputing answers", number / len(parts))
        found: dict[int, tuple[Cause, str]] = {}
        try:
            done = partial(_regenerating, progress, number, len(parts))
            for place, cause, why in _differences(served.open(part), causes, package is not None, done):
                found.setdefault(place, (cause, why))
        except UnreadableAnswersError as error:
            found = dict.fromkeys(range(len(part)), (error.cause, str(error)))
        for place, (cause, why) in sorted(found.items()):
            counts[cause] += 1
            if len(examples := shown.setdefault(cause, [])) < EXAMPLES:
                moment = part["at"][place].as_py().isoformat().replace("+00:00", "Z")
                examples.append(ReplayDifference(part["id"][place].as_py(), moment, cause.value, why))
    progress("all answers are recomputed", 1.0)
    return Replay(
        len(answers), int(pc.sum(answers["rows"]).as_py()), len(answers) - counts.total(),
        {cause.value: count for cause, count in counts.most_common()},
        [difference for examples in shown.values() for difference in examples],
    )  # fmt: skip


def require_same(report: Replay) -> None:
    if report.causes:
        named = ", ".join(f"{count:,} by {cause}" for cause, count in report.causes.items())
        raise GateFailed("replay", f"{report.answers - report.same:,} of {report.answers:,} answers differ: {named}",
                         expected="all the same")  # fmt: skip


def _zoned(moment: datetime | None) -> datetime | None:
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def _regenerating(progress: Progress, number: int, groups: int, done: float) -> None:
    progress("regenerating texts", (number + done) / groups)


def _differences(
    group: Group, causes: Causes, another: bool, progress: Callable[[float], None]
) -> Iterator[Difference]:
    """Recompute a group of answers and yield the differences.

    `another` is True if another package than the recorded one recomputes them.
    """
    reader, model = group.reader, group.model
    if isinstance(reader, TensorPredictor):
        yield from _tensors(group, reader, causes, another)
        return
    unequal = set(group.requests.unread)
    for place, why in group.requests.unread.items():
        yield place, Cause.KEY, why
    if not group.requests.rows.any():
        return
    for name in group.histories:
        for row, cause, why in causes.explain(group, name):
            place = int(group.answer[row])
            unequal.add(place)
            yield place, cause, why
    if isinstance(reader, Lookup):
        yield from _computed(group, reader, causes)
    elif isinstance(reader, Predictor):
        yield from _predictions(group, reader.model, causes, another)
    elif model is not None:
        # Generation is slow: skip texts whose prompt is known to differ.
        places = [place for place in np.flatnonzero(group.requests.rows).tolist() if place not in unequal]
        for number, place in enumerate(places, 1):
            differing = _text(group, reader, model, place, causes, another)
            progress(number / len(places))
            if differing:
                yield differing


def _computed(group: Group, lookup: Lookup, causes: Causes) -> Iterator[Difference]:
    if not lookup.computes:
        return
    values = computed(lookup.compute(group.requests.fields, view_answers(group.now)))
    for place in np.unique(group.answer[digests(values) != group.digest]).tolist():
        yield place, Cause.ENGINE, f"request transforms compute different values: {causes.runtime(group, place)}"


def _predictions(group: Group, model: DeployedModel, causes: Causes, another: bool) -> Iterator[Difference]:
    inputs = group.inputs(group.now)
    same_inputs = digests(inputs) == group.digest
    count = len(same_inputs)
    outputs, recorded = predict_all(model, inputs).reshape(count, -1), group.outputs.reshape(count, -1)
    for place in np.unique(group.answer[~(_equal(outputs, recorded) & same_inputs)]).tolist():
        rows = slice(int(group.starts[place]), int(group.starts[place] + group.requests.rows[place]))
        then = recorded[rows]
        # Rerun in the original batch: other batch sizes may change the last bits of a float.
        again = model.predict({name: values.take(rows) for name, values in inputs.items()}).reshape(len(then), -1)
        if _equal(again, then).all() and same_inputs[rows].all():
            continue
        now, before = (part.ravel()[:3].tolist() for part in (again, then))
        if another:
            package = group.answers["package"][0].as_py()
            why = f"package {model.deployment.digest[:12]} returns {now}, {package[:12]} returned {before}"
            yield place, Cause.PACKAGE, why
        elif same_inputs[rows].all():
            why = f"the model returns {now}, and returned {before}: {causes.runtime(group, place)}"
            yield place, Cause.ENGINE, why
        else:
            why = f"the same rows and fields give different inputs: {causes.runtime(group, place)}"
            yield place, Cause.ENGINE, why


def _tensors(group: Group, predictor: TensorPredictor, causes: Causes, another: bool) -> Iterator[Difference]:
    package = predictor.model.deployment.digest[:12]
    columns = [group.answers[name].to_pylist() for name in ("digest", "package")]
    for place, (body, (then,), former) in enumerate(zip(group.bodies, *columns, strict=True)):
        try:
            assert isinstance(body, bytes)  # noqa: S101 - tensors have no private keys
            _, inputs, _ = predictor.read(read_tensors(body), LIMITS)
            now = tensors_digest(predictor.model.run(inputs.feeds, inputs.outputs))
        except (IsthmusError, msgspec.MsgspecError) as error:
            yield place, Cause.PACKAGE, f"package {package} cannot answer: {error}"
            continue
        if now == then % (1 << 64):
            continue
        if another:
            yield place, Cause.PACKAGE, f"package {package} returns other tensors than {former[:12]} did"
        else:
            yield place, Cause.ENGINE, f"the model returns other tensors: {causes.runtime(group, place)}"


def _text(
    group: Group, prompt: Prompt, model: DeployedModel, place: int, causes: Causes, another: bool
) -> Difference | None:
    package, cause = model.deployment.digest[:12], Cause.PACKAGE if another else Cause.ENGINE
    row = group.starts[place : place + 1]
    fields = {name: values.take(row) for name, values in group.requests.fields.items()}
    rows = view_answers({name: own.take(row) for name, own in group.now.items()})
    before, count = group.outputs.reshape(-1, 2)[row[0]].astype(int).tolist()
    assert model.text is not None  # noqa: S101 - its manifest says how it generates text
    tokenizer, decoder = model.text

    def run(feeds: dict[str, Array]) -> Mapping[str, Array]:
        return model.run(feeds, (LOGITS, NEW))

    try:
        parts = generation_of(model.manifest).parts(prompt_of(group.bodies[place]), prompt.features(fields, rows))
        tokens = tokenizer.encode(parts)
        generated = [read.token for read in decoder.greedy(run, tokens, count)]
    except IsthmusError as error:
        return place, cause, f"package {package} cannot write the text: {error}"
    if text_digest(tokens, generated) == int(group.digest[row[0]]):
        return None
    if another:
        former = group.answers["package"][0].as_py()
        return place, cause, f"package {package} writes a different text than {former[:12]} did"
    what = (
        f"its prompt has {len(tokens):,} tokens, and had {before:,}" if len(tokens) != before
        else f"the {count:,} tokens of its text differ"
    )  # fmt: skip
    return place, cause, f"{what}: {causes.runtime(group, place)}"


def _equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Mask:
    if left.shape != right.shape:
        return np.zeros(len(right), bool)
    left, right = (np.ascontiguousarray(side, np.float32) for side in (left, right))
    same: Mask = ((left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))).all(axis=1)
    return same
