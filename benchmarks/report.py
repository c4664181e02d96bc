"""Writes the last results of the benchmarks as one page, with their plots."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from result import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = RESULTS / "README.md"


def main() -> None:
    """Write the page of all results, and the plots of those that have a peer."""
    mpl.rcParams["svg.hashsalt"] = "isthmus"  # the same figures make the same file
    sections = ["# Results\n\nThe last run of every benchmark, written by `python benchmarks/report.py`.\n"]
    for file in sorted(RESULTS.glob("*.json")):
        name, run = file.stem, json.loads(file.read_text())
        compared = [one for one in run["comparisons"] if one["ratio"] is not None and one["bar"] is not None]
        plotted = f"\n![Ratio to the peer](../../docs/plots/{name}.svg)\n" if compared else ""
        if compared:
            plot(name, compared)
        if line := run.get("line"):
            draw(name, line)
            plotted += f"\n![{line['y_title']} over {line['x_title']}](../../docs/plots/{name}-line.svg)\n"
        sections.append(f"## {name}\n\n{table(name, run)}\n{plotted}")
    PAGE.write_text("\n".join(sections))


def draw(name: str, line: dict[str, Any]) -> None:
    """A figure over another one, from zero on."""
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    axes.plot(line["x"], line["y"], ".", color="#2a6f97")
    axes.set_xlabel(line["x_title"])
    axes.set_ylabel(line["y_title"])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    save(figure, axes, f"{name}-line")


def save(figure: Any, axes: Any, name: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    (DOCS / "plots").mkdir(exist_ok=True)
    figure.savefig(DOCS / "plots" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def table(name: str, run: dict[str, Any]) -> str:
    """The comparisons of one run as Markdown."""
    lines = [
        f"`python benchmarks/{name}.py`, {run['at']}, {run['machine']}.", "",
        "| case | metric | ours | peer | compared with | ratio | bar | |", "|---|---|---:|---:|---|---:|---:|---|",
    ]  # fmt: skip
    for one in run["comparisons"]:
        held = {None: "", True: "holds", False: "**missed**"}[one["holds"]]
        ratio = "" if one["ratio"] is None else f"{one['ratio']:.1f}x"
        cells = [one["case"], one["metric"], number(one["ours"]), number(one["peer"]), one["peer_name"] or "", ratio,
                 "" if one["bar"] is None else f"{one['bar']:g}", held]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A figure with three digits, a share with four."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.4g}"


def plot(name: str, compared: list[dict[str, Any]]) -> None:
    """Ratios, each beside its bar."""
    shown = compared[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.46 * len(shown) + 1.4), layout="constrained")
    # By rows and not by names: a case can have several peers.
    axes.barh(range(len(shown)), [one["ratio"] for one in shown], color="#2a6f97", label="measured")
    axes.set_yticks(range(len(shown)), [f"{one['case']}\nbeside {one['peer_name']}" for one in shown], fontsize=8)
    for row, one in enumerate(shown):
        axes.plot(
            [one["bar"]] * 2, [row - 0.42, row + 0.42], color="#c1121f", linewidth=2, label="bar" if not row else ""
        )
        axes.text(one["ratio"], row, f" {one['ratio']:.1f}x", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("times better than the peer (logarithmic)")
    axes.margins(x=0.15)
    axes.set_xlim(left=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    save(figure, axes, name)


if __name__ == "__main__":
    main()
