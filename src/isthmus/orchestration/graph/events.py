"""The requests to steps and their reports: plain data, whichever process runs the step."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.document.blocks import cell

Metadata = dict[str, Any]
"""Name to a number or text, or to {"type": ..., "raw_value": ...} as Dagster Pipes writes it."""
REPORT = "report"
"""The entry of the metadata with the complete report."""
DRIFT = "resembles_its_training"
"""The check that blocks nothing: when it fails, the model is due for training."""
FAILED = "failed"
"""Name of the Pipes message that carries a `Failed`."""
_HASH = re.compile("[0-9a-f]{64}")
_PLOT_CHARACTERS = 50_000
"""The limit for the images of an event."""


class Request(msgspec.Struct, frozen=True):
    """What to do of a step: its nodes to materialize, or node and name of its checks to run.

    `days` are the first day, and the day after the last; `everything` is whether these are all the days of the project.
    """

    step: str
    nodes: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    days: tuple[str, str] | None = None
    everything: bool = False


@dataclass(frozen=True)
class Materialized:
    """A node was materialized: its id, the version of its content, and what Dagster shows with it."""

    node: str
    version: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A check of a node was run; `message` is why it failed, `blocking` whether that holds up everything downstream."""

    node: str
    check: str
    passed: bool
    message: str = ""
    metadata: Metadata = field(default_factory=dict)
    blocking: bool = True


class Failed(msgspec.Struct, frozen=True):
    """Why a step failed, in a sentence, and whether a retry may succeed."""

    sentence: str
    passes: bool = False


def reported(report: Mapping[str, Any], began: float, series: Sequence[str] = ()) -> Metadata:
    """A report as JSON, with its single figures before it.

    Dagster plots a number over time, so only those of a `series` stay numbers, and come first; others become text. A
    hash is shortened: the JSON has all of it.
    """
    plain = msgspec.to_builtins(report, str_keys=True, enc_hook=str)
    figures = {name: plain[name] for name in series} | {"seconds": round(time.perf_counter() - began, 3)}
    single = {name: _text(name, value) for name, value in plain.items() if isinstance(value, int | float | str)}
    single = {name: text for name, text in single.items() if text != ""}
    return {**figures, **(single | figures), REPORT: {"raw_value": plain, "type": "json"}}


def _text(name: str, value: float | str) -> Any:
    """A figure that Dagster shows without a plot: a time, a path to copy, a short hash, or text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and (name == "at" or name.endswith("_at")):
        return {"raw_value": value / 1e6, "type": "timestamp"}
    if isinstance(value, str) and Path(value).is_absolute():
        return {"raw_value": value, "type": "path"}
    return value[:12] if isinstance(value, str) and _HASH.fullmatch(value) else cell(value)


def shown(event: Materialized | Checked) -> Metadata:
    """What Dagster shows of an event: numbers with four digits, and those of a check as text, since each is one point.

    The series of the same figures are those of the asset.
    """
    if isinstance(event, Materialized):
        rounded = {name: float(f"{v:.4g}") for name, v in event.metadata.items() if isinstance(v, float)}
        return event.metadata | rounded
    # Dagster shows the lines of a text as one.
    message = {"found": "; ".join(event.message.splitlines())} if event.message else {}
    return message | {
        name: cell(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in event.metadata.items()
    }


def table(rows: Iterable[Sequence[str]], columns: Sequence[str]) -> Metadata:
    """Rows as a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return {"raw_value": "\n".join("| " + " | ".join(line) + " |" for line in lines), "type": "md"}


def plots(images: Mapping[str, str]) -> Metadata:
    """Images as Markdown, up to a limit: Dagster stores them in the event and loads them with every list of events."""
    shown, left = [], _PLOT_CHARACTERS
    for name, address in images.items():
        left -= len(address)
        title = re.sub(r"([^\w\s.,]|_)", r"\\\1", name)
        shown += [f"**{title}**", f"![{title}]({address})" if left >= 0 else "is on the page"]
    return {"raw_value": "\n\n".join(shown), "type": "md"}
