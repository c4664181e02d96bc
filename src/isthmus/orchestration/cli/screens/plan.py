"""Output of `isthmus infra plan`."""

from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.distill.reports.words import UNKNOWN, duration, money, number, scaled
from isthmus.features.document.blocks import Block, Heading, Paragraph, TableBlock, Text, bad, good


def plan_blocks(plan: Mapping[str, Any]) -> Iterator[Block]:
    for name, model in plan["models"].items():
        yield Heading(name)
        for half, blocks in (("training", _training), ("serving", _serving)):
            estimate = model[half]
            yield Paragraph(_work(half, estimate))
            yield from blocks(estimate, plan)
            yield from _left_out(estimate)
            yield Paragraph(_check(half, estimate["check"]))
        if model["decoding"]:
            yield from _decoding(model["decoding"])
        if model["uncounted"]:
            operations = ", ".join(model["uncounted"])
            yield Paragraph(f"Operations not counted: {operations}. The real work is larger.")


def _work(half: str, estimate: Mapping[str, Any]) -> str:
    unit = f"{number(estimate['calls'])} steps" if half == "training" else "one row"
    work = f"{scaled(estimate['flops'], 'FLOP')}, {scaled(estimate['bytes'], 'B')}"
    return f"{half.capitalize()}, {unit} in {estimate['precision']}: {work}, {number(estimate['intensity'], 3)} FLOP/B."


def _training(estimate: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[Block]:
    columns = ["ridge", "bound by", "at least", "expected", "cost"]
    rows = [[*_bounds(name, estimate), _money(device["cost"], plan)] for name, device in _ranked(estimate)]
    yield TableBlock(["device", *columns], rows, numbers=columns)
    name = estimate["recommended"]["device"]
    if name is None:
        yield Paragraph("No known device can train this model.")
        return
    kind = plan["devices"][name]["kind"]
    words = f'Recommended: {name}, with device = "{kind}" and precision = "{estimate["precision"]}"'
    yield Paragraph(f"{words}{_because(estimate)}.")


def _serving(estimate: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[Block]:
    columns = ["ridge", "bound by", "at least", "expected", "p99", "requests/s", "cost of 1,000"]
    rows: list[list[Text]] = []
    for name, device in _ranked(estimate):
        tail = duration(device["p99_ms"] * 1000)
        rows.append([
            *_bounds(name, estimate), tail if device["holds"] else bad(tail),
            number(round(device["requests_per_second"])), _money(device["cost"], plan),
        ])  # fmt: skip
    yield TableBlock(["device", *columns], rows, numbers=columns)
    profile, name = plan["profiles"]["serving"], estimate["recommended"]["device"]
    objective = f"{profile['latency_objective_ms']:g} ms"
    if name is None:
        yield Paragraph(f"No device keeps the p99 of {objective}.")
        return
    device = estimate["devices"][name]
    count = f"{device['count']:,} x " if device["count"] > 1 else ""
    words = f'Recommended: {count}{name}, with precision = "{estimate["precision"]}" and threads = {profile["threads"]}'
    words += f", which keeps the p99 of {objective}"
    if plan["rate"] is not None:
        words += f" at {number(plan['rate'])} requests/s"
        words += "" if device["cost_hour"] is None else f" for {_money(device['cost_hour'], plan)} an hour"
    yield Paragraph(f"{words}{_because(estimate)}.")
    rows_to_ridge = device["rows_to_ridge"]
    if rows_to_ridge is None:
        yield Paragraph("It is memory-bound at every batch size.")
    else:
        yield Paragraph(f"It becomes compute-bound at batches of {rows_to_ridge:,} rows.")


def _decoding(decoding: Mapping[str, Any]) -> Iterator[Block]:
    prompt = number(decoding["prompt"])
    yield Paragraph(f"Decoding one text at a time, after a prompt of {prompt} tokens.")
    columns = ["prefill, tokens/s", "bound by", "decode, tokens/s", "bound by", "a token"]
    rows: list[list[Text]] = []
    for precision, estimate in decoding["precisions"].items():
        for name, step in estimate["decode"]["devices"].items():
            parts = (estimate["prefill"]["devices"][name], step)
            speeds = [each for part in parts for each in (number(round(part["tokens_per_second"])), part["bound"])]
            rows.append([precision, name, *speeds, duration(step["seconds"] * 1e6)])
    yield TableBlock(["precision", "device", *columns], rows, numbers=columns)
    for precision, estimate in decoding["precisions"].items():
        if check := estimate["check"]:
            measured, expected = (duration(check[part] * 1e6) for part in ("measured_seconds", "seconds"))
            yield Paragraph(
                f"Measured: {measured} for a step in {precision} at the last export; "
                f"{number(check['ratio'], 3)} times the {expected} predicted from this host's speed."
            )
    yield from _left_out(decoding)


def _left_out(estimate: Mapping[str, Any]) -> Iterator[Block]:
    for why in dict.fromkeys(estimate["left_out"].values()):
        names = ", ".join(name for name, reason in estimate["left_out"].items() if reason == why)
        yield Paragraph(f"Left out: {names}; {why}.")


def _bounds(name: str, estimate: Mapping[str, Any]) -> list[Text]:
    device = estimate["devices"][name]
    times = (duration(device[part] * 1e6) for part in ("least_seconds", "seconds"))
    shown = good(name) if name == estimate["recommended"]["device"] else name
    return [shown, number(device["ridge"], 3), device["bound"], *times]


def _ranked(estimate: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(
        estimate["devices"].items(),
        key=lambda item: (item[1]["cost"] is None, item[1]["cost"] or 0.0, item[1]["seconds"]),
    )


def _because(estimate: Mapping[str, Any]) -> str:
    best, devices = estimate["recommended"], estimate["devices"]
    device, fastest = devices[best["device"]], devices[best["fastest"]]
    other = f"; the fastest is {best['fastest']} with {duration(fastest['seconds'] * 1e6)}"
    if best["by"] == "price":
        return ", the cheapest" + (other if best["fastest"] != best["device"] else "")
    priced = any(each["cost"] is not None for each in devices.values())
    words = f". No {'CPU' if priced else 'device'} has a price, so devices are ranked by time"
    if best["fastest"] == best["device"]:
        return f"{words}: it is the fastest"
    if device["bound"] == "overhead":
        return f"{words}: {device['overhead_seconds'] / device['seconds']:.0%} of its time is overhead{other}"
    if device.get("count", 1) < fastest.get("count", 1):
        return f"{words}: it needs the fewest devices{other}"
    return f"{words}: other devices are less than 10 % faster{other}"


def _money(cost: float | None, plan: Mapping[str, Any]) -> str:
    return UNKNOWN if cost is None else money(cost, plan["currency"])


def _check(half: str, check: Mapping[str, Any]) -> str:
    measured, least = check["measured_seconds"] * 1e6, check["least_seconds"]
    call = "the last training" if half == "training" else "one row at the last export"
    if least is None:
        return f"Measured: {duration(measured)} for {call}; {check['why']}."
    ratio = f"{number(check['ratio'], 3)} times the {duration(least * 1e6)} of this host's roofline"
    return f"Measured: {duration(measured)} for {call}; {ratio}: {check['why']}."
