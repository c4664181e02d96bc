"""Format the numbers of a report; "-" for an unknown number."""

import math

from isthmus.features.document.blocks import decimal

UNKNOWN = "-"
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def number(value: float | None, digits: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def measure(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if 0 < size < 1e-3 or size >= 1e15:
        return decimal(value, 3)
    return f"{value:,.{4 if size < 10 else 2 if size < 1000 else 0}f}"


def money(value: float, currency: str) -> str:
    places = 2 if value == 0 else max(2, 2 - math.floor(math.log10(abs(value))))
    whole, _, part = f"{value:,.{places}f}".partition(".")
    return f"{whole}.{part.rstrip('0').ljust(2, '0')} {currency}".strip()


def share(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def scaled(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"


def duration(microseconds: float | None) -> str:
    if microseconds is None or not math.isfinite(microseconds):
        return UNKNOWN
    for unit in ("µs", "ms"):
        if microseconds < 999.5:
            return f"{microseconds:.3g} {unit}"
        microseconds /= 1000
    return f"{number(microseconds, 3)} s"


def between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{measure(low)} to {measure(high)}"


def span(seconds: float) -> str:
    if seconds == 0:
        return "fresh"
    sizes = ((7 * 86400, "week"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    size, unit = next(((size, unit) for size, unit in sizes if seconds >= size and seconds % size == 0), (1, "second"))
    count = seconds / size
    return f"{count:g} {unit}{'' if count == 1 else 's'}"
