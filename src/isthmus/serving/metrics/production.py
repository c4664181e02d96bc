"""Gauges of production quality, read from the file that `isthmus answers monitor` writes."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus.features.production import PackageQuality, Production, Quality, production_file
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.watchedfile import WatchedFile

LONGEST = 120
"""Maximum characters in the name of a slice."""


class ProductionGauges:
    """Gauges of the deployed package's quality; none until the model has a quality file next to the deployment."""

    def __init__(self, deployment: Path) -> None:
        self._state = deployment.parent
        self._file: WatchedFile[Production] | None = None

    def look(self, model: str) -> None:
        """Read the file of a model if it has changed."""
        path = production_file(self._state, model)
        if self._file is None or self._file.path != path:
            self._file = WatchedFile(path, Production.loads)
        if self._file.changed():
            self._file.load()

    def collect(self, deployment: Deployment) -> Iterator[Metric]:
        file, model = self._file, deployment.model
        if file is None or not isinstance(file.content, Production) or file.content.model != model:
            return
        production = file.content
        age = GaugeMetricFamily(
            "isthmus_production_age_seconds", "Time since production quality was last measured.", labels=["model"]
        )
        if (written := file.written) is not None:
            age.add_metric([model], max(time.time() - written, 0.0))
        yield age
        package = production.of(deployment.digest, deployment.precision) or production.of(deployment.digest)
        if package is None:
            return
        yield from _quality(model, package)
        yield from _slices(model, package)
        yield from _drift(model, package)
        broken = GaugeMetricFamily(
            "isthmus_production_bound_broken", "1 if a bound on production quality is broken.",
            labels=["model", "metric"],
        )  # fmt: skip
        # The bounds apply to the package that was deployed at the time of the measurement.
        if production.packages[0] == package:
            for bound in production.bounds:
                broken.add_metric([model, bound.measure], bound.broken)
        yield broken


def _quality(model: str, package: PackageQuality) -> Iterator[Metric]:
    periods: dict[str, Quality] = {"all": package}
    if week := next((week for week in reversed(package.weeks) if week.rows), None):
        periods["week"] = week
    yield from _measured(
        model, "isthmus_production", "period", periods,
        "A quality metric of the deployed package, from labeled answers: all, or the newest week with any.",
    )  # fmt: skip


def _slices(model: str, package: PackageQuality) -> Iterator[Metric]:
    # Slice names contain text from requests, so limit their length.
    parts = {
        (name if len(name := part.name) <= LONGEST else f"{name[: LONGEST - 1]}…"): part
        for part in package.slices[::-1]
    }
    yield from _measured(
        model, "isthmus_production_slice", "slice", parts,
        "A quality metric of one of the worst slices of the deployed package's labeled answers.",
    )  # fmt: skip


def _measured(model: str, prefix: str, label: str, parts: Mapping[str, Quality], text: str) -> Iterator[Metric]:
    labels = ["model", "metric", label]
    value = GaugeMetricFamily(f"{prefix}_quality", text, labels=labels)
    low = GaugeMetricFamily(f"{prefix}_quality_low", "Lower end of its 95 % interval.", labels=labels)
    high = GaugeMetricFamily(f"{prefix}_quality_high", "Upper end of its 95 % interval.", labels=labels)
    answers = GaugeMetricFamily(f"{prefix}_answers", "Rows that were answered.", labels=["model", label])
    rows = GaugeMetricFamily(
        f"{prefix}_rows", "Answered rows with known labels, each label once.", labels=["model", label]
    )
    for name, part in parts.items():
        answers.add_metric([model, name], part.answers)
        rows.add_metric([model, name], part.rows)
        for metric, measure in part.measures.items():
            value.add_metric([model, metric, name], measure.value)
            if measure.low is not None and measure.high is not None:
                low.add_metric([model, metric, name], measure.low)
                high.add_metric([model, metric, name], measure.high)
    yield from (value, low, high, answers, rows)


def _drift(model: str, package: PackageQuality) -> Iterator[Metric]:
    index = GaugeMetricFamily(
        "isthmus_production_drift",
        "Population stability index of the served values of an input, or of the scores, against the training set.",
        labels=["model", "input"],
    )
    drifted = GaugeMetricFamily(
        "isthmus_production_drifted", "1 if the drift exceeds threshold, chance and usual variation.",
        labels=["model", "input"],
    )  # fmt: skip
    for drift in package.drift:
        index.add_metric([model, drift.name], drift.psi)
        drifted.add_metric([model, drift.name], bool(drift.exceeded))
    yield from (index, drifted)
