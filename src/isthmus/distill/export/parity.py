"""Compare a package with the student that it was made from, as part of the verdict (`isthmus.package.verdict`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from isthmus.distill.export.candidate import ParityLimits, require_student
from isthmus.distill.restore import restore
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.samples import take
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.types import Answers, Array, Index, evenly_spaced
from isthmus.features.errors import PackageError
from isthmus.features.types import Float64, Int64
from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Values
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.golden import read_golden
from isthmus.package.inputs import feeds
from isthmus.package.manifest import WHOLE, Package, Variant
from isthmus.package.prompts import generate_greedy, read_prompts
from isthmus.package.replay import open_session, relative_differences, rounding
from isthmus.package.verdict import FeatureVerdict, ValueDifference, compare

LEAST, BYTES = 16, 4 << 20
"""Rows of a sample for a slow runtime: as many as fit in this many bytes, but at least this many."""

Ask = Callable[[Sequence[Case]], Sequence[Answers]]
"""A function that runs a model file on batches. It raises a PackageError if the file does not answer."""


@dataclass(frozen=True, eq=False)
class ParityRows:
    """Batches of rows with the student's outputs. `names` label the rows, and `times` are microseconds or None."""

    cases: Sequence[Case]
    names: Sequence[str]
    times: Sequence[int | None]

    def __len__(self) -> int:
        return len(self.names)


class Parity:
    """Compare a package with its student in torch. Examples name rows by the columns in `keys`.

    Raises a PackageError if the package is not from this student, a ContractMismatch if training set or declaration
    changed since the training, and a DataError if the student cannot be read.
    """

    def __init__(self, material: Material, package: Package, model_folder: Path, keys: Sequence[str] = ()) -> None:
        manifest, trained = package.manifest, restore(material, model_folder)
        require_student(package, trained.id)
        self._task, self._student, self._inputs = trained.task, trained.student, package.model_inputs
        self._limits = ParityLimits.of(trained.task, trained.student, trained.task.material.parts.test)
        self._table, self._keys = trained.task.material.student_table, list(keys)
        # A core gets its inputs from the head, as on a device.
        self._head = Head.loads(package.files.read(HEAD)) if HEAD in manifest.files else None
        golden = read_golden(package)
        self._recorded = [case.outputs for case in golden.cases]
        # Build the inputs of row models from columns, as the manifest describes.
        self._golden = [
            Case(feeds(self._inputs, golden.columns(case, self._inputs)) if self._inputs else case.feeds, {},
                 core={name: tensor.array for name, tensor in case.core.items()})
            for case in golden.cases
        ]  # fmt: skip

    @property
    def rows(self) -> int:
        return min(int(self._task.compared), int(self._table.num_rows))

    @property
    def slow_runtime_rows(self) -> int:
        row = sum(tensor.nbytes for tensor in self._task.feeds(np.zeros(1, np.int64)).values())
        return min(self.rows, max(LEAST, BYTES // max(row, 1)))

    def sample(self, count: int) -> ParityRows:
        rows, inputs = evenly_spaced(self._table.num_rows, count), self._inputs
        labels = self._table.take(rows).select(self._keys).to_pylist() if self._keys else map("row {}".format, rows)
        cases = []
        for batch in self._task.graph_batches(rows):
            case = self._task.case(self._student, batch)
            cases.append(self._fed(case, columns(self._table.take(batch), inputs)) if inputs else case)
        times = micros(self._table["event_timestamp"].take(rows)).tolist()
        return ParityRows(cases, [*map(str, labels)], times)

    def device_rows(
        self, offline: Mapping[str, Values], device_values: Mapping[str, Values], names: Sequence[str], event_time: int
    ) -> tuple[ParityRows, Index]:
        """Return rows to check a package with the feature values that a device stores, and the outputs to expect.

        Leaves out rows that a request transform rejects, and also returns the indexes of the remaining rows in
        `device_values`. Works only for models that predict from rows of features.

        Args:
            offline: values of the offline store, a column per input, from which the student computes the expected
                outputs.
            device_values: values that the device stores, a column per input, which the package gets as inputs.
            names: name of each row, for messages.
            event_time: event time of all rows, in microseconds since 1970 UTC.
        """
        _, refused = self._task.material.request_inputs.complete(offline)
        places = np.flatnonzero(~refused)
        raw = take(device_values, places)
        case = self._fed(self._task.raw_case(self._student, raw), raw)
        expected = self._task.raw_case(self._student, take(offline, places)).expected
        labels = [names[place] for place in places.tolist()]
        return ParityRows([replace(case, expected=expected)], labels, [event_time] * len(places)), places

    def _fed(self, case: Case, raw: Mapping[str, Values]) -> Case:
        core = case.core if self._head is None else self._head.feeds(raw).tensors
        return replace(case, feeds=feeds(self._inputs, raw), core=core)

    def check(self, variant: Variant, ask: Ask, *samples: ParityRows, golden: bool = True) -> FeatureVerdict:
        """Run a model file on some rows, and return a verdict that compares its outputs with the student's.

        In a row with several outputs, the verdict counts the number that most exceeds its limit.

        Args:
            variant: manifest entry of the file.
            ask: runs the file on a list of cases and returns its outputs.
            samples: rows with the student's outputs.
            golden: True to also compare the golden cases, with the outputs that the package records.

        Raises:
            PackageError: the file does not answer.
        """
        cases = [case for part in samples for case in part.cases]
        expected: list[Answers] = [case.expected for case in cases]
        places = [name for part in samples for name in part.names]
        times = [time for part in samples for time in part.times]
        if golden:
            cases += self._golden
            recorded = [outputs[variant.file] for outputs in self._recorded]
            expected += [{name: tensor.array for name, tensor in outputs.items()} for outputs in recorded]
        expected, answers = ([*map(self._limits.comparable, side)] for side in (expected, ask(cases)))
        limits = {name: self._limits.limit(variant.precision, name) for name in answers[0]}
        sides = [_worst(ours, theirs, limits) for ours, theirs in zip(expected, answers, strict=True)]
        for number, (side, *_) in enumerate(sides[sum(len(part.cases) for part in samples) :]):
            places += [f"golden case {number}, row {row}" for row in range(len(side))]
            times += [None] * len(side)
        *both, allowed, outputs = (np.concatenate(side) for side in zip(*sides, strict=True))
        if len(limits) > 1:
            places = [f"{place}, output {name}" for place, name in zip(places, outputs.tolist(), strict=True)]
        left, right = (Values(side, np.ones(len(places), bool)) for side in both)
        return compare(places, left, right, Float64, allowed, times)

    def prompts(self, package: Package) -> dict[str, FeatureVerdict]:
        """Check that each ONNX Runtime file of a language model generates the right tokens; return a verdict per file.

        Each file continues the golden prompts. In fp32, the tokens must equal the student's in torch, up to the first
        token that rounding may change. In lower precisions, they must equal the tokens that the package records. A file
        fails if it cannot run, or if the prompts in the package are not the student's. The key of a verdict is the
        file's name and " behind prompts". Returns {} if the student is not a language model.
        """
        writer = self._task.writer(self._student)
        if writer is None:
            return {}
        reference, recorded, compared = writer.reference, read_prompts(package), {}
        same_prompts = [(prompt.text, prompt.tokens) for prompt in recorded] == [
            (prompt.text, prompt.tokens) for prompt in reference.prompts
        ]
        for variant in package.manifest.variants:
            if variant.format not in WHOLE:
                continue
            name = f"{variant.file} behind prompts"
            if not same_prompts:
                compared[name] = self._unanswered(variant, "golden prompts differ from the student's")
                continue
            expected = [[*prompt.answers.get(variant.file, ())] for prompt in recorded]
            try:
                actual = generate_greedy(package, variant, open_session(package, variant, 1), recorded)
            except PackageError as error:
                compared[name] = self._unanswered(variant, error.found)
                continue
            if variant.precision == "fp32":
                # Each side ends before its own first close decision.
                expected = [
                    sure[: len(tokens)] for sure, tokens in zip(reference.certain_tokens, expected, strict=True)
                ]
                actual = [tokens[: len(sure)] for tokens, sure in zip(actual, expected, strict=True)]
            compared[name] = _compare_tokens([prompt.text for prompt in recorded], expected, actual)
        return compared

    def unanswered_verdict(self, variant: Variant, problem: str, *samples: ParityRows) -> FeatureVerdict:
        return self._unanswered(variant, problem, max(1, sum(map(len, samples))))

    def _unanswered(self, variant: Variant, problem: str, count: int = 1) -> FeatureVerdict:
        example = ValueDifference("every row", "an answer", problem)
        return FeatureVerdict(count, count, np.inf, [example], self._limits.largest(variant.precision))


def _compare_tokens(
    prompts: Sequence[str], expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]
) -> FeatureVerdict:
    places, pairs = [], []
    for prompt, *sides in zip(prompts, expected, actual, strict=True):
        for place, pair in enumerate(zip_longest(*sides, fillvalue=-1)):
            places.append(f"token {place} after {prompt!r:.60}")
            pairs.append(pair)
    both = np.array(pairs, np.int64).reshape(-1, 2)
    left, right = (Values(side, np.ones(len(places), bool)) for side in both.T)
    return compare(places, left, right, Int64, 0.0, [None] * len(places))


def _worst(expected: Answers, outputs: Answers, limits: Mapping[str, float]) -> tuple[Array, Array, Array, Array]:
    """Return for each row the number that most exceeds its limit: expected and actual value, limit, output name."""
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
    # NaN on one side only is the largest difference; two NaNs are equal, and so are two infinities.
    differences = np.where(np.isnan(differences), np.inf, differences)
    differences = np.where((ours == theirs) | np.isnan(ours) & np.isnan(theirs), 0.0, differences)
    places = np.repeat(np.arange(len(names)), [side.shape[1] for side, _ in pairs])
    floats = np.array([values.dtype.kind == "f" for values in outputs.values()])[places]
    within = np.maximum(allowed[places], np.where(floats, rounding(ours), 0.0))
    column = relative_differences(differences, within).argmax(1)
    worst = (np.arange(rows), column)
    return ours[worst], theirs[worst], within[worst], names[places[column]]
