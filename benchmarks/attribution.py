"""Measure `isthmus model attribute` over 100,000 rows of the flights example.

The hardest case: device features differ from the ideal ones, the recorded inputs differ again, and the serving file
is INT8, so every form of the features runs through every model. The time covers the whole command, including
fitting the teacher again. Then a server answers and records as many rows, and these are attributed.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from processes import answers, free_port, started, wait
from result import Comparison, at_least, at_most, options_parser, plain_figure, report

from isthmus.features.days import DAY
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.package.manifest import read_package

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
ROWS, QUICK, SECONDS = 100_000, 10_000, 60.0
_BATCH = 1_000
"""Rows per request."""
_COMMAND = (sys.executable, "-c", "from isthmus.orchestration.cli.cli import main; main()")
_STAGES = ("staleness", "skew", "distillation", "precision", "runtime")


def main() -> int:
    parser = options_parser(__doc__, "fewer rows")
    parser.add_argument(
        "--project", type=Path, help="flights project after `isthmus demo` (default: run the demo first)"
    )
    options = parser.parse_args()
    with TemporaryDirectory(prefix="bench-") as name:
        folder = options.project
        if folder is None:
            folder = shutil.copytree(FLIGHTS, Path(name) / "flights", ignore=shutil.ignore_patterns(".*", "data"))
            _isthmus(folder, "demo", "--json")
        count = QUICK if options.quick else ROWS
        comparisons = [*measure_rows(folder, Path(name), count), *measure_recorded(folder, Path(name), count)]
    return report("attribution", comparisons, as_json=options.json, quick=options.quick)


def measure_rows(folder: Path, scratch: Path, count: int) -> list[Comparison]:
    project = Project(folder)
    artifacts = Artifacts.of(project)
    table = artifacts.current_training_set().table()
    first, fed = _days(table, count), scratch / "fed.parquet"
    manifest = read_package(artifacts.last_package())
    keys = project.applied().spines[artifacts.declared.spine.name].key_names
    pq.write_table(_fed(table, keys, [item.name for item in manifest.model_inputs]), fed)
    began, spent = time.perf_counter(), _spent()
    result = _isthmus(
        folder, "model", "attribute", "--from", first[0], "--to", first[1], "--fed", str(fed), "--precision", "int8",
        "--json",
    )  # fmt: skip
    seconds, work = time.perf_counter() - began, _spent() - spent
    rows = pq.read_table(result["table"])
    sums = np.sum([rows[stage].to_numpy() for stage in _STAGES], axis=0)
    worst = float(np.abs(rows["answer"].to_numpy() - rows["ideal"].to_numpy() - sums).max())
    return [
        at_least("rows with all five stages", "rows", result["rows"], count),
        at_most(f"attribution of {result['rows']:,} rows", "s", round(seconds, 1), SECONDS),
        plain_figure("the same, processor time", "processor s", round(work, 1)),
        at_most("sum of a row's parts, error", "of the score", worst, 1e-12),
    ]


def measure_recorded(folder: Path, scratch: Path, count: int) -> list[Comparison]:
    """Measure an attribution of at least `count` rows that a server answered and recorded."""
    project = Project(folder)
    artifacts = Artifacts.of(project)
    spine = project.applied().spines[artifacts.declared.spine.name]
    keys = spine.key_names
    fields = [column.name for column in spine.request if column.name not in keys]
    table = artifacts.current_training_set().table().select(keys + fields)
    table = table.take(np.arange(count) % len(table))
    port, log = free_port(), scratch / "server.log"
    url, command = (
        f"http://127.0.0.1:{port}/predict",
        [*_COMMAND, "serve", "--port", str(port), "--project", str(folder)],
    )
    with started(command, log, {"ISTHMUS_SERVER__RECORD": "{}"}) as server, httpx.Client(timeout=60) as client:
        wait(lambda: answers(url, _question(table[:1], keys, fields)), server, log)
        for first in range(0, count, _BATCH):
            client.post(url, json=_question(table[first : first + _BATCH], keys, fields)).raise_for_status()
    _isthmus(folder, "answers", "collect", "--json")
    began = time.perf_counter()
    result = _isthmus(folder, "model", "attribute", "--recorded", "--json")
    seconds = time.perf_counter() - began
    return [
        at_least("recorded rows", "rows", result["rows"], count),
        at_most(f"attribution of {result['rows']:,} recorded rows", "s", round(seconds, 1), SECONDS),
    ]


def _question(rows: pa.Table, keys: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
    return {"entities": rows.select(keys).to_pydict(), "request": rows.select(fields).to_pydict()}


def _days(table: pa.Table, count: int) -> tuple[str, str]:
    """Return the first and last day of a range that has `count` rows of a training set."""
    times = np.sort(micros(table["event_timestamp"]))
    # Take 5 % more rows: rows with the same keys and time count once.
    begin, end = int(times[-min(len(times), count + count // 20)]) // DAY, int(times[-1]) // DAY + 1
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return f"{epoch + timedelta(days=begin):%Y-%m-%d}", f"{epoch + timedelta(days=end):%Y-%m-%d}"


def _fed(table: pa.Table, keys: Sequence[str], inputs: Sequence[str]) -> pa.Table:
    """Return the ideal inputs with one input increased, so that they differ from a device's inputs."""
    names = list(dict.fromkeys([*keys, "event_timestamp", *inputs]))
    changed = next(name for name in inputs if name not in keys and pa.types.is_floating(table.schema.field(name).type))
    place, values = names.index(changed), table[changed].to_numpy() + 0.5
    column = pa.array(values, table.schema.field(changed).type, from_pandas=True)
    return table.select(names).set_column(place, changed, column)


def _spent() -> float:
    """Return the processor seconds of ended child processes, which other load affects less than wall time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _isthmus(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [*_COMMAND, *arguments, "--project", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    sys.exit(main())
