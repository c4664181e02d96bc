"""The boundary card: what a student costs on this side of the boundary, once, and on the other, with every answer."""

from collections.abc import Mapping
from typing import Any

from isthmus.distill.reports.markdown import paragraph, table, text
from isthmus.distill.reports.report import Report, ServingHalf, TrainingHalf, read_report
from isthmus.distill.reports.words import UNKNOWN, duration, money, number, scaled
from isthmus.features.errors import GateFailed

Prices = Mapping[str, float]
"""What an hour of a device costs, by the name that reports give it: "cpu", "cuda"."""
MEGA = 1e6
TOGETHER = (
    "The training half is of all students and controls together, over all seeds. Of the teacher it holds nothing but "
    "its share in the peak memory."
)
NO_PRICE = "not known: no price of {} is declared"


def require_boundary(report: Mapping[str, Any]) -> None:
    """Refuses a run of which not both halves have been measured in full.

    Raises:
        GateFailed: a half is missing, or a part of it.
        DataError: it is no report.
    """
    read = read_report(report)
    missing = []
    for half, found in (("training", read.training), ("serving", read.serving)):
        if found is None:
            missing.append(f"the {half} half is missing")
        elif unknown := [name for name in found.__struct_fields__ if getattr(found, name) is None]:
            missing.append(f"the {half} half lacks {', '.join(unknown)}")
    if missing:
        raise GateFailed(
            f"boundary card of {read.name}",
            "; ".join(missing),
            expected="a training half and a serving half, both measured in full",
            remedy="measure what is missing: nothing is released without it",
        )


def boundary_card(report: Mapping[str, Any], prices: Prices | None = None, currency: str = "") -> str:
    """The card in Markdown; of a half that is missing it says so.

    Args:
        report: plain data of `report.json`.
        prices: of an hour of each device.
        currency: of the prices.

    Raises:
        DataError: it is no report.
    """
    read = read_report(report)
    parts = [
        f"# Boundary card of {text(read.name)}",
        f"Student {text(read.id)}. On one side of the boundary it was trained, once; on the other it answers.",
        paragraph(TOGETHER),
    ]
    for title, rows in halves(read, prices or {}, currency).items():
        shown = table(["", ""], [[name, text(value)] for name, value in rows]) if rows else "Not measured yet."
        parts += [f"## {title}", shown]
    return "\n\n".join(parts) + "\n"


def halves(report: Report, prices: Prices, currency: str) -> dict[str, list[tuple[str, str]]]:
    """Title of each half, and its lines: a name and a value; no line if it has not been measured."""
    training = _training(report.training, prices, currency) if report.training else []
    serving = _serving(report.serving, prices, currency) if report.serving else []
    return {"Training half": training, "Serving half": serving}


def _training(half: TrainingHalf, prices: Prices, currency: str) -> list[tuple[str, str]]:
    price = prices.get(half.device or "")
    if price is None:
        cost = NO_PRICE.format(half.device or "its device")
    elif half.device_hours is None:
        cost = UNKNOWN
    else:
        cost = f"{money(price * half.device_hours, currency)} at {money(price, currency)} an hour of {half.device}"
    return [
        ("device", half.device or UNKNOWN),
        ("precision", half.precision or UNKNOWN),
        ("threads", number(half.threads)),
        ("rows", number(half.rows)),
        ("steps", number(half.steps)),
        ("seconds", number(half.seconds)),
        ("device-hours", number(half.device_hours)),
        (
            "gave way to serving",
            f"{number(half.slowed_seconds)} s on fewer cores, and {number(half.paused_seconds)} s paused",
        ),
        ("floating-point operations", scaled(half.flops, "FLOP")),
        ("peak memory", _megabytes(half.peak_mb)),
        ("throughput", f"{number(half.rows_per_second)} rows/s"),
        ("cost", cost),
    ]


def _serving(half: ServingHalf, prices: Prices, currency: str) -> list[tuple[str, str]]:
    price = prices.get(half.device)
    if price is None:
        cost = NO_PRICE.format(half.device or "its device")
    elif not half.requests_per_second:
        cost = UNKNOWN
    else:
        thousand = price / 3600 / half.requests_per_second * 1000
        cost = f"{money(thousand, currency)} at {money(price, currency)} an hour of {half.device}, always busy"
    return [
        ("runtime", half.runtime or UNKNOWN),
        ("precision", half.precision or UNKNOWN),
        ("threads", number(half.threads)),
        ("p50", duration(half.p50_us)),
        ("p99", duration(half.p99_us)),
        ("throughput", f"{number(half.requests_per_second)} requests/s"),
        ("memory", _megabytes(half.memory_mb)),
        ("first answer of a fresh process", duration(None if half.load_ms is None else half.load_ms * 1000)),
        ("cost of a thousand requests", cost),
        ("measured on the host", half.host or UNKNOWN),
    ]


def _megabytes(value: float | None) -> str:
    return scaled(None if value is None else value * MEGA, "B")
