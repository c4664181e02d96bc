"""Audit a Feast repository: compare each view's source with the rows that its stores return, one view at a time."""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc

from isthmus.features import clock
from isthmus.features.audit.compare import OnlineRows, compare
from isthmus.features.audit.history import History, same
from isthmus.features.errors import ConfigurationError, IsthmusError, Problem, did_you_mean, one_of
from isthmus.features.feast.existing import encoding, historical, stored
from isthmus.features.feast.existing.repository import Repository, View
from isthmus.features.progress import Progress, silent
from isthmus.features.values.columns import Ints
from isthmus.orchestration.audit.report import AuditFinding, AuditReport, Example, ViewReport

_EXAMPLES = 3
_FARTHEST = 14 * 3_600_000_000
"""The farthest time zone from UTC, in microseconds."""


def audit(
    folder: Path, *, sample: int | None = None, views: Collection[str] = (), progress: Progress = silent
) -> AuditReport:
    """Compare the sources of a Feast repository's views with the rows that its stores return. Write nothing to them.

    Args:
        folder: folder with a `feature_store.yaml`.
        sample: number of keys to compare per view; None compares all.
        views: names of the views to compare; all if empty.
        progress: receives the view, and the share of views that are done.

    Raises:
        ConfigurationError: the settings or the registry cannot be used, or a view does not exist.
        DependencyError: the registry cannot be read. Errors of single views are in the report instead.
    """
    began, now, reports = time.monotonic(), clock.now(), list[ViewReport]()
    with TemporaryDirectory(prefix="isthmus-audit-") as scratch:
        repository = Repository.open(folder, Path(scratch))
        known = repository.views
        if missing := sorted({*views} - {*known}):
            wrong = [Problem(name, f"is not a view{did_you_mean(name, known)}", one_of(known)) for name in missing]
            raise ConfigurationError("audit", wrong)
        chosen = [name for name in sorted(known) if not views or name in views]
        for n, name in enumerate(chosen):
            progress(name, n / len(chosen))
            began_view, view, report = time.monotonic(), known[name], ViewReport(name)
            try:
                if isinstance(view, IsthmusError):
                    raise view
                _Audit(view, sample, now, report).run()
            except IsthmusError as error:
                report.errors.append(str(error))
            report.seconds = round(time.monotonic() - began_view, 2)
            reports.append(report)
        others = (
            ("on-demand", repository.registry.on_demand_feature_views),
            ("label", repository.registry.label_views),
        )
        skipped = [f"Not audited, because no source has their values: {len(items)} {kind} view{'s' * (len(items) > 1)}."
                   for kind, items in others if len(items)]  # fmt: skip
        online, offline = (str(repository.section(name, default)["type"])
                           for name, default in (("online_store", "sqlite"), ("offline_store", "dask")))  # fmt: skip
        return AuditReport(
            str(repository.folder), repository.project, online, offline, _text(now // 1_000_000 * 1_000_000), sample,
            round(time.monotonic() - began, 2), [*repository.notes, *skipped], reports,
        )  # fmt: skip


class _Audit:
    """Audits one view: reads its source at once, and adds findings to the report in `run`."""

    def __init__(self, view: View, sample: int | None, now: int, report: ViewReport) -> None:
        self.view, self.now, self.report, self.every = view, now, report, sample is None
        self.source = view.read()
        if sample is not None:
            distinct = self.source.keys.unique()
            places = np.random.default_rng(0).permutation(len(distinct))[:sample]
            some = pc.is_in(self.source.keys, value_set=distinct.take(places))
            self.source = self.source.take(np.flatnonzero(some))
        cells, errors = view.cells(self.source)
        report.errors += map(str, errors)
        times = (self.source.event, self.source.created)
        self.history = History.of(self.source.keys, *times, cells, now, stored.resolution(view))
        report.rows, report.keys = len(self.source.event), len(self.history)
        report.features = {name: {"compared": 0, "differing": 0} for name in cells}

    def run(self) -> None:
        self._source()
        for part in (self._online, self._join) if len(self.history) else ():
            try:
                part()
            except IsthmusError as error:
                self.report.errors.append(str(error))

    def _source(self) -> None:
        """Find faults of the source alone: future times, duplicates, ties, and values that the declared type rounds."""
        history, everything = self.history, tuple(self.history.cells)
        ahead = np.flatnonzero(self.source.event > self.now)
        near = int(self.source.event.max(initial=0)) - self.now <= _FARTHEST
        self._add("in the future", "wrong time zone" if near else "wrong time", ahead, everything)
        duplicate, tie = history.repeated
        self._add("duplicates", "duplicate rows", history.row[duplicate], everything)
        before, after = history.at(tie - 1), history.at(tie)
        features = {name: int((~same(before[name], after[name])).sum()) for name in everything}
        self._add("tie", "tie", history.row[tie], features)
        for name in everything:
            lost = np.flatnonzero(encoding.loses(self.source.table[name], self.view.types[name]))
            note = f"The declared type {self.view.types[name]} rounds the source, so training and serving differ."
            self._add("rounded", "rounded", lost, [name], note=note)

    def _online(self) -> None:
        if not self.view.feast.online:
            return
        history, report = self.history, self.report
        read = stored.read_online(self.view, history.keys, every=self.every)
        online = OnlineRows(read.present, read.event, {name: read.cells[name] for name in history.cells}, read.unknown)
        differing, differences = compare(
            history, online, self.view.ttl, self.now, partial(self.view.rounded, self.source)
        )
        present = int(online.present.sum())
        report.compared = present * len(history.cells)
        for name, count in differing.items():
            report.features[name].update(compared=present, differing=count)
        ends = [end for _, end in self.view.feast.materialization_intervals]
        for found in differences:
            places, note = history.latest[found.keys], ""
            if found.kind == "stale" and ends:
                newer = int((history.event[places] > clock.micros(max(ends))).sum())
                note = f"Materialized until {max(ends):%Y-%m-%d %H:%M:%S} UTC; {newer} of these rows are newer."
            features = found.features or tuple(history.cells)
            self._add(found.kind, found.cause, history.row[places], features, online, found.keys, note=note)
        if online.unknown:
            report.add(AuditFinding("only online", "unknown key", online.unknown, {}, []))

    def _join(self) -> None:
        history, everything = self.history, tuple(self.history.cells)
        joined = historical.join(self.view, self.source, history, self.now)
        self.report.rows_in, self.report.rows_out = len(joined.at), int(joined.returned.sum())
        copied, tied = (np.isin(joined.place, [*places, *(places - 1)]) for places in history.repeated)
        lost, several = joined.returned == 0, joined.returned > 1
        note = f"{self.report.rows_in} rows in, {self.report.rows_out} rows out."
        for kind, cause, mask in (
            ("lost by the join", "expired", lost & joined.expired),
            ("lost by the join", "join", lost & ~joined.expired),
            ("multiplied by the join", "tie", several & tied),
            ("multiplied by the join", "duplicate rows", several & copied & ~tied),
            ("multiplied by the join", "join", several & ~copied & ~tied),
        ):
            self._add(kind, cause, history.row[joined.place[mask]], everything, at=joined.at[mask], note=note)
        for name, wrong in joined.wrong.items():
            chance, near = tied[wrong], joined.near[name] & ~tied[wrong]
            for cause, mask in (("tie", chance), ("rounded", near), ("join", ~chance & ~near)):
                rows, at = history.row[joined.place[wrong[mask]]], joined.at[wrong[mask]]
                self._add("wrong in the join", cause, rows, [name], at=at)

    def _add(  # noqa: PLR0913 - the parts of a finding
        self, kind: str, cause: str, rows: Ints, features: Mapping[str, int] | Sequence[str],
        online: OnlineRows | None = None, keys: Ints | None = None, at: Ints | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """Add a finding about rows of the source, if there are any, with the first of them as examples.

        `features` are counts by feature, or the names of features that all rows count for. Examples show the online
        rows of `keys` in `online`, or a join at the times `at`.
        """
        if not len(rows):
            return
        counts = dict(features) if isinstance(features, Mapping) else dict.fromkeys(features, len(rows))
        counts = {name: count for name, count in counts.items() if count}
        examples = []
        for n, row in enumerate(rows[:_EXAMPLES].tolist()):
            key = None if keys is None else int(keys[n])
            moment = int(self.source.event[row] if at is None else at[n])
            examples.append(self._example(row, list(counts), online, key, moment))
        self.report.add(AuditFinding(kind, cause, len(rows), counts, examples, note))

    def _example(self, row: int, names: list[str], online: OnlineRows | None, key: int | None, at: int) -> Example:
        mine = {name: self.history.cells[name][row].as_py() for name in names}
        served, moment = dict.fromkeys(names), ""
        if online is not None and key is not None and online.present[key]:
            served, moment = {name: online.cells[name][key].as_py() for name in names}, _text(int(online.event[key]))
        name = next((name for name in names if mine[name] != served[name]), names[0])
        keys = {column: self.source.table[column][row].as_py() for column in self.view.keys}
        line = _line(self.view, keys, name, at if key is None else None)
        event = _text(int(self.source.event[row]))
        return Example(keys, name, encoding.decode(mine[name]), event, encoding.decode(served[name]), moment, line)


def _line(view: View, keys: dict[str, Any], feature: str, at: int | None) -> str:
    """Return a line of Python that reads a feature with Feast's SDK: online, or offline at the time `at`."""
    store, features = f"feast.FeatureStore({str(view.repository.folder)!r})", f'["{view.name}:{feature}"]'
    if at is None:
        return f"{store}.get_online_features({features}, [{keys!r}]).to_dict(include_event_timestamps=True)"
    columns = [f"{name!r}: [{value!r}]" for name, value in keys.items()]
    frame = ", ".join([*columns, f"'event_timestamp': [pandas.Timestamp({_text(at)!r})]"])
    return f"{store}.get_historical_features(pandas.DataFrame({{{frame}}}), {features}).to_df()"


def _text(at: int) -> str:
    return clock.moment(at).isoformat().replace("+00:00", "Z")
