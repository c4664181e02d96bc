"""Views with aggregations, which a stream keeps up to date from tiles."""

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from isthmus.features.errors import ConfigurationError, IsthmusError
from isthmus.orchestration.streams.stream import stream
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.verify import verify
from tests.orchestration.streams.buses import TILED, Buses, as_json, shuffled, stops

EVENTS = stops(600)
ARCHIVE, LATER = EVENTS.slice(0, 200), EVENTS.slice(200)
FILES = 'FileStream("data/in")'


def test_history_redis_and_the_verdict_equal_a_build(tmp_path: Path) -> None:
    buses = Buses(tmp_path / "buses", view=TILED)
    project = buses.write(FILES, ARCHIVE)
    arriving = [value for _, value in as_json(shuffled(LATER))]
    with project.redis():
        for number, start in enumerate(range(0, len(arriving), 100)):
            file = buses.root / "data" / "in" / f"{number:04}.jsonl"
            file.write_bytes(b"\n".join(arriving[start : start + 100]) + b"\n")
            status = stream(project, once=True)["stops"]
        assert status.late > 0
        assert buses.rows() == buses.oracle(EVENTS)
        build(project)
        assert materialize(project)["crowding"].written == 0
        verdict = verify(project)
        assert verdict.passed, verdict.named()
        compared = verdict.views["crowding from tiles"]
        assert set(compared) == {field.name for field in project.definitions.contract.views["crowding"].fields}
        assert all(feature.compared > 50 for feature in compared.values())
        assert verdict.differing == 0


FUNCTION = 'return stops.withColumn("seconds", F.floor(F.col("delay") * 60))'


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ('return stops.withColumn("seconds", F.col("delay") * 60)',
         "its column 'seconds' has type double; expected an integer, because sums of other numbers depend on their"),
        ("return stops", "its result has no column 'seconds'"),
        ('return stops.drop("known", "at").withColumn("seconds", F.lit(1))', "its result has no column"),
        (f'{FUNCTION}.withColumn("n", F.count("*").over(Window.partitionBy("bus")))', "the operation 'window'"),
        (f'{FUNCTION}.dropDuplicates(["bus", "at"])', "the operation 'deduplicate'"),
        (f'{FUNCTION}.join(stops.groupBy("bus").count(), "bus")', "the operation 'join'"),
        (f'{FUNCTION}.drop("known")', "its result has no column 'known', when an event became known; expected known"),
        (f'{FUNCTION}.withColumn("riders", F.lit(1 << 62))', "the sum of riders exceeds 64 bits"),
        (f'{FUNCTION}.withColumn("known_at", F.col("known") - F.expr("INTERVAL 10 SECONDS")).drop("known")',
         "its function returns other times than known; expected known as it is in stops"),
        (f'{FUNCTION}.withColumn("seconds", F.floor(F.rand() * 60))', "computed from its own events, "),
    ],
    ids=["a fraction", "no column", "no time", "a window", "distinct", "itself", "no known time", "overflow", "earlier",
         "random"],
)  # fmt: skip
def test_apply_refuses_what_cannot_be_added_up(tmp_path: Path, function: str, problem: str) -> None:
    buses = Buses(tmp_path / "buses", view=TILED.replace(FUNCTION, function))
    with pytest.raises(IsthmusError, match="view crowding") as caught:
        buses.write(FILES, ARCHIVE)
    assert problem in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("tick=timedelta(minutes=5)", "tick=timedelta(0)", "view crowding, tick 0:00:00; expected a whole number of"),
        ("tick=timedelta(minutes=5)", "tick=timedelta(minutes=7)", "view crowding, windows 0:10:00; expected a mult"),
        ("tick=timedelta(minutes=5)", "tick=300", "view crowding, tick 300"),
        ('Min("seconds")', '"seconds"', "view crowding, tiles"),
        ('Min("seconds")', "Min(3)", "column 3; expected a text"),
        ('Min("seconds")', 'Min("seconds"), Min("seconds")', "field 'seconds_min_10m': appears twice"),
        ("windows=[timedelta(minutes=10), timedelta(hours=2)]", "windows=[]", "view crowding, windows is empty"),
        ("timedelta(hours=4)", "timedelta(hours=2)", "crowding, lookback: 2:00:00; expected the longest window and"),
        ('Min("seconds")', 'Count("bus")', "view crowding, tiles: aggregate the join key bus; expected another column"),
        ("lookback=timedelta(hours=4), ", "", "reads the stream of stops without a lookback"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_explained(tmp_path: Path, before: str, after: str, problem: str) -> None:
    assert before in TILED
    buses = Buses(tmp_path / "buses", view=TILED.replace(before, after))
    with pytest.raises(ConfigurationError) as caught:
        buses.write(FILES, ARCHIVE)
    assert problem in " ".join(str(caught.value).split())


def test_texts_are_counted_flags_are_averaged_and_other_sources_joined(tmp_path: Path) -> None:
    view = TILED.replace(FUNCTION, (
        'names = stops.sparkSession.createDataFrame([("A", "red"), ("B", None)], "bus string, color string")\n'
        f'    return {FUNCTION.removeprefix("return ")}.join(F.broadcast(names), "bus", "left").where("riders > 2")'
        '.withColumn("full", F.col("riders") > 30)'
    )).replace('Mean("riders")', 'Mean("full"), Count("color")')  # fmt: skip
    buses = Buses(tmp_path / "buses", view=view)
    project = buses.write(FILES, ARCHIVE)
    (buses.root / "data" / "in" / "1.jsonl").write_bytes(b"\n".join(value for _, value in as_json(shuffled(LATER))))
    with project.redis():
        stream(project, once=True)
    rows = buses.rows()
    assert rows == buses.oracle(EVENTS)
    assert {row["color_count_2h"] > 0 for row in rows} == {True, False}
    assert any(0 < row["full_mean_2h"] < 1 for row in rows)


def test_rows_of_keys_that_the_function_changes_follow_the_stream(tmp_path: Path) -> None:
    buses = Buses(tmp_path / "buses", view=TILED.replace(FUNCTION, f'{FUNCTION}.withColumn("bus", F.upper("bus"))'))
    project = buses.write(FILES, ARCHIVE)
    later = LATER.set_column(0, "bus", pc.utf8_lower(LATER["bus"]))
    for number, part in enumerate((later.slice(0, 100), later.slice(100))):
        file = buses.root / "data" / "in" / f"{number}.jsonl"
        file.write_bytes(b"\n".join(value for _, value in as_json(shuffled(part))))
        with project.redis():
            stream(project, once=True)
    assert buses.rows() == buses.oracle(pa.concat_tables([ARCHIVE, later]))


def test_a_lookback_includes_the_time_until_events_are_known(tmp_path: Path) -> None:
    view = TILED.replace("timedelta(hours=4)", "timedelta(hours=2, minutes=5)")
    slow = EVENTS.set_column(2, "known", pc.add(EVENTS["known"], pa.scalar(timedelta(hours=1))))
    with pytest.raises(ConfigurationError, match=r"known up to 1:0.* after their time, and a window is 2:00:00"):
        Buses(tmp_path / "buses", view=view).write(FILES, slow)


def test_windows_and_tick_are_part_of_the_definition(tmp_path: Path) -> None:
    hashes = {
        Buses(tmp_path / name, view=TILED.replace(before, after))
        .write(FILES, ARCHIVE).definitions.contract.views["crowding"].hash
        for name, before, after in (
            ("same", "", ""), ("tick", "minutes=5", "minutes=10"), ("kind", 'Mean("riders")', 'Mean("riders", "mean")')
        )
    }  # fmt: skip
    assert len(hashes) == 3
