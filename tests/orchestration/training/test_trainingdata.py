"""Training data for spines of one's own: every form, every refusal, and the same again from the record."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import DeltaTable
from torch.utils.data import DataLoader

import isthmus
from isthmus import DataError, IsthmusError, RequestError
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.data import TrainingData
from isthmus.orchestration.training.record import reproduce
from isthmus.orchestration.training.set import training_set, write_training_set
from isthmus.orchestration.training.spinesql import is_sql
from isthmus.transforms.views.executorset import StoredSpine
from tests.commandline import run
from tests.features.support import join_naively
from tests.orchestration.shop import START, Open, Shop, files, order_rows

FEATURES = "customer_orders:orders_7d,customer_orders:late_rate_7d,customer_facts:city"
SQL = "SELECT customer, ordered_at AS event_timestamp, late FROM orders ORDER BY event_timestamp"


def _spine(rows: int = 300) -> pa.Table:
    table = order_rows(rows).select(["customer", "ordered_at", "late"])
    return table.rename_columns({"ordered_at": "event_timestamp"})


def _expected(shop: Shop, project: Open, spine: pa.Table) -> pa.Table:
    opened = project(shop)
    joined, names = spine, list(spine.column_names)
    for view in ("customer_orders", "customer_facts"):
        joined = join_naively(joined, OfflineStore(opened.offline).history(opened.definitions.contract.views[view]))
        names += [f"{view}__{f}" for f in (("orders_7d", "late_rate_7d") if view == "customer_orders" else ("city",))]
        names += [f"{view}__status"]
    return joined.select(names)


FORMS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "table": lambda spine, _: spine,
    "batch": lambda spine, _: spine.combine_chunks().to_batches()[0],
    "reader": lambda spine, _: spine.to_reader(17),
    "dataset": lambda spine, _: ds.dataset(spine),
    "pandas": lambda spine, _: spine.to_pandas(),
    "polars": lambda spine, _: pl.from_arrow(spine),
    "lazy": lambda spine, _: pl.from_arrow(spine).lazy(),  # type: ignore[union-attr]
    "objects": lambda spine, _: spine.to_pandas().astype(object),
    "parquet": lambda spine, folder: _written(spine, folder / "spine.parquet"),
    "folder": lambda spine, folder: _written(spine, folder / "spine" / "0.parquet").parent,
    "csv": lambda spine, folder: _written(spine, folder / "spine.csv"),
}


def _written(spine: pa.Table, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        pa.csv.write_csv(spine, path)
    else:
        pq.write_table(spine, path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_spine_in_every_form(built: Shop, project: Open, tmp_path: Path, form: str) -> None:
    spine = _spine()
    data = isthmus.training_data(built.root, FEATURES.split(","), FORMS[form](spine, tmp_path))
    joined = data.table()
    expected = _expected(built, project, spine)
    assert joined.column_names == expected.column_names
    assert joined.to_pydict() == expected.to_pydict()
    assert {"present", "expired", "not_found"} <= set(joined["customer_orders__status"].to_pylist())
    if form == "reader":
        with pytest.raises(DataError, match="is a stream that was already read"):
            data.table()
    else:
        assert data.reader().read_all().equals(joined)


def test_a_spine_asked_for_in_sql(built: Shop, project: Open) -> None:
    spine = pq.read_table(built.orders).select(["customer", "ordered_at", "late"])
    spine = spine.rename_columns({"ordered_at": "event_timestamp"}).sort_by("event_timestamp")
    joined = isthmus.training_data(built.root, FEATURES, SQL).table()
    assert joined.to_pydict() == _expected(built, project, spine).to_pydict()
    commented = f"/* the orders;\nselect * */ -- of all\n({SQL})"
    assert isthmus.training_data(built.root, FEATURES, commented).table().equals(joined)
    over_a_view = "FROM shelf_demand SELECT DISTINCT store, product, event_timestamp LIMIT 5"
    assert len(isthmus.training_data(built.root, "shelf_demand", over_a_view, status=False).table()) == 5


def test_a_service_names_its_features_in_order(built: Shop) -> None:
    spine = order_rows(20).select(["customer", "store", "product", "ordered_at"])
    spine = spine.rename_columns({"ordered_at": "event_timestamp"})
    joined = isthmus.training_data(built.root, "late_order_server", spine, status=False).table()
    assert joined.column_names[4:] == [
        "customer_orders__orders_7d", "customer_orders__mean_amount_7d", "customer_orders__late_rate_7d",
        "shelf_demand__sold_1d", "shelf_demand__distance", "customer_facts__member", "customer_facts__born",
    ]  # fmt: skip


def test_without_a_status_old_rows_are_not_missed(built: Shop) -> None:
    spine = _spine().slice(250)
    with_status = isthmus.training_data(built.root, FEATURES, spine).table()
    without = isthmus.training_data(built.root, FEATURES, spine, status=False).table()
    assert without.equals(with_status.select(without.column_names))
    assert not [name for name in without.column_names if name.endswith("__status")]


def test_no_path_reads_as_sql(tmp_path: Path) -> None:
    for name in ["values.csv", "select.parquet", "with/rows.parquet", "from", "withdrawals.csv", "-- june.csv"]:
        assert not is_sql(name)
    for begun in ["(", "/*", "/**/", "--\n", " "]:
        assert not is_sql(begun * 10_000 + "x")  # in time that grows with the text: it is done


def test_categories_of_polars_are_texts(built: Shop) -> None:
    rows = pq.read_table(built.orders).slice(0, 50).select(["store", "product", "ordered_at"])
    spine = pl.DataFrame(rows.rename_columns({"ordered_at": "event_timestamp"}))
    joined = isthmus.training_data(built.root, "shelf_demand", spine).table()
    for frame in [of_categories := spine.with_columns(pl.col("store").cast(pl.Categorical)), of_categories.lazy()]:
        assert isthmus.training_data(built.root, "shelf_demand", frame).table().to_pydict() == joined.to_pydict()


def test_texts_of_several_lines_in_a_csv(built: Shop, tmp_path: Path) -> None:
    """More of them than Arrow reads in one block."""
    notes = [f'"a", b\n\n{"and so on, " * 20}\n{n}' for n in range(8000)]
    spine = pa.table({"customer": [n % 60 * 1_000_003 for n in range(8000)], "note": notes})
    spine = spine.append_column("event_timestamp", pa.array([START] * 8000).cast(pa.timestamp("us", tz="UTC")))
    joined = isthmus.training_data(built.root, FEATURES, _written(spine, tmp_path / "spine.csv")).table()
    assert joined["note"].to_pylist() == notes


def _changed(name: str, column: Any) -> Callable[[Path], pa.Table]:
    return lambda _: _spine().set_column(_spine().column_names.index(name), name, column)


def test_an_empty_cell_of_a_csv_is_a_null_and_nothing_else_is(built: Shop, tmp_path: Path) -> None:
    """A default would not stand in for an empty text; an Expect.present would let it pass."""
    times = pa.array([START] * 5).cast(pa.timestamp("us", tz="UTC"))
    spine = pa.table({"store": ["north", None, None, "NA", "null"], "product": pa.array([1] * 5, pa.int32())})
    spine = spine.append_column("event_timestamp", times).append_column("note", spine["store"])
    joined = isthmus.training_data(built.root, "shelf_demand", _written(spine, tmp_path / "spine.csv")).table()
    assert joined["store"].to_pylist() == joined["note"].to_pylist() == spine["store"].to_pylist()


def test_a_spine_has_the_columns_and_texts_of_all_its_files(built: Shop, tmp_path: Path) -> None:
    for n, (folder, more) in enumerate([("zip=007", {}), ("zip=12", {"note": ["a"]})]):
        kind = (pa.int32(), pa.int64())[n]
        rows = {"customer": pa.array([n], pa.int64()), "n": pa.array([2 ** (40 * n)], kind), **more}
        times = pa.array([START]).cast(pa.timestamp("us", tz="UTC"))
        (tmp_path / "spine" / folder).mkdir(parents=True)
        pq.write_table(pa.table({**rows, "event_timestamp": times}), tmp_path / "spine" / folder / "x.parquet")
    joined = isthmus.training_data(built.root, FEATURES, tmp_path / "spine").table()
    assert joined.select(["n", "note", "zip"]).to_pylist() == [
        {"n": 1, "note": None, "zip": "007"}, {"n": 2**40, "note": "a", "zip": "12"},
    ]  # fmt: skip


def test_a_csv_has_the_types_that_are_declared_and_text_otherwise(built: Shop, project: Open, tmp_path: Path) -> None:
    text = "customer,event_timestamp,late,zip\n7,2024-01-02T00:00:00Z,1,007\n8,2024-01-02T00:00:00Z,,1e5\n"
    (tmp_path / "spine.csv").write_text(text)
    made = isthmus.training_data(built.root, FEATURES, tmp_path / "spine.csv").write(tmp_path / "set")
    rows = made.table().select(["customer", "late", "zip"]).to_pylist()
    assert rows == [{"customer": 7, "late": 1, "zip": "007"}, {"customer": 8, "late": None, "zip": "1e5"}]
    # A set has the types of its time, also where they were guessed or are declared in another way now.
    built.replace('label=Field("late", Int64', 'label=Field("delayed", Int64')
    assert reproduce(project(built), str(made.path), tmp_path / "again").table().equals(made.table())


def _text(text: str, name: str = "spine.csv") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "without time": (lambda _: _spine().drop_columns("event_timestamp"), "spine: has no column event_timestamp"),
    "naive times": (
        _changed("event_timestamp", _spine()["event_timestamp"].cast(pa.timestamp("us"))),
        r"spine, event_timestamp: has type timestamp\[us\]; expected a timestamp with a time zone",
    ),
    "naive times of pandas": (
        lambda _: pd.DataFrame({"customer": [1], "event_timestamp": [datetime(2024, 1, 1)]}),  # noqa: DTZ001
        r"event_timestamp: has type timestamp\[.s\]; expected a timestamp with a time zone",
    ),
    "naive times of CSV": (
        _text("customer,event_timestamp\n1,2024-01-01T00:00:00\n"),
        "spine .*spine.csv: row 2, column event_timestamp, is .*zone.*, like 2024-01-01T00:00:00Z"),
    "no time in a row": (
        _changed("event_timestamp", pa.array([0] * 299 + [None]).cast(pa.timestamp("us", tz="UTC"))),
        "spine, event_timestamp: is null in row 299; expected no null",
    ),
    "without a key": (lambda _: _spine().drop_columns("customer"), "has no column customer; expected every key of"),
    "a key of another type": (
        _changed("customer", pa.array(["x"] * 300)), "spine, customer: has type string; expected int64"),
    "a clash": (
        lambda _: _spine().append_column("customer_facts__city", pa.array(["x"] * 300)),
        "spine: has a column customer_facts__city; expected column names that differ from features",
    ),
    "no file": (lambda folder: folder / "none.parquet", "spine: file .*none.parquet not found"),
    "no query": (lambda _: "UPDATE orders SET late = 0", "file .*UPDATE .* not found; .* or a query: a single SELECT"),
    "a text that no file can be called": (lambda _: "UPDATE orders SET" + " late = 0," * 500, "not found"),
    "a damaged file": (_text("PAR1 and then nothing", "spine.parquet"), "spine .*spine.parquet: cannot be read"),
    "a damaged CSV": (_text("customer,event_timestamp\n1\n"), "spine .*spine.csv: row 2 has 1 cells"),
    "a wrong value in a CSV": (
        _text("customer,event_timestamp\nx,2024-01-01T00:00:00Z\n"), "row 2, column customer, is 'x'; expected Int64"),
    "an empty folder": (lambda folder: folder, "contains no Parquet file"),
    "another thing": (lambda _: {"customer": [1]}, "spine: is a dict; expected a pyarrow Table"),
    "a mixed column of pandas": (
        lambda _: pd.DataFrame({"customer": [1, "x"]}), "spine: cannot be read .*customer"),
    "SQL of a table that is not there": (
        lambda _: "SELECT * FROM nothing", "its SQL fails .*nothing does not exist.*The tables are .*orders"),
    "SQL that is none": (lambda _: "SELECT FROM", "its SQL fails .*syntax error"),
    "SQL that fails in a row": (
        lambda _: "SELECT city::INT AS customer, now() AS event_timestamp FROM customer_facts",
        "its SQL fails .*Could not convert string 'Zürich'",
    ),
    "SQL that reads a file": (lambda _: "SELECT * FROM read_csv('/etc/passwd')", "its SQL fails .*Permission Error"),
    "SQL that writes": (
        lambda _: "WITH x AS (SELECT 1) SELECT 1; COPY orders TO '/tmp/x.csv'", "its SQL is 2 statements or writes"),
}  # fmt: skip


def test_what_is_said_of_times_and_keys_mends_them(built: Shop, project: Open, tmp_path: Path) -> None:
    def refused(rows: object) -> str:
        with pytest.raises(DataError) as caught:
            isthmus.training_data(project(built), FEATURES, rows)
        return str(caught.value)

    rows = pd.DataFrame({"customer": ["1"], "event_timestamp": [datetime(2024, 1, 1)]})  # noqa: DTZ001
    assert refused(rows).endswith("Add a time zone; in pandas, pandas.to_datetime(times, utc=True)")
    rows["event_timestamp"] = pd.to_datetime(rows["event_timestamp"], utc=True)
    assert refused(rows) == "spine, customer: has type string; expected int64. Cast it to int64"
    rows["customer"] = rows["customer"].astype("int64")
    assert len(isthmus.training_data(project(built), FEATURES, rows).table()) == 1
    file = _text("customer,event_timestamp\n1,2024-01-01T00:00:00Z\n")(tmp_path)
    assert len(isthmus.training_data(project(built), FEATURES, file).table()) == 1


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spine_is_one_clear_error_and_writes_nothing(
    built: Shop, project: Open, tmp_path: Path, case: str
) -> None:
    make, message = BAD[case]
    folder = tmp_path / "given"
    folder.mkdir()
    spine = make(folder)
    before = files(built.state)
    with pytest.raises(IsthmusError, match=message):
        isthmus.training_data(project(built), FEATURES, spine).write(tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    assert files(built.state) == before


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("nobody", "features, 'nobody': is not in the contract; expected one of late_order_device"),
        (["late_order_device"], "'late_order_device': is a service; expected features='late_order_device', without a"),
        ("customer_facts:height", "view customer_facts has no such feature; expected one of born, city"),
        (["customer_facts", "customer_facts:city"], "customer_facts:city: is listed twice"),
        ([], "features: the list is empty"),
    ],
)
def test_features_that_are_not_there(built: Shop, features: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        isthmus.training_data(built.root, features, _spine())


def _more_orders(shop: Shop, project: Open) -> None:
    """New data arrive, and the tables are built anew."""
    more = order_rows(2500, seed=1).slice(0, 60)
    pq.write_table(pa.concat_tables([pq.read_table(shop.orders), more]), shop.orders)
    assert build(project(shop), ["customer_orders"])["customer_orders"].changed


@pytest.mark.parametrize("form", ["table", "reader", "lazy", "folder", "csv", "sql"])
def test_the_same_again_after_new_data(built: Shop, project: Open, tmp_path: Path, form: str) -> None:
    spine = SQL if form == "sql" else FORMS[form](_spine(), tmp_path)
    made = isthmus.training_data(built.root, FEATURES, spine).write(tmp_path / "june")
    assert made.table().equals(ds.dataset(made.path, format="parquet").to_table())
    assert made.rows_in == made.rows_out == len(made.table())
    before = files(made.path)
    _more_orders(built, project)
    assert write_training_set(project(built), like=made.id, out=tmp_path / "again").id == made.id
    again = files(tmp_path / "again")
    assert {name: again[name] for name in again if name != "_record.json"} == {
        name: before[name] for name in before if name != "_record.json"
    }
    (made.path / "data.parquet").unlink()
    assert write_training_set(project(built), like=str(made.path)).path == made.path
    assert files(made.path) == before
    assert reproduce(project(built), str(made.path / "_record.json")).id == made.id
    assert isthmus.training_data(built.root, FEATURES, _spine()).write(tmp_path / "july").id != made.id


def test_a_distillation_again_after_new_data(built: Shop, project: Open) -> None:
    made = training_set(project(built))
    before = files(made.path)
    _more_orders(built, project)
    (made.path / "data.parquet").unlink()
    assert reproduce(project(built), made.id) == made
    assert files(made.path) == before


def test_the_sizes_of_batches_make_no_difference(built: Shop, tmp_path: Path) -> None:
    spine = _spine().append_column("note", pa.array([None if n % 3 else f"n{n}" for n in range(300)]))
    made = [isthmus.training_data(built.root, FEATURES, spine.to_reader(size)).write(tmp_path / str(size))
            for size in (1, 7, 64, 300)]  # fmt: skip
    assert len({m.id for m in made}) == 1
    assert len({files(m.path)["data.parquet"] for m in made}) == 1


def test_what_cannot_be_made_again_says_why(built: Shop, project: Open, tmp_path: Path) -> None:
    path = _written(_spine(), tmp_path / "spine.parquet")
    made = isthmus.training_data(built.root, FEATURES, path).write(tmp_path / "june")
    kept = isthmus.training_data(built.root, FEATURES, _spine()).write(tmp_path / "july")

    def refused(message: str, record: str = made.id) -> None:
        before = files(made.path), files(kept.path)
        with pytest.raises(DataError, match=message):
            reproduce(project(built), record)
        assert (files(made.path), files(kept.path)) == before

    _written(_spine().slice(1), path)
    refused(rf"training set {made.id}: its spine .*spine.parquet now has 299 different rows; expected the 300")
    path.unlink()
    refused("the rows of its spine cannot be read .*not found")
    _written(_spine(), path)
    (kept.path / "_spine.arrow").rename(tmp_path / "kept")
    refused(r"the rows of its spine cannot be read .*_spine.arrow", kept.id)
    (tmp_path / "kept").rename(kept.path / "_spine.arrow")
    _more_orders(built, project)
    table = DeltaTable(str(built.state / "offline" / "customer_orders"))
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    refused("version 0 of the offline table of customer_orders is gone .*missing.*Make a new training set")
    shutil.rmtree(built.state / "offline" / "customer_orders")
    refused("version 0 of the offline table of customer_orders is gone .*nothing at")
    build(project(built), ["customer_orders"])
    refused("version 0 of the offline table of customer_orders has different rows: the table was rebuilt")
    with pytest.raises(RequestError, match="training set 'nowhere': no training set has this path or id"):
        reproduce(project(built), "nowhere")
    (made.path / "_record.json").write_text("{}")
    with pytest.raises(DataError, match="its record cannot be read"):
        reproduce(project(built), str(made.path))


def test_a_folder_that_holds_something_else_stays(built: Shop, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="the folder is not a training set"):
        isthmus.training_data(built.root, FEATURES, _spine()).write(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_training_data_in_pandas_keep_whole_numbers_beside_nulls(built: Shop, tmp_path: Path) -> None:
    visits = pa.array([2**64 - 1, None] * 150, pa.uint64())
    data = isthmus.training_data(built.root, FEATURES, _spine().append_column("visit", visits))
    table, counted = data.table(), "customer_orders__orders_7d"
    written = data.write(tmp_path / "set")
    for frame in (data.pandas(), written.pandas()):
        assert table[counted].null_count
        assert (str(frame[counted].dtype), str(frame["customer_orders__late_rate_7d"].dtype)) == ("Int64", "float32")
        for name in (counted, "visit"):
            assert [None if value is pd.NA else value for value in frame[name]] == table[name].to_pylist()
    chosen = "300 rows, 3 features of customer_orders and customer_facts; "
    assert repr(data).startswith(f"<TrainingData: {chosen}")
    assert repr(written).startswith(f"<TrainingSet {written.id}: {chosen}")


def test_training_data_as_tensors(built: Shop, tmp_path: Path) -> None:
    data = isthmus.training_data(built.root, FEATURES, _spine())
    table = data.table()
    for rows in (data.torch(batch=128), data.write(tmp_path / "set").torch(batch=128)):
        batches = list(DataLoader(rows, batch_size=None))
        assert [len(values["late"]) for values, _ in batches] == [128, 128, 44]
        values = {name: torch.cat([values[name] for values, _ in batches]) for name in batches[0][0]}
        valid = {name: torch.cat([valid[name] for _, valid in batches]) for name in batches[0][1]}
        assert list(values) == [name for name in table.column_names if name != "customer_facts__city"]
        rate = table["customer_orders__late_rate_7d"].to_pylist()
        assert values["customer_orders__late_rate_7d"].dtype == torch.float32
        assert valid["customer_orders__late_rate_7d"].tolist() == [value is not None for value in rate]
        assert values["customer_orders__late_rate_7d"].isnan().tolist() == [value is None for value in rate]
        assert values["customer_orders__orders_7d"].tolist() == [
            value or 0 for value in table["customer_orders__orders_7d"].to_pylist()
        ]
        assert values["event_timestamp"].tolist() == table["event_timestamp"].cast(pa.int64()).to_pylist()
        types = Counter(str(column.dtype).removeprefix("torch.") for column in values.values())
        told = ", ".join(f"{count} {name}" for name, count in types.items())
        assert repr(rows) == f"<Tensors: batches of 128 rows on the CPU, {len(values)} columns ({told})>"
    written = data.write(tmp_path / "set")
    two = DataLoader(written.torch(columns=["late"], batch=50), batch_size=None, num_workers=2)
    assert sorted(n for values, _ in two for n in values["late"].tolist()) == sorted(table["late"].to_pylist())
    with pytest.raises(RuntimeError, match="RequestError: training data: cannot be read in 2 DataLoader workers"):
        next(iter(DataLoader(data.torch(), batch_size=None, num_workers=2)))
    with pytest.raises(RequestError, match="column customer_facts__city: has type string; expected one of customer"):
        data.torch(columns=["customer_facts__city"])


def test_the_command_line(built: Shop, tmp_path: Path) -> None:
    def join(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return run("features", "training-set", *arguments, "--project", str(built.root), "--json")

    path, out = _written(_spine(), tmp_path / "spine.parquet"), tmp_path / "out"
    done = join("--spine", str(path), "--features", FEATURES, "--out", str(out), "--no-status")
    made = json.loads(done.stdout)
    assert (done.returncode, made["rows_out"], made["options"]) == (0, 300, {"status": False})
    before = files(out)
    assert join(
        "--spine", str(path), "--features", FEATURES, "--out", str(out), "--no-status", "--join", "engine"
    ).stdout
    assert files(out) == before
    again = join("--like", made["id"])
    assert json.loads(again.stdout) == made
    assert files(out) == before
    for wrong in (["--spine", SQL], ["--no-status"], ["--like", "x", "--features", "y"], ["--out", "x"]):
        refused = join(*wrong)
        assert refused.returncode == 2
        assert "these options cannot be combined" in refused.stderr
    assert join("late_order", "--like", "x").returncode == 2


def test_the_screen_says_of_each_feature_how_serving_differed(built: Shop, tmp_path: Path) -> None:
    path = _written(_spine(), tmp_path / "spine.parquet")
    done = run(
        "features",
        "training-set",
        "--spine",
        str(path),
        "--features",
        FEATURES,
        "--as-served",
        "--out",
        "x",
        cwd=built.root,
    )
    assert done.returncode == 0, done.stderr
    lag = json.loads((built.root / "x" / "_record.json").read_text())["lag"]
    lines = {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}
    for name in FEATURES.split(","):
        view, feature = name.split(":")
        told = lag[view][feature]
        assert lines[name][:2] == [f"{told['compared']:,}", f"{told['differing']:,}"]
        # A column without a value is not shown.
        assert lines[name][2:] == ([] if told["lag_seconds"] is None else [f"{told['lag_seconds']:,.1f}"])


def _hard_spine() -> pa.Table:
    """More rows than a batch has, null keys, a key nobody has, and columns whose types an engine does not know."""
    rows = order_rows(300).select(["customer", "store", "product", "ordered_at", "late"])
    rows = pa.concat_tables([rows.rename_columns({"ordered_at": "event_timestamp"})] * 240)
    customers = rows["customer"].to_pylist()
    customers[5], customers[70_001], customers[-1] = None, None, -1
    rows = rows.set_column(0, "customer", pa.array(customers, rows["customer"].type))
    count = range(len(rows))
    return (
        rows.append_column("weight", pa.array([n % 200 for n in count], pa.uint8()))
        .append_column("share", pa.array([n % 7 for n in count], pa.decimal128(9, 2)))
        .append_column("note", pa.array([None if n % 3 else f"n{n % 11}" for n in count], pa.large_string()))
        .append_column("_other", pa.array([[n % 5] for n in count], pa.list_(pa.int16())))
    )


def _by_both(shop: Shop, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine joins is what this process joins, to the byte, and so is its record."""
    write = StoredSpine.write
    monkeypatch.setattr(StoredSpine, "write", lambda spine, store: write(spine, store, BATCH))
    tables = sorted(path.name for path in Path(Project(shop.root).offline).iterdir())
    features = "customer_facts:city,customer_orders,shelf_demand"
    hard = _hard_spine()
    for n, (spine, status) in enumerate([(hard, True), (hard.slice(250, 300), False), (hard.slice(0, 0), True)]):
        made = [
            isthmus.training_data(shop.root, features, spine, status=status, join=join).write(out / f"{join}{n}")
            for join in ("embedded", "engine")
        ]
        here, there = (files(one.path) for one in made)
        assert made[0].rows_out == made[1].rows_out == len(spine)
        assert here["data.parquet"] == there["data.parquet"]
        assert here.keys() == there.keys()
        assert made[0] == replace(made[1], path=made[0].path)
    assert sorted(path.name for path in Path(Project(shop.root).offline).iterdir()) == tables


@pytest.mark.accept
def test_a_join_by_sail_is_the_embedded_one(built: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _by_both(built, tmp_path, monkeypatch)


def test_a_join_by_the_engine_in_a_folder_with_blanks_and_umlauts(built: Shop, tmp_path: Path) -> None:
    root = Path(shutil.copytree(built.root, tmp_path / "ein Laden in Köln"))
    here, there = (
        isthmus.training_data(root, FEATURES, _spine(), join=join).table() for join in ("embedded", "engine")
    )
    assert here.equals(there)


@pytest.mark.accept
@pytest.mark.spark
def test_a_join_by_apache_spark_is_the_embedded_one(
    built: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.replace("[project]\n", 'engine = "spark"\n\n[project]\n', "isthmus.toml")
    _by_both(built, tmp_path, monkeypatch)


def test_a_distillation_joined_by_the_engine_and_made_again_by_it(built: Shop, project: Open) -> None:
    made = write_training_set(project(built), join="engine")
    before = files(made.path)
    shutil.rmtree(made.path)
    assert training_set(project(built)) == made
    assert files(made.path) == before
    _more_orders(built, project)
    (made.path / "data.parquet").unlink()
    assert write_training_set(project(built), like=made.id, join="engine") == made
    assert files(made.path) == before


def test_a_join_by_the_engine_that_cannot_be(built: Shop, project: Open, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="join: the engine cannot join as served"):
        write_training_set(project(built), as_served=True, join="engine")
    served = isthmus.training_data(built.root, FEATURES, _spine(), as_served=True).write(tmp_path / "served")
    with pytest.raises(RequestError, match="join: the engine cannot join as served"):
        reproduce(project(built), served.id, join="engine")
    with pytest.raises(RequestError, match="join: 'both' is not known; expected one of embedded, engine"):
        isthmus.training_data(built.root, FEATURES, _spine(), join="both")
    spine = _spine().set_column(1, "event_timestamp", pa.nulls(300, pa.timestamp("us", tz="UTC")))
    with pytest.raises(DataError, match="spine, event_timestamp: is null in row 0"):
        isthmus.training_data(built.root, FEATURES, spine, join="engine").write(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not list(Path(project(built).offline).glob("_join*"))


def test_the_folder_of_a_killed_join_is_removed_by_the_next_one(built: Shop, project: Open, tmp_path: Path) -> None:
    """And that of a join that is under way is not."""
    offline = Path(project(built).offline)
    _written(_spine(), tmp_path / "spine.parquet")
    command = [sys.executable, "-c", "from isthmus.orchestration.cli.cli import main; main()"]
    command += ["features", "training-set"]
    command += ["--project", str(built.root)]
    command += ["--spine", str(tmp_path / "spine.parquet"), "--features", FEATURES, "--join", "engine"]
    killed = subprocess.Popen([*command, "--out", str(tmp_path / "killed")])
    try:
        while not (left := [*offline.glob("_join-*"), *tmp_path.glob(".killed-*")])[1:]:
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGSTOP)
        isthmus.training_data(built.root, FEATURES, _spine(), join="engine").write(tmp_path / "beside")
        assert all(path.exists() for path in left)
    finally:
        killed.kill()
        killed.wait()
    for join in ("engine", "embedded"):
        isthmus.training_data(built.root, FEATURES, _spine(), join=join).write(tmp_path / "killed")
    assert not list(offline.glob("_join-*"))
    assert not list(tmp_path.glob(".killed-*"))


def test_nothing_is_joined_before_it_is_asked_for(built: Shop) -> None:
    def never() -> Any:
        raise AssertionError("read")
        yield

    reader = pa.RecordBatchReader.from_batches(_spine().schema, never())
    data = isthmus.training_data(built.root, FEATURES, reader)
    assert isinstance(data, TrainingData)
    assert data.schema.names[-2:] == ["customer_facts__city", "customer_facts__status"]
