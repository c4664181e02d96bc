"""Update docs/performance.md with the latest results and plots of the benchmarks, between their markers."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from result import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"


def main() -> int:
    """Rewrite the section of every benchmark that has a result; return 1 if the page lacks its markers."""
    text = PAGE.read_text()
    for file in sorted(RESULTS.glob("*.json")):
        name, run = file.stem, json.loads(file.read_text())
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin not in text or end not in text:
            sys.stderr.write(f"docs/performance.md has no section for {name}: add the lines {begin} and {end}\n")
            return 1
        compared = [one for one in run["comparisons"] if one["ratio"] is not None and one["bar"] is not None]
        plotted = f"\n![Factor by which Isthmus is better](plots/{name}.svg)\n" if compared else ""
        if compared:
            plot(name, compared)
        section = f"{begin}\n{table(name, run)}\n{plotted}{end}"
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, made=section: made, text, flags=re.DOTALL)  # type: ignore[misc]
    PAGE.write_text(text)
    return 0


def table(name: str, run: dict[str, Any]) -> str:
    lines = [
        f"`python benchmarks/{name}.py`, {run['at']}, {run['machine']}.", "",
        "| case | metric | ours | peer | compared with | ratio | target | |", "|---|---|---:|---:|---|---:|---:|---|",
    ]  # fmt: skip
    for one in run["comparisons"]:
        held = {None: "", True: "met", False: "**missed**"}[one["holds"]]
        ratio = "" if one["ratio"] is None else f"{one['ratio']:.1f}x"
        cells = [one["case"], one["metric"], number(one["ours"]), number(one["peer"]), one["peer_name"] or "", ratio,
                 "" if one["bar"] is None else f"{one['bar']:g}", held]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Format with three significant digits, numbers below one with four."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.4g}"


def plot(name: str, compared: list[dict[str, Any]]) -> None:
    shown = compared[::-1]
    mpl.rcParams["svg.hashsalt"] = "isthmus"  # reproducible bytes
    figure, axes = plt.subplots(figsize=(8, 0.46 * len(shown) + 1.4), layout="constrained")
    # Use row numbers instead of names: a case can have several peers.
    axes.barh(range(len(shown)), [one["ratio"] for one in shown], color="#2a6f97", label="measured")
    axes.set_yticks(range(len(shown)), [f"{one['case']}\nagainst {one['peer_name']}" for one in shown], fontsize=8)
    for row, one in enumerate(shown):
        axes.plot(
            [one["bar"]] * 2, [row - 0.42, row + 0.42], color="#c1121f", linewidth=2, label="target" if not row else ""
        )
        axes.text(one["ratio"], row, f" {one['ratio']:.1f}x", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("factor by which Isthmus is better (logarithmic)")
    axes.margins(x=0.15)
    axes.set_xlim(left=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    (DOCS / "plots").mkdir(exist_ok=True)
    figure.savefig(DOCS / "plots" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
