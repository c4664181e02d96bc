"""Whether a package answers like its student: a part of the verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from isthmus.distill.export.candidate import Limits, require_student
from isthmus.distill.onnx.runtime import ask
from isthmus.distill.restore import restored
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.samples import take
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.types import Answers, Array, Index, spread
from isthmus.features.types import Float64, Int64
from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Values
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.golden import read_golden
from isthmus.package.inputs import feeds
from isthmus.package.manifest import WHOLE, Package, Variant
from isthmus.package.prompts import decoder_of, read_prompts
from isthmus.package.replay import open_session, rounding, shares
from isthmus.package.verdict import FeatureVerdict, ValueDifference, compare

LEAST, BYTES = 16, 4 << 20
"""Rows that a slow runtime is asked of a sample: at least so many, else as many as have so many bytes together."""

Ask = Callable[[Sequence[Case]], Sequence[Answers]]
"""A model file in a runtime: its outputs for each batch. Raises a PackageError if it does not answer."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Rows for model files, in batches, with the student's answers.

    Attributes:
        names: of each row, for examples.
        times: event time of each row in microseconds, or None.
    """

    cases: Sequence[Case]
    names: Sequence[str]
    times: Sequence[int | None]

    def __len__(self) -> int:
        return len(self.names)


class Parity:
    """A package beside its student in torch. Examples name rows by the columns in `keys`.

    Raises:
        PackageError: the package is of another student.
        ContractMismatch: the student was trained with something else.
        DataError: the student cannot be read.
    """

    def __init__(self, material: Material, package: Package, model_folder: Path, keys: Sequence[str] = ()) -> None:
        manifest, trained = package.manifest, restored(material, model_folder)
        require_student(package, trained.id)
        self._task, self._student, self._inputs = trained.task, trained.student, manifest.model_inputs
        self._limits = Limits.of(trained.task, trained.student, trained.task.material.parts.test)
        self._table, self._keys = trained.task.material.student_table, list(keys)
        # What feeds a core on a device feeds it here.
        self._head = Head.loads(package.files.read(HEAD)) if HEAD in manifest.files else None
        golden = read_golden(package)
        self._recorded = [case.outputs for case in golden.cases]
        # A model of rows gets its columns as the manifest describes them.
        self._golden = [
            Case(feeds(self._inputs, golden.columns(case, self._inputs)) if self._inputs else case.feeds, {},
                 core={name: tensor.array for name, tensor in case.core.items()})
            for case in golden.cases
        ]  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of the training set that a complete comparison asks of each file."""
        return min(int(self._task.compared), int(self._table.num_rows))

    @property
    def sampled(self) -> int:
        """Rows of them that are enough of a slow runtime."""
        row = sum(tensor.nbytes for tensor in self._task.feeds(np.zeros(1, np.int64)).values())
        return min(self.rows, max(LEAST, BYTES // max(row, 1)))

    def sample(self, count: int) -> Questions:
        """Rows spread over the training set."""
        rows, inputs = spread(self._table.num_rows, count), self._inputs
        labels = self._table.take(rows).select(self._keys).to_pylist() if self._keys else map("row {}".format, rows)
        cases = []
        for batch in self._task.graph_batches(rows):
            case = self._task.case(self._student, batch)
            cases.append(self._fed(case, columns(self._table.take(batch), inputs)) if inputs else case)
        times = micros(self._table["event_timestamp"].take(rows)).tolist()
        return Questions(cases, [*map(str, labels)], times)

    def on_device(
        self, offline: Mapping[str, Values], fed: Mapping[str, Values], names: Sequence[str], at: int
    ) -> tuple[Questions, Index]:
        """Rows whose stored features a device has, and their places among these; of a model of rows.

        Each column is an input of the package: `fed` has what the device feeds, `offline` what it must be. A row that a
        request transform refuses has no answer, and is left out.
        """
        _, refused = self._task.material.request_inputs.complete(offline)
        places = np.flatnonzero(~refused)
        raw = take(fed, places)
        case = self._fed(self._task.raw_case(self._student, raw), raw)
        expected = self._task.raw_case(self._student, take(offline, places)).expected
        labels = [names[place] for place in places.tolist()]
        return Questions([replace(case, expected=expected)], labels, [at] * len(places)), places

    def _fed(self, case: Case, raw: Mapping[str, Values]) -> Case:
        """A case with what the package makes of raw values."""
        core = case.core if self._head is None else self._head.feeds(raw).tensors
        return replace(case, feeds=feeds(self._inputs, raw), core=core)

    def check(self, variant: Variant, ask: Ask, *questions: Questions, golden: bool = True) -> FeatureVerdict:
        """Compares a model file with the student, and with its own golden cases.

        It must answer rows like the student and the golden cases as recorded, within the tolerance of the task,
        whatever the manifest says. Of an output with many numbers in a row, the comparison shows that which differs
        most.
        """
        cases = [case for part in questions for case in part.cases]
        expected: list[Answers] = [case.expected for case in cases]
        places = [name for part in questions for name in part.names]
        times = [time for part in questions for time in part.times]
        if golden:
            cases += self._golden
            recorded = [outputs[variant.file] for outputs in self._recorded]
            expected += [{name: tensor.array for name, tensor in outputs.items()} for outputs in recorded]
        answers = ask(cases)
        limits = {name: self._limits.limit(variant.precision, name) for name in answers[0]}
        sides = [_worst(ours, theirs, limits) for ours, theirs in zip(expected, answers, strict=True)]
        for number, (side, *_) in enumerate(sides[sum(len(part.cases) for part in questions) :]):
            places += [f"golden case {number}, row {row}" for row in range(len(side))]
            times += [None] * len(side)
        *both, allowed, outputs = (np.concatenate(side) for side in zip(*sides, strict=True))
        if len(limits) > 1:
            places = [f"{place}, output {name}" for place, name in zip(places, outputs.tolist(), strict=True)]
        left, right = (Values(side, np.ones(len(places), bool)) for side in both)
        return compare(places, left, right, Float64, allowed, times)

    def prompts(self, package: Package) -> dict[str, FeatureVerdict]:
        """The tokens that files of ONNX Runtime say behind the golden prompts; nothing where a package has none.

        In fp32 they must be those of the student in torch, in fewer bits those that are recorded.
        """
        writer = self._task.writer(self._student)
        if writer is None:
            return {}
        reference, recorded, compared = writer.reference, read_prompts(package), {}
        alike = [(prompt.text, prompt.tokens) for prompt in recorded] == [
            (prompt.text, prompt.tokens) for prompt in reference.prompts
        ]
        for variant in package.manifest.variants:
            if variant.format not in WHOLE:
                continue
            name = f"{variant.file} behind prompts"
            if not alike:
                compared[name] = self._unanswered(variant, "golden prompts that are not the student's")
                continue
            expected = [[*prompt.answers.get(variant.file, ())] for prompt in recorded]
            run = partial(ask, open_session(package, variant, 1))
            decoder = decoder_of(package.manifest, variant)
            said = [
                [read.token for read in decoder.greedy(run, prompt.tokens, len(tokens))] if tokens else []
                for prompt, tokens in zip(recorded, expected, strict=True)
            ]
            if variant.precision == "fp32":
                # Each side ends before a close decision of its own.
                expected = [sure[: len(tokens)] for sure, tokens in zip(reference.sure, expected, strict=True)]
                said = [tokens[: len(sure)] for tokens, sure in zip(said, expected, strict=True)]
            compared[name] = _compare_tokens([prompt.text for prompt in recorded], expected, said)
        return compared

    def refused(self, variant: Variant, problem: str, *questions: Questions) -> FeatureVerdict:
        """The comparison of a file that does not answer: all rows differ, and the example says why."""
        return self._unanswered(variant, problem, max(1, sum(map(len, questions))))

    def _unanswered(self, variant: Variant, problem: str, count: int = 1) -> FeatureVerdict:
        example = ValueDifference("every row", "an answer", problem)
        return FeatureVerdict(count, count, np.inf, [example], self._limits.largest(variant.precision))


def _compare_tokens(
    prompts: Sequence[str], expected: Sequence[Sequence[int]], said: Sequence[Sequence[int]]
) -> FeatureVerdict:
    """Tokens behind each prompt on both sides, by their place."""
    places, pairs = [], []
    for prompt, *sides in zip(prompts, expected, said, strict=True):
        for place, pair in enumerate(zip_longest(*sides, fillvalue=-1)):
            places.append(f"token {place} behind {prompt!r:.60}")
            pairs.append(pair)
    both = np.array(pairs, np.int64).reshape(-1, 2)
    left, right = (Values(side, np.ones(len(places), bool)) for side in both.T)
    return compare(places, left, right, Int64, 0.0, [None] * len(places))


def _worst(expected: Answers, outputs: Answers, limits: Mapping[str, float]) -> tuple[Array, Array, Array, Array]:
    """The number of each row that is farthest beyond its limit: expected and answered, its limit and its output."""
    rows, names = len(expected[next(iter(outputs))]), np.array([*outputs])
    allowed = np.array([limits[name] for name in outputs])
    if any(values.shape != expected[name].shape for name, values in outputs.items()) or not rows:
        count = max(rows, 1) if any(values.shape != expected[name].shape for name, values in outputs.items()) else 0
        return np.zeros(count), np.full(count, np.nan), np.full(count, allowed.max()), np.full(count, names[0])
    pairs = [[side.reshape(rows, -1).astype(np.float64) for side in (expected[name], values)]
             for name, values in outputs.items()]  # fmt: skip
    ours, theirs = (np.concatenate(side, 1) for side in zip(*pairs, strict=True))
    with np.errstate(invalid="ignore"):
        differences = np.abs(ours - theirs)
    # A number that a single side has differs most of all; two NaNs agree, and so do two infinities.
    differences = np.where(np.isnan(differences), np.inf, differences)
    differences = np.where((ours == theirs) | np.isnan(ours) & np.isnan(theirs), 0.0, differences)
    places = np.repeat(np.arange(len(names)), [side.shape[1] for side, _ in pairs])
    floats = np.array([values.dtype.kind == "f" for values in outputs.values()])[places]
    within = np.maximum(allowed[places], np.where(floats, rounding(ours), 0.0))
    column = shares(differences, within).argmax(1)
    worst = (np.arange(rows), column)
    return ours[worst], theirs[worst], within[worst], names[places[column]]
