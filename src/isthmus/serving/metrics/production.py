"""The gauges of production quality, from the file that `isthmus monitor` writes."""

import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus.features.production import PackageQuality, Production, Quality, production_file
from isthmus.serving.deployment.deployment import Deployment
from isthmus.serving.watchedfile import WatchedFile


class ProductionGauges:
    """What labels say of the deployed package; nothing until there is a file of its model beside the deployment."""

    def __init__(self, deployment: Path) -> None:
        self._state = deployment.parent
        self._file: WatchedFile[Production] | None = None

    def look(self, model: str) -> None:
        """Reads the file of a model if it has changed."""
        path = production_file(self._state, model)
        if self._file is None or self._file.path != path:
            self._file = WatchedFile(path, Production.loads)
        if self._file.changed():
            self._file.load()

    def collect(self, deployment: Deployment) -> Iterator[Metric]:
        """The gauges of a deployment."""
        file, model = self._file, deployment.model
        if file is None or not isinstance(file.content, Production) or file.content.model != model:
            return
        found = file.content
        age = GaugeMetricFamily(
            "isthmus_production_age_seconds", "Since production quality was last measured.", labels=["model"]
        )
        if (written := file.written) is not None:
            age.add_metric([model], max(time.time() - written, 0.0))
        yield age
        package = found.of(deployment.digest, deployment.precision) or found.of(deployment.digest)
        if package is None:
            return
        yield from _quality(model, package)
        yield from _drift(model, package)
        broken = GaugeMetricFamily(
            "isthmus_production_bound_broken", "Whether a bound on production quality is broken.",
            labels=["model", "metric"],
        )  # fmt: skip
        # They are about the package that answered last, which may have been rolled back since.
        if found.packages[0] == package:
            for bound in found.bounds:
                broken.add_metric([model, bound.measure], bound.broken)
        yield broken


def _quality(model: str, package: PackageQuality) -> Iterator[Metric]:
    periods: dict[str, Quality] = {"all": package}
    if week := next((week for week in reversed(package.weeks) if week.rows), None):
        periods["week"] = week
    labels = ["model", "metric", "period"]
    quality = "isthmus_production_quality"
    value = GaugeMetricFamily(
        quality, "A measure of the deployed package's answers by their labels: of all, or of the newest week with any.",
        labels=labels,
    )  # fmt: skip
    low = GaugeMetricFamily(f"{quality}_low", "The lower end of its 95 % interval.", labels=labels)
    high = GaugeMetricFamily(f"{quality}_high", "The upper end of its 95 % interval.", labels=labels)
    answers = GaugeMetricFamily("isthmus_production_answers", "Rows that were answered.", labels=["model", "period"])
    rows = GaugeMetricFamily(
        "isthmus_production_rows", "Rows of answers whose labels are known, each label once.",
        labels=["model", "period"],
    )  # fmt: skip
    for period, part in periods.items():
        answers.add_metric([model, period], part.answers)
        rows.add_metric([model, period], part.rows)
        for name, measure in part.measures.items():
            value.add_metric([model, name, period], measure.value)
            if measure.low is not None and measure.high is not None:
                low.add_metric([model, name, period], measure.low)
                high.add_metric([model, name, period], measure.high)
    yield from (value, low, high, answers, rows)


def _drift(model: str, package: PackageQuality) -> Iterator[Metric]:
    index = GaugeMetricFamily(
        "isthmus_production_drift",
        "Population stability index of what was served of an input, or of the scores, against the training set.",
        labels=["model", "input"],
    )
    drifted = GaugeMetricFamily(
        "isthmus_production_drifted", "Whether that is beyond threshold, chance and usual variation.",
        labels=["model", "input"],
    )  # fmt: skip
    for found in package.drift:
        index.add_metric([model, found.name], found.psi)
        drifted.add_metric([model, found.name], bool(found.exceeded))
    yield from (index, drifted)
