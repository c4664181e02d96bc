"""Functions of dates (days since 1970) and timestamps (microseconds since 1970 UTC), all in the Gregorian calendar.

Dates are computed as in H. Hinnant, "chrono-compatible low-level date algorithms" (2013), also before 1582, as in
Spark. Parts of dates are int64. `/` truncates, so it divides only non-negative numbers.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.casts import DAY, SECOND, floor_divided
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Operand, Tensor
from isthmus.transforms.rowwise.core.types import DATE, INT, LONG, TIMESTAMP, VOID

_HOUR, _MINUTE = 3600 * SECOND, 60 * SECOND


def _days(node: ExpressionNode, value: Value) -> tuple[Tensor, Value]:
    if value.kind == VOID:
        value = casts.widened(value, DATE)
    if value.kind == TIMESTAMP:
        return _over(value.data, DAY), value
    if value.kind != DATE:
        raise NotCompilableError(node, f"takes a date or a timestamp, not {value.kind}", "a cast of a timestamp")
    return value.data.cast(LONG), value


def _sum(first: Tensor, *parts: Operand) -> Tensor:
    # All parts are in the graph before the first sum.
    summands = [part if isinstance(part, Tensor) else first.graph.number(part) for part in parts]
    return reduce(add, summands, first)


def _over(data: Tensor, divisor: int) -> Tensor:
    return floor_divided(data, divisor)[0]


def _modulo(data: Tensor, divisor: int) -> Tensor:
    return floor_divided(data, divisor)[1]


def civil(days: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Days since 1970. Months and days start from 1.
    era, of_era = floor_divided(days + 719_468, 146_097)
    leap = _sum(of_era, of_era / 1460 * -1, of_era / 36_524, of_era / 146_096 * -1)
    year_of_era = leap / 365
    before = _sum(year_of_era * 365, year_of_era / 4, year_of_era / 100 * -1)
    of_year = of_era - before
    # Years begin in March here, so that a leap day is their last day.
    march = (of_year * 5 + 2) / 153
    day = _sum(of_year, (march * 153 + 2) / 5 * -1, 1)
    late = march > 9
    month = march + late.where(-9, 3)
    next_year = late.where(1, 0)
    return _sum(year_of_era, era * 400, next_year), month, day


def days_from_civil(year: Tensor, month: Tensor, day: Tensor) -> Tensor:
    early = month <= 2
    year = year - early.where(1, 0)
    era, year_of_era = floor_divided(year, 400)
    march = month + early.where(9, -3)
    of_year = _sum(_over(march * 153 + 2, 5), day, -1)
    of_era = _sum(year_of_era * 365, year_of_era / 4, year_of_era / 100 * -1, of_year)
    return _sum(era * 146_097, of_era, -719_468)


def _day_of_year(days: Tensor) -> Tensor:
    year, one = civil(days)[0], days.graph.number(1)
    first = days_from_civil(year, one, one)
    return _sum(days, first * -1, 1)


def _week(days: Tensor) -> Tensor:
    thursday = _sum(days, _modulo(days + 3, 7) * -1, 3)
    return _over(_day_of_year(thursday) + -1, 7) + 1


def _quarter(days: Tensor) -> Tensor:
    return _over(civil(days)[1] + -1, 3) + 1


@rule("year", 1, find=lambda days: civil(days)[0])
@rule("month", 1, find=lambda days: civil(days)[1])
@rule("day dayofmonth", 1, find=lambda days: civil(days)[2])
@rule("quarter", 1, find=_quarter)
@rule("dayofyear", 1, find=_day_of_year)
@rule("weekofyear", 1, find=_week)
def _part(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, find: Callable[[Tensor], Tensor]) -> Value:
    days, value = _days(node, values[0])
    return graph.result(INT, find(days).cast(INT), [value])


@rule("dayofweek", 1, epoch=4, first=1)
@rule("weekday", 1, epoch=3, first=0)
def _of_week(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, epoch: int, first: int) -> Value:
    """Return the number of a day in its week. `epoch` is the number of 1970's first day, `first` the lowest number."""
    if values[0].kind == TIMESTAMP:
        value = values[0]
        # Reduce to one week first, so that no number is negative or too large.
        days = _modulo(value.data, 7 * DAY) / DAY
    else:
        days, value = _days(node, values[0])
    place = _modulo(days + epoch, 7)
    return graph.result(INT, (place + first if first else place).cast(INT), [value])


def _moment(node: ExpressionNode, value: Value) -> Value:
    if value.kind in (DATE, VOID):
        return casts.widened(value, TIMESTAMP)
    if value.kind != TIMESTAMP:
        raise NotCompilableError(node, f"takes a timestamp, not {value.kind}", "timestamp_seconds of a number")
    return value


@rule("hour", 1, within=DAY, unit=_HOUR)
@rule("minute", 1, within=_HOUR, unit=_MINUTE)
@rule("second", 1, within=_MINUTE, unit=SECOND)
def _clock(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, within: int, unit: int) -> Value:
    value = _moment(node, values[0])
    return graph.result(INT, (_modulo(value.data, within) / unit).cast(INT), [value])


@rule("unix_seconds", 1, unit=SECOND)
@rule("unix_millis", 1, unit=1000)
@rule("unix_micros", 1, unit=1)
def _unix(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, unit: int) -> Value:
    value = _moment(node, values[0])
    return graph.result(LONG, _over(value.data, unit) if unit > 1 else value.data, [value])


@rule("timestamp_seconds", 1, unit=SECOND)
@rule("timestamp_millis", 1, unit=1000)
@rule("timestamp_micros", 1, unit=1)
def _from_unix(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, unit: int) -> Value:
    (value,) = values
    if not (value.kind.integral or value.kind == VOID):
        raise NotCompilableError(node, f"takes a whole number, not {value.kind}", "a cast to bigint")
    value = casts.widened(value, LONG)
    low, high = graph.number(-(-LONG.low // unit)), graph.number(LONG.high // unit)
    wrong = (value.data < low) | (value.data > high)
    return graph.result(TIMESTAMP, value.data * unit, [value], wrong=wrong if unit > 1 else None)


@rule("unix_date", 1)
def _unix_date(_graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    if values[0].kind == TIMESTAMP:
        raise NotCompilableError(node, "takes a date, not timestamp", "to_date")
    value = _date(node, values[0])
    return Value(INT, value.data, value.valid, value.raises)


@rule("date_from_unix_date", 1)
def _date_from_unix(_graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    value = _whole(node, values[0])
    return Value(DATE, value.data, value.valid, value.raises)


def _date(node: ExpressionNode, value: Value) -> Value:
    days, value = _days(node, value)
    return value if value.kind == DATE else days.graph.result(DATE, days.cast(DATE), [value])


def _whole(node: ExpressionNode, value: Value) -> Value:
    if value.kind == VOID or (value.kind.integral and value.kind != LONG):
        return casts.widened(value, INT)
    raise NotCompilableError(node, f"takes an int, not {value.kind}", "a cast to int")


@rule("to_date", 1)
def _to_date(_graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    return _date(node, values[0])


@rule("datediff date_diff", 2)
def _datediff(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    end, start = (_date(node, value) for value in values)
    return graph.result(INT, end.data - start.data, [end, start])


@rule("date_add dateadd", 2, operator="Add")
@rule("date_sub", 2, operator="Sub")
def _moved(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    start, count = _date(node, values[0]), _whole(node, values[1])
    return graph.result(DATE, graph.add(operator, start.data, count.data), [start, count])


def _month_days(year: Tensor, month: Tensor) -> Tensor:
    one = year.graph.number(1)
    last = month.equals(12)
    after = last.where(one, month + one)
    following = year + last.where(one, 0)
    begin, end = days_from_civil(year, month, one), days_from_civil(following, after, one)
    return end - begin


@rule("last_day", 1)
def _last_day(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    days, value = _days(node, values[0])
    year, month, _ = civil(days)
    return graph.result(DATE, days_from_civil(year, month, _month_days(year, month)).cast(DATE), [value])


@rule("add_months", 2)
def _add_months(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    start, count = _date(node, values[0]), _whole(node, values[1])
    year, month, day = civil(start.data.cast(LONG))
    year, place = floor_divided(_sum(year * 12, month, -1, count.data.cast(LONG)), 12)
    month = place + 1
    day = graph.add("Min", day, _month_days(year, month))
    return graph.result(DATE, days_from_civil(year, month, day).cast(DATE), [start, count])


@rule("make_date", 3)
def _make_date(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    parts = [_whole(node, value) for value in values]
    year, month, day = (part.data.cast(LONG) for part in parts)
    odd = (month < 1) | (month > 12)
    month = odd.where(1, month)
    wrong = graph.either(odd, day < 1, day > _month_days(year, month), abs(year) > 999_999_999)
    return graph.result(DATE, days_from_civil(year, month, day).cast(DATE), parts, wrong=wrong)


def _first_of(node: ExpressionNode, unit: str, days: Tensor, units: str) -> Tensor:
    year, month, _ = civil(days)
    first = days.graph.number(1)
    match unit:
        case "year" | "yyyy" | "yy":
            return days_from_civil(year, first, first)
        case "quarter":
            return days_from_civil(year, (_quarter(days) + -1) * 3 + 1, first)
        case "month" | "mon" | "mm":
            return days_from_civil(year, month, first)
        case "week":
            return days - _modulo(days + 3, 7)
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
    value = _moment(node, values[1])
    if unit in _UNITS:
        data = value.data - _modulo(value.data, _UNITS[unit])
        # Before the first representable unit the subtraction wraps around; Spark refuses that only for long units.
        wrong = data > value.data if _UNITS[unit] >= _MINUTE else None
        return graph.result(TIMESTAMP, data, [value], wrong=wrong)
    first = _first_of(node, unit, _over(value.data, DAY), "year, quarter, month, week, or a smaller unit")
    wrong = first < -(LONG.high // DAY)
    return graph.result(TIMESTAMP, first * DAY, [value], wrong=wrong)


@rule("trunc", 2)
def _trunc(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    unit = _unit(node, node.arguments[1])
    days, value = _days(node, values[0])
    first = _first_of(node, unit, days, "year, quarter, month or week")
    return graph.result(DATE, first.cast(DATE), [value])
