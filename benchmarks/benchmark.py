"""Run all benchmarks and write one page with the results: `make benchmark`.

Each benchmark runs several times in its own process. A ratio is the median of the runs, shown with the minimum and
maximum. A benchmark that cannot run is listed with the reason.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from result import machine

from isthmus.features.document.blocks import (
    Block,
    Code,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    aside,
    bad,
    good,
)  # fmt: skip
from isthmus.features.document.charts import Bar, ChartRow, rows_chart
from isthmus.features.document.html import to_html
from isthmus.features.files import write_atomically

ROOT = Path(__file__).parents[1]
REMEDIES = {
    "wrk": "the package wrk of your system (apt-get install wrk, brew install wrk); pip has none",
    "redis-server": "the package redis-server of your system (apt-get install redis-server, brew install redis)",
    "java": "Java 17 (apt-get install openjdk-17-jre-headless, brew install openjdk@17)",
}
"""Installation instructions for programs that pip cannot install."""
LIBRARIES = ("isthmus", "feast", "duckdb", "polars", "pyarrow", "pyspark", "pysail", "torch", "scikit-learn",
             "onnxruntime", "deltalake")  # fmt: skip
FLOOR = 0.1


@dataclass(frozen=True)
class Benchmark:
    title: str
    script: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return " ".join(["python", f"benchmarks/{self.script}.py", *self.options])


BENCHMARKS = (
    Benchmark("Point-in-time joins", "offline", ("--only", "joins"), ("java",)),
    Benchmark("Writes of what changed", "offline", ("--only", "writes"), ("redis-server",)),
    Benchmark("Reads of a maintained table", "offline", ("--only", "upkeep")),
    Benchmark("Lookups", "online", ("--only", "lookups"), ("redis-server", "wrk")),
    Benchmark("Writes", "online", ("--only", "writes"), ("redis-server",)),
    Benchmark("Request features", "request"),
    Benchmark("Training", "distill"),
    Benchmark("Parity, and the model on a device", "parity"),
)


def main() -> int:
    """Write the page; return 1 if a benchmark failed, or if a target was missed at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and two runs: a quarter of an hour")
    parser.add_argument("--runs", type=int, help="runs of each benchmark (default: 3, or 2 with --quick)")
    parser.add_argument("--only", nargs="+", choices=sorted({one.script for one in BENCHMARKS}))
    parser.add_argument("--page", type=Path, default=Path("benchmark.html"))
    options = parser.parse_args()
    runs = options.runs or (2 if options.quick else 3)
    chosen = [one for one in BENCHMARKS if options.only is None or one.script in options.only]
    blocks, failed = introduction(runs, quick=options.quick), False
    for one in chosen:
        blocks += [Heading(one.title), Paragraph(one.command)]
        try:
            rows = summaries([measured(one, quick=options.quick) for _ in range(runs)])
        except RuntimeError as error:
            failed = True
            sys.stderr.write(f"{one.command}: {error}\n")
            blocks.append(Paragraph(bad(f"Not measured: {error}")))
            continue
        failed |= not options.quick and any(row["holds"] is False for row in rows)
        blocks += section(rows)
    write_atomically(options.page, to_html("Benchmarks of Isthmus", blocks).encode())
    sys.stdout.write(f"{options.page.resolve()}\n")
    return int(failed)


def measured(benchmark: Benchmark, *, quick: bool) -> list[dict[str, Any]]:
    if missing := [name for name in benchmark.needs if shutil.which(name) is None]:
        raise RuntimeError("; ".join(f"{name} is not on PATH: install {REMEDIES[name]}" for name in missing))
    sys.stderr.write(f"{benchmark.command}{' --quick' if quick else ''}\n")
    command = [sys.executable, str(ROOT / "benchmarks" / f"{benchmark.script}.py"), "--json", *benchmark.options]
    with tempfile.TemporaryDirectory(prefix="bench-") as results:
        # Leave benchmarks/results alone: docs/performance.md shows the results of single scripts.
        environment = {**os.environ, "BENCHMARK_RESULTS": results}
        done = subprocess.run(
            command + ["--quick"] * quick, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    # Exit code 1 means that a target was missed; the comparisons are printed anyway.
    if done.returncode not in (0, 1) or not done.stdout.startswith("["):
        lines = done.stderr.strip().splitlines() or [f"exited with {done.returncode} and no message"]
        raise RuntimeError(lines[-1])
    comparisons: list[dict[str, Any]] = json.loads(done.stdout)
    return comparisons


def summaries(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return medians over the runs, with the minimum and maximum of the figure that the target applies to."""
    rows = []
    for same in zip(*runs, strict=True):
        first = same[0]
        deciding = "ours" if first["ratio"] is None else "ratio"
        row = {**first, "low": min(one[deciding] for one in same), "high": max(one[deciding] for one in same)}
        row |= {key: median(one[key] for one in same) for key in ("ours", "peer", "ratio") if first[key] is not None}
        if first["bar"] is not None:
            row["holds"] = row["ours"] <= row["bar"] if first["ratio"] is None else row["ratio"] >= row["bar"]
        rows.append(row)
    return rows


def introduction(runs: int, *, quick: bool) -> list[Block]:
    versions: list[tuple[str, Text]] = [(name, version(name)) for name in LIBRARIES]
    versions += [(name, version_line(name, "--version" if name != "wrk" else "-v")) for name in REMEDIES]
    commit = version_line("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    how = "with small sizes: a check that everything runs, not figures to quote" if quick else "on an idle machine"
    return [
        Heading("Benchmarks of Isthmus", 1),
        Paragraph(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()}, {platform.system()} {platform.release()}."),
        Paragraph(f"Medians of {runs} runs, {how}. Minimum and maximum are below each ratio. A ratio above 1 means "
                  "that Isthmus is better."),
        Code(f"make benchmark{' QUICK=1' if quick else ''}", f"To reproduce this page, in a clone at {commit}"),
        TableBlock(["program", "version"], versions),
    ]  # fmt: skip


def version_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return ((done.stdout + done.stderr).strip().splitlines() or ["unknown"])[0]


def section(rows: Sequence[dict[str, Any]]) -> list[Block]:
    table = TableBlock(
        ["case", "unit", "Isthmus", "peer", "peer name", "ratio", "target", ""],
        list(map(_cells, rows)),
        numbers=("Isthmus", "peer", "ratio", "target"),
    )
    compared = [row for row in rows if row["ratio"] is not None]
    return [table, *([chart(compared)] if compared else [])]


def _cells(row: dict[str, Any]) -> list[Text]:
    spread = aside(f"{row['low']:.4g} to {row['high']:.4g}")
    ours, ratio = number(row["ours"]), row["ratio"]
    bar = "" if row["bar"] is None else f"{row['bar']:g}"
    held: dict[bool | None, Text] = {None: "", True: good("met"), False: bad("missed")}
    return [row["case"], row["metric"], ours if ratio is not None else (ours, spread), number(row["peer"]),
            row["peer_name"] or "", "" if ratio is None else (f"{ratio:.2f}x", spread), bar,
            held[row["holds"]]]  # fmt: skip


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def chart(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw ratios as bars on a logarithmic axis, each with its spread and target."""
    lines = []
    for row in rows:
        ratio, low, high = (max(row[name], FLOOR) for name in ("ratio", "low", "high"))
        target: list[Bar] = [] if row["bar"] is None else [(row["bar"], row["bar"], "red")]
        name = f"{row['case']}, against {row['peer_name']}"
        bars: list[Bar] = [(FLOOR, ratio, "green"), *target]
        lines.append(ChartRow(name, "ink", bars=bars, span=(low, high), text=f"{row['ratio']:.1f}x"))
    caption = "Logarithmic; red marks the target, a line the spread."
    return rows_chart(lines, "Factor by which Isthmus is better", caption, log=True)


if __name__ == "__main__":
    sys.exit(main())
