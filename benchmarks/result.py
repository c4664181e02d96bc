"""Comparisons that benchmarks measure, printed as a table or as JSON."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


@dataclass(frozen=True)
class Comparison:
    """A case measured for Isthmus, and usually for a peer, in the same run.

    Attributes:
        case: name of the case.
        metric: unit of both figures.
        ours: figure of Isthmus.
        peer: figure of the peer, if there is one.
        peer_name: name of the peer.
        ratio: factor by which Isthmus is better.
        bar: target for the ratio, or for our figure without a peer; None if there is no target.
        holds: True if the target is met.
    """

    case: str
    metric: str
    ours: float
    peer: float | None
    peer_name: str | None
    ratio: float | None
    bar: float | None
    holds: bool | None


@dataclass(frozen=True)
class Line:
    """A figure over another one, which the report draws: their titles and values."""

    x_title: str
    x: Sequence[float]
    y_title: str
    y: Sequence[float]


def more(case: str, metric: str, ours: float, peer: float, peer_name: str, bar: float | None = None) -> Comparison:
    """Compare figures where more is better."""
    ratio = ours / peer
    return Comparison(case, metric, ours, peer, peer_name, round(ratio, 2), bar, None if bar is None else ratio >= bar)


def less(case: str, metric: str, ours: float, peer: float, peer_name: str, bar: float | None = None) -> Comparison:
    """Compare figures where less is better."""
    ratio = peer / ours
    return Comparison(case, metric, ours, peer, peer_name, round(ratio, 2), bar, None if bar is None else ratio >= bar)


def at_least(case: str, metric: str, ours: float, bar: float) -> Comparison:
    """Check a figure without a peer against a minimum."""
    return Comparison(case, metric, ours, None, None, None, bar, ours >= bar)


def at_most(case: str, metric: str, ours: float, bar: float) -> Comparison:
    """Check a figure without a peer against a maximum."""
    return Comparison(case, metric, ours, None, None, None, bar, ours <= bar)


def plain_figure(case: str, metric: str, ours: float) -> Comparison:
    """A figure without a peer or a target."""
    return Comparison(case, metric, ours, None, None, None, None, None)


def options_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options --json and --quick; `quick` is the help of the latter."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def note(text: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"{text}\n")


def report(
    name: str, comparisons: Sequence[Comparison], *, as_json: bool, quick: bool, line: Line | None = None
) -> int:
    """Print the comparisons, and save a full run for the report. Return 1 if a target is missed."""
    rows = [asdict(comparison) for comparison in comparisons]
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        at, drawn = datetime.now(UTC).isoformat(timespec="minutes"), None if line is None else asdict(line)
        run = {"at": at, "machine": machine(), "comparisons": rows, "line": drawn}
        (RESULTS / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        terminal = Console()
        terminal.width = max(terminal.width, 150)
        terminal.print(table(comparisons))
    return int(any(comparison.holds is False for comparison in comparisons))


def table(comparisons: Sequence[Comparison]) -> Table:
    shown = Table("case", "metric", "ours", "peer", "", "ratio", "target", "")
    for one in comparisons:
        shown.add_row(
            one.case, one.metric, f"{one.ours:,.4g}" if one.ours < 1e4 else f"{one.ours:,.0f}",
            "" if one.peer is None else f"{one.peer:,.4g}" if one.peer < 1e4 else f"{one.peer:,.0f}",
            one.peer_name or "", "" if one.ratio is None else f"{one.ratio:.1f}x",
            "" if one.bar is None else f"{one.bar:g}", {None: "", True: "met", False: "missed"}[one.holds],
        )  # fmt: skip
    return shown


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"
