"""The boundary card has two halves: the cost of training a student once, and the cost of serving it."""

from collections.abc import Mapping
from typing import Any

from isthmus.distill.reports.report import Report, ServingHalf, TrainingHalf, read_report
from isthmus.distill.reports.words import UNKNOWN, duration, measure, money, number, scaled, span
from isthmus.features.document.blocks import Block, Fields, Heading, Paragraph
from isthmus.features.document.markdown import to_markdown
from isthmus.features.errors import GateFailed

Prices = Mapping[str, float]
"""Price of an hour by device name in reports: "cpu", "cuda"."""
SCOPE = (
    "The training half covers all students and controls together, over all seeds. The teacher only counts towards the "
    "peak memory."
)


def require_boundary(report: Mapping[str, Any]) -> None:
    read = read_report(report)
    missing = []
    for name, half in (("training", read.training), ("serving", read.serving)):
        if half is None:
            missing.append(f"the {name} half is missing")
        elif unknown := [field for field in half.__struct_fields__ if getattr(half, field) is None]:
            missing.append(f"the {name} half lacks {', '.join(unknown)}")
    if missing:
        raise GateFailed(
            f"boundary card of {read.name}",
            "; ".join(missing),
            expected="a training half and a serving half, both complete",
            remedy="measure the missing values: a release requires them",
        )


def boundary_card(report: Mapping[str, Any], prices: Prices | None = None, currency: str = "") -> str:
    read = read_report(report)
    blocks: list[Block] = [
        Heading(f"Boundary card of {read.name}", 1),
        Paragraph(f"Student {read.id}: the cost of training it once, and of serving each prediction."),
        Paragraph(SCOPE),
        *map(Paragraph, age_sentences(read)),
    ]
    for title, half in halves(read, prices or {}, currency).items():
        blocks += [Heading(title), half]
    return to_markdown(blocks)


def age_sentences(report: Report) -> list[str]:
    if report.age is None:
        return []
    metric, aged = report.metric, report.models["student"].quality.get(report.metric)
    fresh = next((point.found.value for point in report.ages if point.seconds == 0), None)
    sentence = (
        f"On a device, stored features may be up to {span(report.age)} old: {metric} is then {measure(aged)}, "
        f"instead of {measure(fresh)} with fresh features. Older features are not used."
    )
    return [sentence]


def halves(report: Report, prices: Prices, currency: str) -> dict[str, Fields | Paragraph]:
    missing = Paragraph("Not measured yet.")
    return {
        "Training half": _training(report.training, prices, currency) if report.training else missing,
        "Serving half": _serving(report.serving, prices, currency) if report.serving else missing,
    }


def _training(half: TrainingHalf, prices: Prices, currency: str) -> Fields:
    throttled = f"{number(half.slowed_seconds)} s on fewer cores, and {number(half.paused_seconds)} s paused"
    return Fields([
        ("device", half.device or UNKNOWN),
        ("precision", half.precision or UNKNOWN),
        ("processes", " and ".join(map(number, half.processes))),
        ("threads", number(half.threads)),
        ("rows", number(half.rows)),
        ("steps", number(half.steps)),
        ("seconds", number(half.seconds)),
        ("device-hours", number(half.device_hours)),
        ("throttled for serving", throttled),
        ("floating-point operations", scaled(half.flops, "FLOP")),
        ("peak memory", _megabytes(half.peak_mb)),
        ("throughput", f"{number(half.rows_per_second)} rows/s"),
        ("cost", _cost(prices, currency, half.device, half.device_hours)),
    ])  # fmt: skip


def _serving(half: ServingHalf, prices: Prices, currency: str) -> Fields:
    hours = 1000 / 3600 / half.requests_per_second if half.requests_per_second else None
    return Fields([
        ("runtime", half.runtime or UNKNOWN),
        ("precision", half.precision or UNKNOWN),
        ("threads", number(half.threads)),
        ("p50", duration(half.p50_us)),
        ("p99", duration(half.p99_us)),
        ("throughput", f"{number(half.requests_per_second)} requests/s"),
        ("memory", _megabytes(half.memory_mb)),
        ("load and first prediction", duration(None if half.load_ms is None else half.load_ms * 1000)),
        ("cost per 1,000 requests", _cost(prices, currency, half.device, hours, ", fully used")),
        ("measured on the host", half.host or UNKNOWN),
    ])  # fmt: skip


def _cost(prices: Prices, currency: str, device: str | None, hours: float | None, note: str = "") -> str:
    price = prices.get(device or "")
    if price is None:
        return f"unknown: no price is declared for {device or 'its device'}"
    if hours is None:
        return UNKNOWN
    return f"{money(price * hours, currency)} at {money(price, currency)} per hour of {device}{note}"


def _megabytes(value: float | None) -> str:
    return scaled(None if value is None else value * 1e6, "B")
