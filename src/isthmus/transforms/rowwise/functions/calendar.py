"""Dates as days, and timestamps as microseconds since 1970, in UTC and the proleptic Gregorian calendar.

The civil calendar is computed as in H. Hinnant, "chrono-compatible low-level date algorithms" (2013).
"""

from collections.abc import Callable, Sequence

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.casts import DAY, SECOND, floor_divided
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import DATE, INT, LONG, TIMESTAMP, VOID

_HOUR, _MINUTE = 3600 * SECOND, 60 * SECOND


def _days(graph: Graph, node: ExpressionNode, value: Value) -> tuple[str, Value]:
    """Return the day of a date or timestamp, int64, and the argument."""
    if value.kind == VOID:
        value = casts.widened(graph, value, DATE)
    if value.kind == TIMESTAMP:
        return floor_divided(graph, value.data, DAY)[0], value
    if value.kind != DATE:
        raise NotCompilableError(node, f"takes a date or a timestamp, not {value.kind}", "a cast of a timestamp")
    return graph.cast(value.data, LONG), value


def _int(graph: Graph, value: int) -> str:
    return graph.constant(value, LONG)


def _sum(graph: Graph, *parts: str | int) -> str:
    total, *summands = (_int(graph, part) if isinstance(part, int) else part for part in parts)
    for part in summands:
        total = graph.add("Add", total, part)
    return total


def _times(graph: Graph, data: str, factor: int) -> str:
    return graph.add("Mul", data, _int(graph, factor))


def _over(graph: Graph, data: str, divisor: int) -> str:
    return floor_divided(graph, data, divisor)[0]


def _parts(graph: Graph, data: str, divisor: int) -> str:
    """Divide a non-negative number, without rounding down."""
    return graph.add("Div", data, _int(graph, divisor))


def civil(graph: Graph, days: str) -> tuple[str, str, str]:
    """Return year, month and day of the month for days since 1970, int64."""
    shifted = _sum(graph, days, 719_468)
    era, of_era = floor_divided(graph, shifted, 146_097)
    leap = _sum(graph, of_era, _times(graph, _parts(graph, of_era, 1460), -1), _parts(graph, of_era, 36_524),
                _times(graph, _parts(graph, of_era, 146_096), -1))  # fmt: skip
    year_of_era = _parts(graph, leap, 365)
    before = _sum(graph, _times(graph, year_of_era, 365), _parts(graph, year_of_era, 4),
                  _times(graph, _parts(graph, year_of_era, 100), -1))  # fmt: skip
    of_year = graph.add("Sub", of_era, before)
    # Years begin in March here, so that a leap day is their last day.
    march = _parts(graph, _sum(graph, _times(graph, of_year, 5), 2), 153)
    day = _sum(graph, of_year, _times(graph, _parts(graph, _sum(graph, _times(graph, march, 153), 2), 5), -1), 1)
    late = graph.add("Greater", march, _int(graph, 9))
    month = graph.add("Add", march, graph.add("Where", late, _int(graph, -9), _int(graph, 3)))
    next_year = graph.add("Where", late, _int(graph, 1), _int(graph, 0))
    return _sum(graph, year_of_era, _times(graph, era, 400), next_year), month, day


def days_from_civil(graph: Graph, year: str, month: str, day: str) -> str:
    early = graph.add("LessOrEqual", month, _int(graph, 2))
    year = graph.add("Sub", year, graph.add("Where", early, _int(graph, 1), _int(graph, 0)))
    era, year_of_era = floor_divided(graph, year, 400)
    march = graph.add("Add", month, graph.add("Where", early, _int(graph, 9), _int(graph, -3)))
    of_year = _sum(graph, _over(graph, _sum(graph, _times(graph, march, 153), 2), 5), day, -1)
    of_era = _sum(graph, _times(graph, year_of_era, 365), _parts(graph, year_of_era, 4),
                  _times(graph, _parts(graph, year_of_era, 100), -1), of_year)  # fmt: skip
    return _sum(graph, _times(graph, era, 146_097), of_era, -719_468)


def _modulo(graph: Graph, data: str, divisor: int) -> str:
    return floor_divided(graph, data, divisor)[1]


def _day_of_year(graph: Graph, days: str) -> str:
    first = days_from_civil(graph, civil(graph, days)[0], _int(graph, 1), _int(graph, 1))
    return _sum(graph, days, _times(graph, first, -1), 1)


def _week(graph: Graph, days: str) -> str:
    """Return the ISO week, which belongs to the year of its Thursday."""
    thursday = _sum(graph, days, _times(graph, _modulo(graph, _sum(graph, days, 3), 7), -1), 3)
    return _sum(graph, _over(graph, _sum(graph, _day_of_year(graph, thursday), -1), 7), 1)


def _quarter(graph: Graph, days: str) -> str:
    return _sum(graph, _over(graph, _sum(graph, civil(graph, days)[1], -1), 3), 1)


@rule("year", 1, find=lambda graph, days: civil(graph, days)[0])
@rule("month", 1, find=lambda graph, days: civil(graph, days)[1])
@rule("day", 1, find=lambda graph, days: civil(graph, days)[2])
@rule("dayofmonth", 1, find=lambda graph, days: civil(graph, days)[2])
@rule("quarter", 1, find=_quarter)
@rule("dayofyear", 1, find=_day_of_year)
@rule("weekofyear", 1, find=_week)
def _part(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, find: Callable[[Graph, str], str]) -> Value:
    days, value = _days(graph, node, values[0])
    return graph.result(INT, graph.cast(find(graph, days), INT), [value])


@rule("dayofweek", 1, epoch=4, first=1)
@rule("weekday", 1, epoch=3, first=0)
def _of_week(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, epoch: int, first: int) -> Value:
    """Return the number of a day in its week. `epoch` is the number of 1970's first day, `first` the lowest number."""
    if values[0].kind == TIMESTAMP:
        value = values[0]
        # Reduce to one week first, so that no number is negative or too large.
        days = _parts(graph, _modulo(graph, value.data, 7 * DAY), DAY)
    else:
        days, value = _days(graph, node, values[0])
    place = _modulo(graph, _sum(graph, days, epoch), 7)
    return graph.result(INT, graph.cast(_sum(graph, place, first) if first else place, INT), [value])


def _moment(graph: Graph, node: ExpressionNode, value: Value) -> Value:
    if value.kind in (DATE, VOID):
        return casts.widened(graph, value, TIMESTAMP)
    if value.kind != TIMESTAMP:
        raise NotCompilableError(node, f"takes a timestamp, not {value.kind}", "timestamp_seconds of a number")
    return value


@rule("hour", 1, within=DAY, unit=_HOUR)
@rule("minute", 1, within=_HOUR, unit=_MINUTE)
@rule("second", 1, within=_MINUTE, unit=SECOND)
def _clock(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, within: int, unit: int) -> Value:
    value = _moment(graph, node, values[0])
    rest = _modulo(graph, value.data, within)
    return graph.result(INT, graph.cast(_parts(graph, rest, unit), INT), [value])


@rule("unix_seconds", 1, unit=SECOND)
@rule("unix_millis", 1, unit=1000)
@rule("unix_micros", 1, unit=1)
def _unix(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, unit: int) -> Value:
    value = _moment(graph, node, values[0])
    return graph.result(LONG, _over(graph, value.data, unit) if unit > 1 else value.data, [value])


@rule("timestamp_seconds", 1, unit=SECOND)
@rule("timestamp_millis", 1, unit=1000)
@rule("timestamp_micros", 1, unit=1)
def _from_unix(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, unit: int) -> Value:
    (value,) = values
    if not (value.kind.integral or value.kind == VOID):
        raise NotCompilableError(node, f"takes a whole number, not {value.kind}", "a cast to bigint")
    value = casts.widened(graph, value, LONG)
    low, high = _int(graph, -(-LONG.low // unit)), _int(graph, LONG.high // unit)
    wrong = graph.either(graph.add("Less", value.data, low), graph.add("Greater", value.data, high))
    return graph.result(TIMESTAMP, _times(graph, value.data, unit), [value], wrong=wrong if unit > 1 else None)


@rule("unix_date", 1)
def _unix_date(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    if values[0].kind == TIMESTAMP:
        raise NotCompilableError(node, "takes a date, not timestamp", "to_date")
    value = _date(graph, node, values[0])
    return Value(INT, value.data, value.valid, value.raises)


@rule("date_from_unix_date", 1)
def _date_from_unix(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    value = _whole(graph, node, values[0])
    return Value(DATE, value.data, value.valid, value.raises)


def _date(graph: Graph, node: ExpressionNode, value: Value) -> Value:
    days, value = _days(graph, node, value)
    return value if value.kind == DATE else graph.result(DATE, graph.cast(days, DATE), [value])


def _whole(graph: Graph, node: ExpressionNode, value: Value) -> Value:
    if value.kind == VOID or (value.kind.integral and value.kind != LONG):
        return casts.widened(graph, value, INT)
    raise NotCompilableError(node, f"takes an int, not {value.kind}", "a cast to int")


@rule("to_date", 1)
def _to_date(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    return _date(graph, node, values[0])


@rule("datediff", 2)
@rule("date_diff", 2)
def _datediff(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    end, start = (_date(graph, node, value) for value in values)
    return graph.result(INT, graph.add("Sub", end.data, start.data), [end, start])


@rule("date_add", 2, operator="Add")
@rule("dateadd", 2, operator="Add")
@rule("date_sub", 2, operator="Sub")
def _moved(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    start, count = _date(graph, node, values[0]), _whole(graph, node, values[1])
    return graph.result(DATE, graph.add(operator, start.data, count.data), [start, count])


def _month_days(graph: Graph, year: str, month: str) -> str:
    unit = _int(graph, 1)
    last = graph.add("Equal", month, _int(graph, 12))
    after = graph.add("Where", last, unit, graph.add("Add", month, unit))
    following = graph.add("Add", year, graph.add("Where", last, unit, _int(graph, 0)))
    begin, end = days_from_civil(graph, year, month, unit), days_from_civil(graph, following, after, unit)
    return graph.add("Sub", end, begin)


@rule("last_day", 1)
def _last_day(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    days, value = _days(graph, node, values[0])
    year, month, _ = civil(graph, days)
    data = days_from_civil(graph, year, month, _month_days(graph, year, month))
    return graph.result(DATE, graph.cast(data, DATE), [value])


@rule("add_months", 2)
def _add_months(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    start, count = _date(graph, node, values[0]), _whole(graph, node, values[1])
    year, month, day = civil(graph, graph.cast(start.data, LONG))
    months = _sum(graph, _times(graph, year, 12), month, -1, graph.cast(count.data, LONG))
    year, place = floor_divided(graph, months, 12)
    month = _sum(graph, place, 1)
    day = graph.add("Min", day, _month_days(graph, year, month))
    return graph.result(DATE, graph.cast(days_from_civil(graph, year, month, day), DATE), [start, count])


@rule("make_date", 3)
def _make_date(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    parts = [_whole(graph, node, value) for value in values]
    year, month, day = (graph.cast(part.data, LONG) for part in parts)
    odd = graph.add("Or", graph.add("Less", month, _int(graph, 1)), graph.add("Greater", month, _int(graph, 12)))
    month = graph.add("Where", odd, _int(graph, 1), month)
    wrong = graph.either(
        odd, graph.add("Less", day, _int(graph, 1)), graph.add("Greater", day, _month_days(graph, year, month)),
        graph.add("Greater", graph.add("Abs", year), _int(graph, 999_999_999)),
    )  # fmt: skip
    data = graph.cast(days_from_civil(graph, year, month, day), DATE)
    return graph.result(DATE, data, parts, wrong=wrong)


def _first_of(graph: Graph, node: ExpressionNode, unit: str, days: str, units: str) -> str:
    """Return the first day of a day's unit, which is one of `units`."""
    year, month, _ = civil(graph, days)
    first = _int(graph, 1)
    match unit:
        case "year" | "yyyy" | "yy":
            return days_from_civil(graph, year, first, first)
        case "quarter":
            month = _sum(graph, _times(graph, _sum(graph, _quarter(graph, days), -1), 3), 1)
            return days_from_civil(graph, year, month, first)
        case "month" | "mon" | "mm":
            return days_from_civil(graph, year, month, first)
        case "week":
            return graph.add("Sub", days, _modulo(graph, _sum(graph, days, 3), 7))
    raise NotCompilableError(node, f"has the unknown unit {unit!r}", units)


_UNITS = {
    "day": DAY,
    "dd": DAY,
    "hour": _HOUR,
    "minute": _MINUTE,
    "second": SECOND,
    "millisecond": 1000,
    "microsecond": 1,
}


def _unit(node: ExpressionNode, argument: ExpressionNode) -> str:
    if argument.name != "literal" or not isinstance(argument.value, str):
        raise NotCompilableError(node, "its unit is not a literal", "a unit like 'month'")
    return argument.value.lower()


@rule("date_trunc", 2)
def _date_trunc(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    unit = _unit(node, node.arguments[0])
    value = _moment(graph, node, values[1])
    if unit in _UNITS:
        data = graph.add("Sub", value.data, _modulo(graph, value.data, _UNITS[unit]))
        # Before the first representable unit the subtraction wraps around; Spark refuses that only for long units.
        wrong = graph.add("Greater", data, value.data) if _UNITS[unit] >= _MINUTE else None
        return graph.result(TIMESTAMP, data, [value], wrong=wrong)
    days = _over(graph, value.data, DAY)
    first = _first_of(graph, node, unit, days, "year, quarter, month, week, or a smaller unit")
    wrong = graph.add("Less", first, _int(graph, -(LONG.high // DAY)))
    return graph.result(TIMESTAMP, _times(graph, first, DAY), [value], wrong=wrong)


@rule("trunc", 2)
def _trunc(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    unit = _unit(node, node.arguments[1])
    days, value = _days(graph, node, values[0])
    first = _first_of(graph, node, unit, days, "year, quarter, month or week")
    return graph.result(DATE, graph.cast(first, DATE), [value])
