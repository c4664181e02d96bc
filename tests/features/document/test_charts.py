"""Charts: every number has its place, every name is shown whole, and nothing in a name is markup."""

import re
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.document.blocks import Figure
from isthmus.features.document.charts import Axis, ChartRow, Dot, Line, axis, plot, rows_chart

NUMBERS = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5)


@given(NUMBERS)
def test_every_number_has_its_place_on_an_axis(values: list[float]) -> None:
    line = axis(values, 10, 90)
    for value in (*values, *line.ticks()):
        assert 10 - 1e-6 <= line(value) <= 90 + 1e-6
    assert 2 <= len(line.ticks()) <= 8


@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=5))
def test_every_latency_has_its_place_on_a_logarithmic_axis(values: list[float]) -> None:
    line = axis(values, 10, 90, log=True)
    for value in (*values, *line.ticks()):
        assert 10 - 1e-6 <= line(value) <= 90 + 1e-6
    assert 2 <= len(line.ticks()) <= 8


def test_ticks_are_round() -> None:
    assert Axis(0.0, 1.0, 0, 1).ticks() == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis(0.7369, 0.7531, 0, 1).ticks() == [0.74, 0.745, 0.75]
    assert Axis(12, 4100, 0, 1, log=True).ticks() == [100, 1000]
    assert Axis(9, 62, 0, 1, log=True).ticks() == [10, 20, 50]
    assert Axis(27, 62, 0, 1, log=True).ticks() == [27, 62]


def elements(figure: Figure, kind: str) -> list[ET.Element]:
    drawing = ET.fromstring(f"<svg>{figure.content}</svg>")  # noqa: S314 - made here
    return list(drawing.iter(kind))


def test_rows_show_their_names_and_texts_and_make_room_for_them() -> None:
    names = ["teacher", '<b>a name of more than forty characters, with & and "</b>']
    rows = [ChartRow(name, bars=[(None, 3.0, "red")], span=(1.0, 2.0), dots=[2.0], faint=[1.0, 4.0], text="1 of 2")
            for name in names]  # fmt: skip
    figure = rows_chart(rows, "rows")
    texts = [text.text for text in elements(figure, "text")]
    assert {*names, "1 of 2"} <= {*texts}
    assert figure.width > rows_chart(rows[:1], "row").width == 320
    for circle in elements(figure, "circle"):
        assert 300 < float(circle.attrib["cx"]) < figure.width
    assert (len(elements(figure, "rect")), len(elements(figure, "circle"))) == (2, 6)
    assert elements(rows_chart([], "nothing"), "rect") == []


def test_limits_are_on_the_axes_even_if_no_dot_is_near_them() -> None:
    figure = plot("x", "x", dots=[Dot(10.0, 1.0, "blue")], log=True, x_limits=[1000.0], y_limits=[5.0])
    limits = [line for line in elements(figure, "line") if line.attrib["class"] == "limit"]
    assert len(limits) == 2
    for line in limits:
        assert 0 <= float(line.attrib["x2"]) <= figure.width
        assert 0 <= float(line.attrib["y2"]) <= figure.height


def test_a_plot_names_its_weeks_and_lines() -> None:
    weeks = [f"2026-W{n}" for n in range(10, 22)]
    dots = [Dot(float(n), 0.5, "green", interval=(0.4, 0.6)) for n in range(len(weeks))]
    shown = [text.text for text in elements(plot("x", "x", dots=dots, x_names=weeks), "text")]
    assert shown[:3] == ["2026-W10", "2026-W14", "2026-W18"]
    lines = [Line([(0.0, 1.0), (1.0, 2.0)], "blue", "student", faint) for faint in (False, True)]
    figure = plot("x", "x", lines=[*lines, Line([(0.0, 1.5)], "orange", "control")], x_label="steps")
    assert [text.text for text in elements(figure, "text")][-3:] == ["steps", "student", "control"]
    assert len(re.findall("<polyline", figure.content)) == 2
    assert len(elements(figure, "circle")) == 1  # a line of one point


def test_two_sides_may_be_as_large_as_floats_are() -> None:
    # An eighth of the largest float: the verdict divides by it.
    figure = plot("x", "x", dots=[Dot(at, -at, "red") for at in (2e307, -2e307, 0.0)], diagonal=True)
    assert "inf" not in figure.content
    assert "nan" not in figure.content
