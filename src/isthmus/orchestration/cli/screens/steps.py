"""What a person reads at the end of a step."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isthmus.features import clock
from isthmus.orchestration.cells import FEATURE_COLUMNS, cell, feature_rows
from isthmus.orchestration.cli.screens.terminal import new_console, new_table

if TYPE_CHECKING:
    from isthmus.features.verdict import FeatureVerdict, Verdict
    from isthmus.orchestration.quality.quality import QualityReport, ViewDrift

_SHOWN = 160
"""Characters of a value that a verdict shows; where a server refused, the value is the refusal."""
_TIMES = ("at", "deployed_at", "served")
"""Parts of reports that are microseconds since 1970 UTC."""
_FEW = 4
"""Entries of a mapping that a line shows."""
_MEASURES = {"auc": "AUC", "log_loss": "log loss", "ece": "ECE", "brier": "Brier"}


def show_report(report: Mapping[str, Any]) -> None:
    """Prints the report of one step: a table where it has a row per view, lines otherwise."""
    console = new_console()
    if report and all(isinstance(value, Mapping) for value in report.values()):
        first = next(iter(report.values()))
        table = new_table("", *first)
        for name, row in report.items():
            table.add_row(name, *(cell(value) for value in row.values()))
        console.print(table)
        return
    for key, value in report.items():
        if isinstance(value, list):
            # Sentences have commas of their own.
            between = f"\n{'':>18}" if any(", " in str(item) for item in value) else ", "
            value = f"{len(value)}" if len(value) > 6 else between.join(map(str, value)) or "none"
        console.print(f"[dim]{key:>16}[/]  {escape(_part(key, value))}", highlight=False, soft_wrap=True)


def show_history(events: Sequence[Mapping[str, Any]]) -> None:
    """Prints what was deployed and rolled back."""
    table = new_table("at", "action", "model", "package", "contract", "precision", "why", words=True)
    for one in events:
        table.add_row(
            clock.moment(one["at"]).isoformat(timespec="seconds"), one["action"], escape(one["model"]),
            one["digest"][:12], one["contract"][:12], one["precision"], escape(one["why"]),
        )  # fmt: skip
    new_console().print(table)


def _part(key: str, value: object) -> str:
    """A part of a report on one line: with a mapping's values, if they are few and plain."""
    if isinstance(value, int) and key in _TIMES:
        return clock.moment(value).isoformat(timespec="seconds")
    if not isinstance(value, Mapping):
        return cell(value)
    if len(value) > _FEW or any(isinstance(one, Mapping | list) for one in value.values()):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}, see --json"
    # What is known of a view in a part that is a time, is one.
    parts = (f"{name} {_part(key if key in _TIMES else name, one)}" for name, one in value.items())
    return ", ".join(parts) or "none"


def show_training_set(report: Mapping[str, Any]) -> None:
    """Prints the report of a training set; of one as served, how each feature differs from the ideal join, too."""
    lag = report["lag"]
    show_report({name: value for name, value in report.items() if name != "lag" or not lag})
    if lag:
        table = new_table("as served", "compared", "differing", "older, seconds")
        for view, features in lag.items():
            for feature, one in features.items():
                seconds = one["lag_seconds"]
                older = "-" if seconds is None else f"{seconds:,.1f}"
                table.add_row(f"{view}:{feature}", cell(one["compared"]), cell(one["differing"]), older)
        new_console().print(table)


def show_quality(report: "QualityReport") -> None:
    """Prints what a quality report found: statistics, expectations, drift."""
    console = new_console()
    for name, view in report.views.items():
        rows = view.statistics.rows
        table = new_table(*FEATURE_COLUMNS)
        table.title, table.title_justify = f"{name}: {rows:,} rows, version {view.statistics.version}", "left"
        for row in feature_rows(view.statistics):
            table.add_row(*(cell if len(cell) <= 24 else cell[:23] + "…" for cell in map(escape, row)))
        console.print(table)
        for finding in view.findings:
            word = "[green]holds[/] " if finding.passed else "[red]broken[/]"
            promise = f"{finding.feature} {finding.expectation}".strip()
            console.print(f"  {word} {escape(promise)}: {escape(finding.found)}", highlight=False, soft_wrap=True)
        for drifts in view.drift:
            _show_drift(console, drifts)
        console.print()


def show_verdict(verdict: "Verdict", page: Path) -> None:
    """Prints a verdict: a line per view and for the package, and below what differs, with its first values."""
    from isthmus.features.verdict import merged

    console = new_console()
    table = new_table("", "features", "compared", "equal", "differing", "worst", "tolerance")
    groups = {**verdict.views, "package, inputs": verdict.inputs, "package, outputs": verdict.files}
    for name, features in groups.items():
        if features:
            whole = merged(list(features.values()))
            table.add_row(escape(name), str(len(features)), *_compared(whole))
    console.print(table)
    differing = {name: one for name, one in verdict.named().items() if one.differing}
    if differing:
        table = new_table("differs", "compared", "equal", "differing", "worst", "tolerance")
        for name, one in differing.items():
            table.add_row(f"[red]{escape(name)}[/]", *_compared(one))
        console.print(table)
    for name, one in differing.items():
        console.print(f"[red]{escape(name)}[/]", highlight=False, soft_wrap=True)
        for e in one.examples:
            sides = f"offline {_shown(e.offline)}  online {_shown(e.online)}"
            since = f"{e.event_timestamp or 'no event time':<20}"
            console.print(f"  {since}  {escape(e.key)}  {escape(sides)}", highlight=False, soft_wrap=True)
    if differing:
        console.print()
    word = "[green]passed[/]" if verdict.passed else "[red]failed[/]"
    console.print(
        f"Verdict: {word}, {verdict.compared:,} values compared, {verdict.differing:,} differ.", highlight=False
    )
    left_out = [f"{keys:,} of {view}" for view, keys in verdict.ahead.items() if keys]
    if left_out:
        console.print(f"Left out, because they were pushed since: {escape(', '.join(left_out))}.", highlight=False)
    for name, why in verdict.skipped.items():
        console.print(f"Not compared: {escape(name)}, because {escape(why)}.", highlight=False, soft_wrap=True)
    console.print(f"Page: {escape(str(page))}", highlight=False, soft_wrap=True)


def _compared(one: "FeatureVerdict") -> list[str]:
    worst = "no number" if math.isinf(one.worst) else cell(float(one.worst))
    differing = f"[red]{one.differing:,}[/]" if one.differing else "0"
    return [cell(one.compared), cell(one.compared - one.differing), differing, worst, cell(float(one.tolerance))]


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _show_drift(console: Console, drifts: "ViewDrift") -> None:
    since, until = (f"{clock.moment(at):%Y-%m-%d %H:%M}Z" if at is not None else "now"
                    for at in (drifts.after, drifts.until))  # fmt: skip
    title = f"drift of {drifts.rows:,} rows after {since}"
    title += f" until {until}" if drifts.until is not None else ""
    console.print(f"  {title}, against training set {drifts.training_set} of {drifts.name}", highlight=False)
    if not drifts.rows:
        return
    if not drifts.judged:
        console.print("  these are too few rows to judge")
    table = new_table("feature", "psi", "ks", "wasserstein", "")
    for feature, one in drifts.features.items():
        figures = map(cell, (one.psi, one.ks, one.wasserstein))
        unseen = f" unseen: {', '.join(one.unseen)}" if one.unseen else ""
        word = f"[red]{', '.join(one.exceeded)}[/]" if one.exceeded else ""
        table.add_row(feature, *figures, word + escape(unseen))
    console.print(table)


def show(outcome: Mapping[str, Any]) -> None:
    """Prints the outcome of a demo."""
    console = new_console()
    console.print(f"\n[bold]{outcome['project']}[/]  contract {outcome['contract'][:12]}\n", highlight=False)
    console.print(_views(outcome))
    examples = outcome["training_set"]
    console.print(f"Training set: {examples['rows_in']:,} rows in, {examples['rows_out']:,} rows out.", highlight=False)
    _show_models(console, outcome["distillation"])
    package = outcome["package"]
    sizes = ", ".join(f"{name} {size / 1000:.1f} kB" for name, size in package["bytes"].items())
    console.print(f"Package: {package['path']} ({sizes})", highlight=False, soft_wrap=True)
    verdict = outcome["verdict"]
    word = "[green]passed[/]" if verdict["passed"] else "[red]failed[/]"
    console.print(
        f"Verdict: {word}, {verdict['compared']:,} values compared, {verdict['differing']:,} differ.\n", highlight=False
    )
    for n, (lookup, prediction) in enumerate(zip(outcome["lookups"], outcome["predictions"], strict=True)):
        console.print(_answer(n, lookup, prediction))
    seconds = dict(outcome["seconds"])
    total = seconds.pop("total")
    steps = "  ".join(f"{step} {value:.1f}" for step, value in seconds.items())
    console.print(f"Seconds: {steps}  [bold]total {total:.1f}[/]\n", highlight=False)


def _views(outcome: Mapping[str, Any]) -> Table:
    table = new_table("view", "rows", "keys", "changed", "written", "verified", "differing")
    for name, built in outcome["views"].items():
        counts = outcome["materialize"][name]
        features = outcome["verdict"]["views"][name].values()
        verified = sum(feature["compared"] for feature in features)
        differing = sum(feature["differing"] for feature in features)
        row = (built["rows"], counts["compared"], counts["changed"], counts["written"], verified, differing)
        table.add_row(name, *map(cell, row))
    return table


def show_distillation(report: Mapping[str, Any]) -> None:
    """Prints the report of a distillation."""
    console = new_console()
    _show_models(console, report)
    if not report["trained"]:
        console.print(f"Nothing has changed since student {report['id']} was trained, so nothing was trained: "
                      "--again trains it anew.", highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"Student, with report.html: {report['path']}", highlight=False, soft_wrap=True)


def show_export(report: Mapping[str, Any]) -> None:
    """Prints the report of an export: each model file, and what is served at which cost."""
    console, served = new_console(), report["served"]
    show_report({name: value for name, value in report.items() if name not in ("worst", "quality", "served")})
    measures = dict.fromkeys(name for found in report["quality"].values() for name in found)
    table = new_table("model file", "worst difference", *(_MEASURES.get(name, name) for name in measures))
    for file, worst in report["worst"].items():
        quality = (cell(report["quality"].get(file, {}).get(name)) for name in measures)
        table.add_row(escape(file), cell(worst), *quality)
    console.print(table)
    threads = f"{served['threads']} thread{'s' if served['threads'] > 1 else ''}"
    figures = [
        f"p50 {served['p50_us']:,.1f} µs", f"p99 {served['p99_us']:,.1f} µs",
        f"{served['requests_per_second']:,.0f} requests/s", f"{served['memory_mb']:,.1f} MiB",
        f"{served['load_ms']:,.1f} ms to the first answer",
    ]  # fmt: skip
    console.print(f"Served: {served['precision']}, on this host with {threads}: {', '.join(figures)}.", highlight=False,
                  soft_wrap=True)  # fmt: skip


def show_search(report: Mapping[str, Any]) -> None:
    """Prints what a search found: the students that no other one beats, and what to write for the best."""
    console, tried = new_console(), report["tried"]
    shown = sorted((tried[number] for number in report["front"]), key=lambda one: one["p50_us"])
    if shown:
        measure = _MEASURES.get(report["metric"], report["metric"])
        table = new_table("", *shown[0]["shape"], "precision", measure, "p50 µs", "p99 µs", "kB", "MiB")
        for one in shown:
            mark = "[green]recommended[/]" if one["number"] == report["recommended"] else f"{one['number']}"
            figures = [f"{one['score']:.4f}", f"{one['p50_us']:,.1f}", f"{one['p99_us']:,.1f}"]
            table.add_row(
                mark, *(escape(str(value)) for value in one["shape"].values()), one["precision"], *figures,
                f"{one['bytes'] / 1000:,.1f}", f"{one['memory_mb']:,.1f}",
            )  # fmt: skip
        table.caption = f"{measure} on the validation part, of the exported graph; no other student is better in all"
        table.caption_justify = "left"
        console.print(table)
    counts = {word: sum(one["status"] == word for one in tried) for word in ("trained", "over budget", "failed")}
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    console.print(f"{len(tried)} students: {words}. Budget: {report['budget']['words']}.", highlight=False)
    for file, line in report["lines"].items():
        console.print(
            f"{file}: {escape(line)}".replace("\n", f"\n{'':>{len(file) + 2}}"), highlight=False, soft_wrap=True
        )
    console.print(f"Page: {report['path']}/search.html", highlight=False, soft_wrap=True)


def _show_models(console: Console, report: Mapping[str, Any]) -> None:
    console.print(_models(report["models"]))
    console.print(_gained(report), highlight=False)


def _models(models: Mapping[str, Mapping[str, Any]]) -> Table:
    measures = list(models["student"]["quality"])
    table = new_table("model", *(_MEASURES.get(one, one) for one in measures), "parameters", "kB", "p50 µs", "p99 µs")
    for name, told in models.items():
        # None where a measure has no number, as the PSNR of equal images.
        figures = ["" if (value := told["quality"][one]) is None else f"{value:.4f}" for one in measures]
        counted = ["" if told["parameters"] is None else f"{told['parameters']:,}"]
        counted += ["" if told["bytes"] is None else f"{told['bytes'] / 1000:,.1f}"]
        table.add_row(name, *figures, *counted, f"{told['p50_us']:,.0f}", f"{told['p99_us']:,.0f}")
    table.caption = "\n".join(f"{name}: {told['about']}" for name, told in models.items())
    table.caption_justify = "left"
    return table


def _gained(report: Mapping[str, Any]) -> str:
    """What the teacher was good for, with its interval over the seeds."""
    measure = _MEASURES.get(report["metric"], report["metric"])
    taught, closed = report["taught"], report["gap_closed"]
    words = f"The teacher adds {taught['value']:+.4f} to the student's {measure}{_spread(taught, '+.4f')}"
    if closed is not None:
        words += f", {closed['value']:.0%} of the way from the control to the teacher{_spread(closed, '.0%')}"
    return (
        f"{words}. {len(report['seeds'])} seed{'s' if len(report['seeds']) > 1 else ''}; shipped: {report['shipped']}."
    )


def _spread(found: Mapping[str, Any], form: str) -> str:
    return "" if found["low"] is None else f" (95 %: {found['low']:{form}} to {found['high']:{form}})"


def _answer(n: int, lookup: Mapping[str, Any], prediction: Mapping[str, Any]) -> Table:
    answer = lookup["answer"]
    names, results = answer["metadata"]["feature_names"], answer["results"]
    asked = ", ".join(f"{key}={values[0]}" for key, values in lookup["request"]["entities"].items())
    probability = prediction["answer"]["predictions"][0]
    table = Table(title=f"{asked}: probability {probability:.3f}", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("feature")
    table.add_column("value", justify="right")
    table.add_column("status")
    features = [i for i, name in enumerate(names) if "__" in name]
    shown = features[:: max(1, len(features) // 5)][:5]
    for i in shown:
        table.add_row(names[i], cell(results[i]["values"][0]), results[i]["statuses"][0])
    if n == 0:
        table.caption = f"{len(shown)} of {len(features)} features of the answer"
    return table
