"""Requests to steps and the events they report, as plain data that passes between processes."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.document.blocks import Block, cell
from isthmus.features.document.markdown import to_markdown

Metadata = dict[str, Any]
"""Names mapped to numbers, texts, or {"type": ..., "raw_value": ...} in the format of Dagster Pipes."""
REPORT = "report"  # the metadata entry that holds the complete report
DRIFT = "resembles_its_training"  # the check that makes a model due for training when it fails
FAILED = "failed"  # name of the Pipes message that carries a StepFailure
_HASH = re.compile("[0-9a-f]{64}")
_PLOT_CHARACTERS = 50_000  # limit for the images of one event


class StepRequest(msgspec.Struct, frozen=True):
    """The selected part of a step.

    Attributes:
        nodes: ids of the nodes to materialize.
        checks: (node id, check name) pairs to run.
        days: first day, and the day after the last; None for all.
        everything: `days` covers every day of the project.
    """

    step: str
    nodes: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    days: tuple[str, str] | None = None
    everything: bool = False


@dataclass(frozen=True)
class NodeMaterialization:
    node: str
    version: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCheck:
    """Result of a check. `message` says why it failed; a failed `blocking` check stops everything downstream."""

    node: str
    check: str
    passed: bool
    message: str = ""
    metadata: Metadata = field(default_factory=dict)
    blocking: bool = True


class StepFailure(msgspec.Struct, frozen=True):
    """Failure of a step. `passes` means that a retry may succeed."""

    sentence: str
    passes: bool = False


def report_metadata(report: Mapping[str, Any], began: float, series: Sequence[str] = ()) -> Metadata:
    """Return the scalar entries of a report, followed by the whole report as JSON.

    Dagster plots every number over time. Only the entries named in `series` stay numbers; other numbers become text.
    Hashes are shortened to 12 characters; the JSON has them in full.
    """
    plain = msgspec.to_builtins(report, str_keys=True, enc_hook=str)
    figures = {name: plain[name] for name in series} | {"seconds": round(time.perf_counter() - began, 3)}
    single = {name: _text(name, value) for name, value in plain.items() if isinstance(value, int | float | str)}
    single = {name: text for name, text in single.items() if text != ""}
    return {**figures, **(single | figures), REPORT: {"raw_value": plain, "type": "json"}}


def _text(name: str, value: float | str) -> Any:
    """Return a scalar in a form that Dagster does not plot: a timestamp, a path, a short hash, or text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and (name == "at" or name.endswith("_at")):
        return {"raw_value": value / 1e6, "type": "timestamp"}
    if isinstance(value, str) and Path(value).is_absolute():
        return {"raw_value": value, "type": "path"}
    return value[:12] if isinstance(value, str) and _HASH.fullmatch(value) else cell(value)


def display_metadata(event: NodeMaterialization | NodeCheck) -> Metadata:
    """Return the metadata for Dagster, with floats rounded to four digits.

    Numbers of a check become text: Dagster would plot each as a single point.
    """
    if isinstance(event, NodeMaterialization):
        rounded = {name: float(f"{v:.4g}") for name, v in event.metadata.items() if isinstance(v, float)}
        return event.metadata | rounded
    # Dagster ignores line breaks in text.
    message = {"found": "; ".join(event.message.splitlines())} if event.message else {}
    return message | {
        name: cell(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in event.metadata.items()
    }


def markdown(*blocks: Block) -> Metadata:
    return {"raw_value": to_markdown(blocks), "type": "md"}


def plots(images: Mapping[str, str]) -> Metadata:
    """Format images as Markdown, up to a size limit: Dagster loads them with every list of events."""
    shown, left = [], _PLOT_CHARACTERS
    for name, address in images.items():
        left -= len(address)
        title = re.sub(r"([^\w\s.,]|_)", r"\\\1", name)
        shown += [f"**{title}**", f"![{title}]({address})" if left >= 0 else "is on the page"]
    return {"raw_value": "\n\n".join(shown), "type": "md"}
