"""How a value is shown in a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.features.quality.statistics import ViewStatistics


FEATURE_COLUMNS = ("feature", "type", "nulls", "distinct", "low", "median", "high", "mean")


def cell(value: object) -> str:
    """A value as the text of a table cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "none"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def feature_rows(statistics: "ViewStatistics") -> list[list[str]]:
    """The features of a view as rows of FEATURE_COLUMNS; of categories the most frequent stands for the median."""
    rows = []
    for name, one in statistics.features.items():
        nulls = f"{one.nulls / one.rows:.1%}" if one.rows else "-"
        middle = next(iter(one.top), None) if one.categorical else one.quantile(0.5)
        figures = map(cell, (one.distinct, one.low, middle, one.high, one.mean))
        rows.append([name, one.dtype, nulls, *figures])
    return rows
