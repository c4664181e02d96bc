"""`Tally`: metrics of one thread that cost a request almost nothing, in the formats of prometheus_client.

Counters of prometheus_client took 7 % more CPU time for a small lookup. Workers that share a port write their numbers
to files in its multiprocess format, and expose only these. So no counter decreases when another worker answers.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from isthmus.features.latency import quantile

K = TypeVar("K")
V = TypeVar("V")

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)
"""Upper bounds in seconds, from a lookup of a single key to the longest wait for Redis."""


class Memo(dict[K, V]):
    """A dictionary that makes a missing value by calling `make` with its key, and stores it."""

    def __init__(self, make: Callable[[K], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


@dataclass(slots=True, eq=False)
class CounterValue:
    """The value of a metric for one set of label values. `key` is its name in a file of prometheus_client."""

    key: str
    value: float = 0.0


@dataclass(slots=True, eq=False)
class Seconds:
    """A histogram of durations: the count in each bucket, and the sum."""

    bounds: tuple[float, ...]
    counts: list[CounterValue]
    total: CounterValue

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)].value += 1
        self.total.value += seconds


class Family:
    """A metric: its numbers or histograms by label values.

    `kind` is "counter", "gauge" or "histogram". `name` has no `_total`, `merge` is prometheus_client's mode of merging
    the gauges of several workers, and `bounds` are the upper bounds of a histogram's buckets in seconds.
    """

    def __init__(
        self, kind: str, name: str, text: str, labels: tuple[str, ...], merge: str = "",
        bounds: tuple[float, ...] = BUCKETS,
    ) -> None:  # fmt: skip
        self.kind, self.name, self.text, self.labels = kind, name, text, labels
        self.bounds, self._shown = bounds, [*map(floatToGoString, bounds), "+Inf"]
        self.file = f"{kind}_{merge}" if merge else kind
        self.numbers: list[CounterValue] = []
        self._numbers = Memo(partial(self._new, "_total" if kind == "counter" else ""))
        self._seconds = Memo(self._new_seconds)

    def number(self, *values: str) -> CounterValue:
        return self._numbers[values]

    def seconds(self, *values: str) -> Seconds:
        return self._seconds[values]

    def counts(self, *values: str) -> list[int]:
        seconds = self._seconds.get(values)
        return [int(number.value) for number in seconds.counts] if seconds else [0] * len(self._shown)

    def collect(self) -> Metric:
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.text, labels=self.labels)
            for values, seconds in self._seconds.items():
                counts = accumulate(number.value for number in seconds.counts)
                histogram.add_metric(values, list(zip(self._shown, counts, strict=True)), seconds.total.value)
            return histogram
        metric = Metric(self.name, self.text, self.kind)
        suffix = "_total" if self.kind == "counter" else ""
        for values, number in self._numbers.items():
            metric.add_sample(self.name + suffix, dict(zip(self.labels, values, strict=True)), number.value)
        return metric

    def _new_seconds(self, values: tuple[str, ...]) -> Seconds:
        counts = [self._new("_bucket", values, bound) for bound in self._shown]
        return Seconds(self.bounds, counts, self._new("_sum", values))

    def _new(self, suffix: str, values: tuple[str, ...], bound: str | None = None) -> CounterValue:
        labels = [*self.labels] if bound is None else [*self.labels, "le"]
        all_values = [*values] if bound is None else [*values, bound]
        number = CounterValue(mmap_key(self.name, self.name + suffix, labels, all_values, self.text))
        self.numbers.append(number)
        return number


class Tally:
    """The metrics of a process, or of all processes that share `folder`. Without a folder, nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._families: list[Family] = []
        self._files: dict[str, MmapedDict] = {}

    def counter(self, name: str, text: str, *labels: str) -> Family:
        return self._add(Family("counter", name.removesuffix("_total"), text, labels))

    def gauge(self, name: str, text: str, *labels: str, merge: str) -> Family:
        return self._add(Family("gauge", name, text, labels, merge))

    def histogram(self, name: str, text: str, *labels: str, bounds: tuple[float, ...] = BUCKETS) -> Family:
        return self._add(Family("histogram", name, text, labels, bounds=bounds))

    def quantiles(self, family: str, label: str, *shares: float) -> dict[str, tuple[int, list[float]]]:
        """Return the count and quantiles, in seconds, of a histogram for each value of `label` that has observations.

        `family` is the name of the histogram, and `shares` are the quantiles to compute, such as 0.99 for the p99. With
        several workers, includes the observations of all of them.
        """
        groups: dict[str, dict[float, float]] = {}
        for metric in self.collect():
            for sample in metric.samples if metric.name == family else ():
                if sample.name.endswith("_bucket"):
                    cumulative = groups.setdefault(sample.labels[label], {})
                    bound = float(sample.labels["le"])
                    cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
        quantiles = {}
        for value, cumulative in groups.items():
            bounds = sorted(cumulative)
            counts = {bound: cumulative[bound] - cumulative.get(lower, 0) for lower, bound in pairwise((-1.0, *bounds))}
            if total := int(cumulative[math.inf]):
                quantiles[value] = (total, [quantile(counts, share) for share in shares])
        return quantiles

    def write(self) -> None:
        if self._folder is None:
            return
        for family in self._families:
            if family.numbers and family.file not in self._files:
                path = str(self._folder / f"{family.file}_{os.getpid()}.db")
                self._files[family.file] = MmapedDict(path)  # type: ignore[no-untyped-call]  # so in prometheus_client
            for number in family.numbers:
                self._files[family.file].write_value(number.key, number.value, 0.0)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.write()
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]
        self._files.clear()

    def collect(self) -> Iterator[Metric]:
        if self._folder is None:
            yield from (family.collect() for family in self._families if family.numbers)
        else:
            self.write()
            yield from MultiProcessCollector(None, str(self._folder)).collect()  # type: ignore[no-untyped-call]

    def _add(self, family: Family) -> Family:
        self._families.append(family)
        return family
