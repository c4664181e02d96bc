"""Output of the other verbs, from the plain data of their reports."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isthmus.features import clock
from isthmus.features.document.blocks import Block, Fields, Paragraph, TableBlock, cell

_TIMES = ("at", "deployed_at", "served")  # entries in microseconds since 1970 UTC
_ENTRIES = 4  # longer mappings are not printed on a line


def report_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    if report and all(isinstance(value, Mapping) for value in report.values()):
        columns = list(next(iter(report.values())))
        rows = [[name, *map(cell, row.values())] for name, row in report.items()]
        yield TableBlock(["", *columns], rows, numbers=columns)
    else:
        yield Fields([(key, _items(value) if isinstance(value, list | tuple) else _part(key, value))
                      for key, value in report.items()])  # fmt: skip


def apply_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    sources = {
        f"source {name}": ", ".join(f"{column} {kind}" for column, kind in columns.items())
        for name, columns in report["sources"].items()
    }
    streams = {"streams": report["streams"]} if report["streams"] else {}
    left = {key: value for key, value in report.items() if key not in ("sources", "streams")}
    yield from report_blocks({**left, **streams, **sources})


def stream_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    columns = ["events", "late", "unreadable", "events not read", "watermark"]
    rows = [
        [name, *(cell(status[key]) for key in columns[:3]), cell(sum(status["lag"].values())),
         clock.moment(status["watermark"]).isoformat(timespec="seconds")]
        for name, status in report.items()
    ]  # fmt: skip
    yield TableBlock(["source", *columns], rows, numbers=columns[:4])
    written = [[view, cell(count)] for status in report.values() for view, count in status["rows"].items()]
    yield TableBlock(["view", "rows written"], written, numbers=["rows written"])


def maintenance_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    columns = {"merged": "files merged", "deleted": "data files deleted", "entries": "log files deleted",
               "freed": "bytes freed"}  # fmt: skip
    rows = [[name, *(cell(table[key]) for key in columns)] for name, table in report["tables"].items()]
    yield TableBlock(["table", *columns.values()], rows, numbers=[*columns.values()])
    yield Paragraph(f"Bytes freed in caches: {sum(report['caches'].values()):,}")


def _items(values: Sequence[Any]) -> str:
    if len(values) > 6:
        return f"{len(values)}"
    separator = "\n" if any(", " in str(value) for value in values) else ", "
    return separator.join(map(str, values)) or "none"


def _part(key: str, value: object) -> str:
    if isinstance(value, int) and key in _TIMES:
        return clock.moment(value).isoformat(timespec="seconds")
    if not isinstance(value, Mapping):
        return cell(value)
    if len(value) > _ENTRIES or any(isinstance(entry, Mapping | list) for entry in value.values()):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}, see --json"
    # Values of a mapping inherit the unit of its key.
    entries = (f"{name} {_part(key if key in _TIMES else name, entry)}" for name, entry in value.items())
    return ", ".join(entries) or "none"


def training_set_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    lag = report["lag"]
    yield from report_blocks({name: value for name, value in report.items() if name != "lag" or not lag})
    if lag:
        columns = ["compared", "differing", "older, seconds"]
        rows = [
            [
                f"{view}:{name}", cell(feature["compared"]), cell(feature["differing"]),
                "-" if feature["lag_seconds"] is None else f"{feature['lag_seconds']:,.1f}",
            ]
            for view, features in lag.items()
            for name, feature in features.items()
        ]  # fmt: skip
        yield TableBlock(["as served", *columns], rows, numbers=columns)


def export_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    served = report["served"]
    yield from report_blocks(
        {name: value for name, value in report.items() if name not in ("worst", "quality", "served", "advice")}
    )
    measures = list(dict.fromkeys(name for quality in report["quality"].values() for name in quality))
    rows = [
        [file, cell(worst), *(cell(report["quality"].get(file, {}).get(name)) for name in measures)]
        for file, worst in report["worst"].items()
    ]
    columns = ["worst difference", *measures]
    yield TableBlock(["model file", *columns], rows, numbers=columns)
    threads = f"{served['threads']} thread{'s' if served['threads'] > 1 else ''}"
    yield Paragraph(
        f"Served: {served['precision']}, on this host with {threads}: p50 {served['p50_us']:,.1f} µs, "
        f"p99 {served['p99_us']:,.1f} µs, {served['requests_per_second']:,.0f} requests/s, "
        f"{served['memory_mb']:,.1f} MiB, {served['load_ms']:,.1f} ms to the first answer."
    )
    if report["advice"]:
        yield Paragraph(report["advice"])
