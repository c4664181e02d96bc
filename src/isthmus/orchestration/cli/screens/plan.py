"""What a person reads of a plan."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from isthmus.distill.reports.words import UNKNOWN, duration, money, number, scaled
from isthmus.orchestration.cli.screens.terminal import new_console, new_table


def show_plan(found: Mapping[str, Any]) -> None:
    """Prints a plan: of each model the work, a table of devices, the recommendation and the check, twice."""
    console = new_console()
    for name, model in found["models"].items():
        console.print(f"\n[bold]{escape(name)}[/]", highlight=False)
        for half, show in (("training", _training), ("serving", _serving)):
            told = model[half]
            _line(console, _work(half, told))
            show(console, told, found)
            for why in dict.fromkeys(told["left_out"].values()):
                names = ", ".join(name for name, one in told["left_out"].items() if one == why)
                _line(console, f"Left out: {names}; {why}.", dim=True)
            _line(console, _check(half, told["check"]))
        if model["uncounted"]:
            _line(
                console, f"Not counted are operations of {', '.join(model['uncounted'])}: the work is more than that."
            )


def _line(console: Console, text: str, *, dim: bool = False) -> None:
    console.print(escape(text), style="dim" if dim else "", highlight=False, soft_wrap=True)


def _work(half: str, told: Mapping[str, Any]) -> str:
    what = f"{number(told['calls'])} steps" if half == "training" else "one row"
    work = f"{scaled(told['flops'], 'FLOP')}, {scaled(told['bytes'], 'B')}, {number(told['intensity'], 3)} FLOP/B"
    return f"{half.capitalize()}, {what} in {told['precision']}: {work}."


def _training(console: Console, told: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    table = new_table("device", "ridge", "bound by", "at least", "expected", "cost")
    for name, one in told["devices"].items():
        times = (duration(one["least_seconds"] * 1e6), duration(one["seconds"] * 1e6))
        table.add_row(_marked(name, told), number(one["ridge"], 3), one["bound"], *times, _money(one["cost"], found))
    console.print(table)
    best = told["recommended"]
    chosen = best["cheapest"] or best["fastest"]
    if chosen is None:
        _line(console, "No device that is known can do it.")
        return
    kind = found["devices"][chosen]["kind"]
    words = f'Recommended: {chosen}, with device = "{kind}" and precision = "{told["precision"]}"'
    if best["cheapest"] is None:
        words += ", as the fastest: no device has a price"
    elif best["fastest"] != chosen:
        seconds = duration(told["devices"][best["fastest"]]["seconds"] * 1e6)
        words += f", as the cheapest; {best['fastest']} is the fastest: {seconds}"
    _line(console, f"{words}.")


def _serving(console: Console, told: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    table = new_table("device", "ridge", "bound by", "at least", "expected", "p99", "requests/s", "cost of 1,000")
    for name, one in told["devices"].items():
        tail = duration(one["p99_ms"] * 1000)
        table.add_row(
            _marked(name, told), number(one["ridge"], 3), one["bound"], duration(one["least_seconds"] * 1e6),
            duration(one["seconds"] * 1e6), tail if one["holds"] else f"[red]{tail}[/]",
            number(round(one["requests_per_second"])), _money(one["cost"], found),
        )  # fmt: skip
    console.print(table)
    best, profile = told["recommended"], found["profiles"]["serving"]
    chosen = best["cheapest"] or best["fastest"]
    objective = f"{profile['latency_objective_ms']:g} ms"
    if chosen is None:
        _line(console, f"No device keeps the p99 of {objective}.")
        return
    one = told["devices"][chosen]
    count = f"{one['count']:,} x " if one["count"] > 1 else ""
    words = f'Recommended: {count}{chosen}, with precision = "{told["precision"]}" and threads = {profile["threads"]}'
    words += f", which keeps the p99 of {objective}"
    if found["rate"] is not None:
        words += f" at {number(found['rate'])} requests/s"
        words += "" if one["cost_hour"] is None else f" for {_money(one['cost_hour'], found)} an hour"
    words += ", as the fastest: no device that does has a price" if best["cheapest"] is None else ", as the cheapest"
    rows = one["rows_to_ridge"]
    _line(console, f"{words}.")
    _line(console, f"On it, arithmetic limits from {rows:,} rows together." if rows is not None else
          "On it, memory limits however many rows are answered together.")  # fmt: skip


def _marked(name: str, told: Mapping[str, Any]) -> str:
    best = told["recommended"]
    return f"[green]{escape(name)}[/]" if name == (best["cheapest"] or best["fastest"]) else escape(name)


def _money(cost: float | None, found: Mapping[str, Any]) -> str:
    return UNKNOWN if cost is None else escape(money(cost, found["currency"]))


def _check(half: str, check: Mapping[str, Any]) -> str:
    measured, least = check["measured_seconds"] * 1e6, check["least_seconds"]
    what = "the last training" if half == "training" else "one row at the last export"
    if least is None:
        return f"Measured: {duration(measured)} for {what}; {check['why']}."
    beside = f"{number(check['ratio'], 3)} times the {duration(least * 1e6)} of this host's roofline"
    return f"Measured: {duration(measured)} for {what}; {beside}: {check['why']}."
