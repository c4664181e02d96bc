"""The real console script in a process of its own: exit codes, one sentence on stderr, one document on stdout."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
import redis
import typer

import isthmus
from isthmus.features.redis.address import SCHEMES
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.orchestration.cli import cli
from isthmus.orchestration.cli.help import GROUPS
from tests.commandline import run
from tests.orchestration.shop import Shop, files, order_rows
from tests.refusing import ARGUMENTS, PASSWORD
from tests.servers import free_port, redis_server

SCRIPT = Path(sys.executable).with_name("isthmus")
VERBS = [
    "init",
    "audit",
    "status",
    "dev",
    "apply",
    "build",
    "materialize",
    "stream",
    "distill",
    "verify",
    "serve",
    "maintain",
]
COMMANDS = {
    "features": {"lookup", "quality", "snapshot", "training-set"},
    "pushes": {"collect"},
    "model": {"search", "export", "ladder", "attribute", "benchmark-device"},
    "package": {"verify", "page"},
    "deploy": {"history", "rollback", "shadow", "canary", "promote"},
    "answers": {"collect", "replay", "explain", "monitor"},
    "infra": {"plan", "fleet"},
    "keys": {"create", "list", "revoke", "open"},
    "contract": {"show", "diff"},
}
EVERY = [
    *([verb] for verb in VERBS),
    ["demo"],
    *([group, name] for group in COMMANDS for name in sorted(COMMANDS[group])),
]
PROGRESS = re.compile(r"isthmus: +\d+% ")


def refused(shop: Shop, *arguments: str, code: int, **environment: str) -> str:
    """The one sentence that is said; the same error as the one document of `--json`."""
    done = run(*arguments, "--json", cwd=shop.root, **environment)
    assert done.returncode == code, done.stderr
    document = strictly(done.stdout)
    assert set(document) >= {"error", "where", "found", "expected", "remedy"}
    lines = [line for line in done.stderr.splitlines() if not PROGRESS.match(line)]
    assert "Traceback" not in done.stderr
    assert lines[0].startswith("isthmus: ")
    assert all(line.startswith("  - ") for line in lines[1:])
    return "\n".join(lines)


def strictly(text: str) -> dict[str, Any]:
    """One JSON document by the standard: no NaN, no Infinity, nothing before or after it."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return document


# --- the shape


def test_help_names_every_verb_in_a_group_and_cuts_no_sentence() -> None:
    assert [*GROUPS.values()] == [tuple(VERBS), tuple(COMMANDS)]
    commands = typer.main.get_command(cli.app)
    assert isinstance(commands, typer.core.TyperGroup)
    assert {*commands.commands} == {*VERBS, *COMMANDS, "demo"}
    for name, expected in COMMANDS.items():
        group = commands.commands[name]
        assert isinstance(group, typer.core.TyperGroup)
        assert {*group.commands} == expected
    for columns in ("80", "120"):
        done = run("--help", COLUMNS=columns)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= int(columns)
        _, *sections = re.split(rf"^(?:{'|'.join(GROUPS)}):$", done.stdout, flags=re.MULTILINE)
        assert [re.findall(r"^  ([\w-]+)", section, re.MULTILINE) for section in sections] == [
            list(names) for names in GROUPS.values()
        ]
        for text in (done.stdout, run("keys", "--help", COLUMNS=columns).stdout):
            assert "..." not in text.partition("Options:")[2]


def test_the_reference_lists_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    rows = re.findall(
        r"^\| (?:`([a-z]+)` )?\| (`.*) \|$", page.partition("## Commands")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert {group: re.findall("`([a-z-]+)`", names) for group, names in rows} == {
        "": VERBS, **{group: sorted(names) for group, names in COMMANDS.items()}
    }  # fmt: skip


@pytest.mark.parametrize("verb", [*EVERY, *([group] for group in COMMANDS)], ids=" ".join)
def test_every_verb_has_help(verb: list[str]) -> None:
    done = run(*verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"isthmus {' '.join(verb)} [OPTIONS]" in done.stdout


def test_every_verb_that_ends_has_one_document_for_programs() -> None:
    for verb in [*EVERY, ["deploy"]]:
        if verb not in (["serve"], ["dev"]):
            assert "--json" in run(*verb, "--help").stdout, verb


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        (["distill"], "[NAME]  Distillation. Optional if there is only one."),
        (["package", "verify"], "PATH  Package folder. A local path, not a URL.  [required]"),
    ],
)
def test_help_says_what_an_argument_is(verb: list[str], argument: str) -> None:
    assert argument in run(*verb, "--help").stdout


def test_the_version_and_a_short_way_to_help() -> None:
    assert run("--version").stdout.strip() == version("isthmus")
    assert run("-h").stdout == run("--help").stdout
    assert run("keys", "create", "-h").stdout == run("keys", "create", "--help").stdout


def test_the_project_may_stand_before_the_verb(shop: Shop) -> None:
    after = run("deploy", "history", "--json", "--project", str(shop.root))
    assert (after.returncode, after.stderr) == (0, "")
    for before in (["--project", str(shop.root)], [f"--project={shop.root}"]):
        assert run(*before, "deploy", "history", "--json").stdout == after.stdout
        lacking = run(*before)
        assert (lacking.returncode, lacking.stderr) == (
            2, "isthmus: command line: Missing command. See `isthmus --help`\n",
        )  # fmt: skip


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['isthmus', '--help']\n"
        "from isthmus.orchestration.cli.cli import main\n"
        "try:\n    main()\nfinally:\n    print(sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "pyarrow",
        "numpy",
        "feast",
        "torch",
        "pyspark",
        "pysail",
        "rich",
        "dagster",
        "pydantic",
        "duckdb",
        "orjson",
    }
    assert "Groups:" in done.stdout
    assert "'typer'" in done.stderr
    assert not heavy & set(re.findall(r"'(\w+)'", done.stderr))


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import isthmus; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert "isthmus" in roots
    assert roots - {"isthmus"} <= sys.stdlib_module_names


def test_public_names_are_sorted_and_there() -> None:
    assert isthmus.__all__ == sorted(isthmus.__all__)
    assert len(set(isthmus.__all__)) == len(isthmus.__all__)
    assert all(hasattr(isthmus, name) for name in isthmus.__all__)


# --- bad usage


def test_no_verb_shows_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "Groups:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bild"], "command line: No such command 'bild'; expected 'build'. See `isthmus --help`"),
        (["build", "--quickly"], "command line: No such option '--quickly'. See `isthmus build --help`"),
        (["apply", "now"], "command line: Got unexpected extra argument (now). See `isthmus apply --help`"),
        (["build", "--project"], "command line: Option '--project' requires an argument. See `isthmus --help`"),
    ],
)
def test_bad_usage(shop: Shop, arguments: list[str], sentence: str) -> None:
    done = run(*arguments, cwd=shop.root)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"isthmus: {sentence}\n"
    if arguments[-1] != "--project":
        assert refused(shop, *arguments, code=2) in done.stderr


def test_no_project(tmp_path: Path) -> None:
    assert refused(Shop(tmp_path), "apply", code=2) == (
        f"isthmus: {tmp_path}: isthmus.toml: not found in this folder or its parents; expected a project folder. "
        "Change to the project's folder, or pass it with --project"
    )


def test_a_project_that_is_not_there(tmp_path: Path) -> None:
    said = refused(Shop(tmp_path), "apply", "--project", "nowhere", code=2)
    assert said.startswith(
        f"isthmus: {tmp_path}/nowhere: isthmus.toml: does not exist; expected a file with a [project]"
    )


# --- bad configuration


def test_wrong_settings(shop: Shop) -> None:
    shop.append('[server]\nport = "http"\n[stores]\nonline = "there"\n', "isthmus.toml")
    said = refused(shop, "apply", code=2)
    assert said.splitlines()[0] == f"isthmus: {shop.toml}: 2 problems"
    assert sorted(said.splitlines()[1:]) == [
        "  - server.port: 'http'; expected a whole number",
        "  - stores.online: 'there'; expected \"embedded\", or a URL that starts with "
        + ", ".join(SCHEMES[:-1])
        + f" or {SCHEMES[-1]}",
    ]


def test_definitions_that_fail(shop: Shop) -> None:
    shop.append("1 / 0\n")
    line = len(shop.definitions.read_text().splitlines())
    assert refused(shop, "apply", code=2) == (
        f"isthmus: {shop.definitions}: line {line}: fails with ZeroDivisionError: division by zero. Fix that line"
    )
    assert not shop.state.exists()


def test_debug_shows_the_traceback_and_keeps_the_code(shop: Shop) -> None:
    shop.append("1 / 0\n")
    for arguments in (["--debug", "apply"], ["apply", "--debug"]):
        done = run(*arguments, cwd=shop.root)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback (most recent call last)" in done.stderr
        assert "ZeroDivisionError" in done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"isthmus: {shop.definitions}: line")


def test_nothing_applied(shop: Shop) -> None:
    assert refused(shop, "build", code=1) == "isthmus: project shop: nothing has been applied. Run `isthmus apply`"


def test_edited_definitions(built: Shop) -> None:
    built.replace("SLOW = 60", "SLOW = 61")
    said = refused(built, "materialize", code=1)
    assert said.startswith(
        "isthmus: project shop: the definitions have changed since the last apply (view shelf_demand"
    )
    assert said.endswith("Run `isthmus apply`")


def test_unknown_view(built: Shop) -> None:
    assert refused(built, "build", "demand", code=2) == (
        "isthmus: view 'demand': is not declared (did you mean shelf_demand?); expected one of customer_facts, "
        "customer_orders, shelf_demand"
    )


# --- bad data


def test_missing_data(built: Shop) -> None:
    built.orders.unlink()
    assert refused(built, "build", code=2) == (
        f"isthmus: definitions.py: source orders: {built.orders} not found; expected an existing file or folder. "
        "Correct its path, or create the file"
    )


def test_damaged_data(built: Shop) -> None:
    built.orders.write_bytes(b"PAR1" * 9)
    assert refused(built, "build", code=1).startswith(
        f"isthmus: source orders: {built.orders} cannot be read as Parquet ("
    )


def test_half_written_table(built: Shop) -> None:
    for file in (built.state / "offline" / "shelf_demand").rglob("*.parquet"):
        file.write_bytes(b"PAR1")
    said = refused(built, "materialize", code=1)
    assert said.startswith(
        f"isthmus: offline table of shelf_demand: {built.state}/offline/shelf_demand cannot be read ("
    )
    assert said.endswith("remove that folder and run `isthmus build` to recompute it")


# --- stopped


def test_ctrl_c_ends_a_build_at_once_and_writes_nothing(built: Shop) -> None:
    """The signal goes to the whole group, as a terminal sends it: neither the engine nor its client may hold it up."""
    orders = order_rows(400_000)
    pq.write_table(orders, built.orders)
    before = files(built.state / "offline")
    child = subprocess.Popen(
        [SCRIPT, "build"], cwd=built.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert child.stderr is not None
    assert "computing customer_orders" in child.stderr.readline()
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 130
    assert said.endswith("isthmus: stopped; unfinished work was not written\n")
    assert "Traceback" not in said
    assert files(built.state / "offline") == before


@pytest.mark.accept
@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slowest),
])  # fmt: skip
def test_a_signal_ends_a_training_with_one_line_and_the_same_command_goes_on(
    built: Shop, number: signal.Signals, code: int
) -> None:
    assert run("features", "training-set", cwd=built.root).returncode == 0
    longer = {**os.environ, "ISTHMUS_PROFILES__TRAINING__EPOCHS": "2000"}
    for begins in ("student-0, epoch 1 of", "student-0, goes on after step"):
        child = subprocess.Popen([SCRIPT, "distill"], cwd=built.root, stderr=subprocess.PIPE, text=True, env=longer)
        assert child.stderr is not None
        assert begins in next(line for line in child.stderr if "student-0, " in line)
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        *before, last = said.splitlines()
        assert child.returncode == code
        assert re.fullmatch(
            rf"isthmus: distillation late_order: stopped by {number.name} after step \d+ of \d+\. "
            "The same command goes on from there", last,
        )  # fmt: skip
        assert all(PROGRESS.match(line) for line in before)


# --- what is not available


def test_redis_unreachable(built: Shop) -> None:
    said = refused(built, "materialize", code=3, ISTHMUS_STORES__ONLINE="redis://127.0.0.1:1")
    assert said.startswith("isthmus: Redis at redis://127.0.0.1:1: does not answer (")
    assert 'correct stores.online in isthmus.toml, or set it to "embedded"' in said


def test_redis_that_refuses(built: Shop, tmp_path: Path) -> None:
    port = free_port()
    admin = redis.Redis(port=port, password=PASSWORD)
    with redis_server(tmp_path / "redis", "--port", str(port), *ARGUMENTS, client=admin), admin:
        place = f"127.0.0.1:{port}"
        right = {"ISTHMUS_STORES__ONLINE": f"redis://:{PASSWORD}@{place}"}
        for verb in ("materialize", "verify"):
            assert refused(built, verb, code=3, ISTHMUS_STORES__ONLINE=f"redis://:wrong@{place}") == (
                f"isthmus: Redis at redis://{place}: does not accept the user and the password. "
                "Correct stores.online in isthmus.toml"
            )
        admin.config_set("maxmemory", 1)
        assert refused(built, "materialize", code=3, **right) == (
            f"isthmus: Redis at redis://{place}: is out of memory and takes no writes. "
            "Raise its maxmemory, or delete data that is not needed"
        )
        admin.config_set("maxmemory", 0)
        assert run("materialize", cwd=built.root, **right).returncode == 0
        assert run("verify", "--all", cwd=built.root, **right).returncode == 0


def test_java_missing(built: Shop, tmp_path: Path) -> None:
    said = refused(built, "build", code=3, ISTHMUS_ENGINE="spark", PATH=str(tmp_path), JAVA_HOME="")
    assert said == (
        "isthmus: engine spark: Java is not installed; expected Java 17 or later. "
        'Install the package openjdk-17-jre-headless, or set engine = "sail"'
    )


@pytest.mark.parametrize(
    ("library", "verb", "extra"),
    [
        ("deltalake", "apply", "offline"),
        ("duckdb", "features training-set", "offline"),
        ("pyspark", "apply", "transforms"),
        ("dagster", "dev", "orchestration"),
    ],
)
def test_an_extra_missing(shop: Shop, library: str, verb: str, extra: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from isthmus.orchestration.cli.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *verb.split()],
        cwd=shop.root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    [said] = done.stderr.splitlines()
    assert said.startswith(f"isthmus: {extra}: cannot be imported (")
    assert said.endswith(f"Install it: pip install 'isthmus[{extra}]'")


def test_no_spark_connect_server(built: Shop) -> None:
    said = refused(built, "build", code=3, ISTHMUS_ENGINE="sc://127.0.0.1:1")
    assert said.startswith("isthmus: engine sc://127.0.0.1:1: does not answer (")


def test_a_folder_that_cannot_be_written(built: Shop) -> None:
    (built.root / "taken").touch()
    said = refused(built, "features", "training-set", code=1, ISTHMUS_STORES__OFFLINE="taken")
    assert said.startswith(f"isthmus: offline table of customer_orders: nothing at {built.root}/taken/customer_orders.")
    redis = built.state / "redis"
    for file in sorted(redis.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    redis.rmdir()
    redis.touch()
    assert refused(built, "materialize", code=3) == f"isthmus: {redis}: File exists"


# --- what goes well


@pytest.mark.accept
def test_the_reports_are_one_document_each(built: Shop) -> None:
    views = {"customer_orders", "shelf_demand", "customer_facts"}
    done = run("build", "--json", cwd=built.root)
    assert done.returncode == 0, done.stderr
    assert {name: (row["added"], row["changed"]) for name, row in strictly(done.stdout).items()} == dict.fromkeys(
        views, (0, False)
    )
    assert all(PROGRESS.match(line) for line in done.stderr.splitlines())
    done = run("materialize", "--json", "shelf_demand", cwd=built.root)
    (row,) = strictly(done.stdout).values()
    assert set(row) == {"compared", "changed", "written", "expired", "removed", "seconds"}
    done = run("features", "training-set", "--json", "--project", str(built.root))
    made = strictly(done.stdout)
    assert (made["rows_in"], made["rows_out"], set(made["tables"])) == (2400, 2400, views)
    done = run("verify", "--all", "--json", cwd=built.root)
    assert done.returncode == 0
    verdict = strictly(done.stdout)
    assert (verdict["passed"], verdict["differing"], set(verdict["views"])) == (True, 0, views)


@pytest.mark.accept
def test_a_failed_verdict_is_a_document_too(built: Shop) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        client.hdel(sorted(client.keys("shop:customer:*"))[0], "customer_orders")
    done = run("verify", "--all", "--json", cwd=built.root)
    assert done.returncode == 1
    verdict = strictly(done.stdout)
    assert verdict["passed"] is False
    assert verdict["views"]["customer_orders"]["orders_7d"]["differing"] == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        f"isthmus: verdict: {verdict['differing']} of {verdict['compared']} values differ: customer_orders"
    )
    done = run("verify", "--all", cwd=built.root)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said


def test_apply_reports_what_changed(built: Shop) -> None:
    built.replace("SLOW = 60", "SLOW = 61")
    done = run("apply", "--json", cwd=built.root)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = strictly(done.stdout)
    assert report["changes"][0] == "view shelf_demand: its code changed"
    assert (report["registered"], report["current"] != report["contract"]) == ([], True)
    built.replace("SLOW = 61", "SLOW = 60")
    report = strictly(run("apply", "--json", cwd=built.root).stdout)
    assert "FeatureView shelf_demand" in report["registered"]
    assert report["current"] == report["contract"]


# --- serve


def test_over_a_redis_of_the_users_own_the_command_becomes_the_server(built: Shop, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        variables = {"ISTHMUS_STORES__ONLINE": redis.url}
        assert run("materialize", cwd=built.root, **variables).returncode == 0
        child = subprocess.Popen(
            [SCRIPT, "serve", "--port", "0"], cwd=built.root, env={**os.environ, **variables}, stderr=subprocess.PIPE
        )  # fmt: skip
        assert child.stderr is not None
        started = next(line for line in map(json.loads, child.stderr) if line["event"] == "listening")
        answer = httpx.post(
            f"http://127.0.0.1:{started['port']}/get-online-features",
            json={"features": ["customer_orders:orders_7d"], "entities": {"customer": [0]}},
        )
        assert answer.status_code == 200
        assert psutil.Process(child.pid).cmdline()[1:3] == ["-m", "isthmus.serving"]
        child.terminate()
        assert child.wait(15) == 0
        child.stderr.close()


def shown(blocks: str, report: object) -> subprocess.CompletedProcess[str]:
    screens = "isthmus.orchestration.cli.screens"
    code = f"from {screens}.report import {blocks}; from {screens}.writer import show; show({blocks}({report!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_an_export_on_the_screen_says_what_is_served() -> None:
    report = {
        "path": "/a/late-1", "bytes": {"fp32": 900, "int8": 700}, "left_out": {},
        "advice": "", "worst": {"model.fp32.onnx": 3.2e-8, "model.int8.onnx": 1e-3},
        "quality": {"model.fp32.onnx": {"auc": 0.75}, "model.int8.onnx": {"auc": None}},
        "served": {
            "precision": "int8", "threads": 1, "p50_us": 40.25, "p99_us": 90.5, "requests_per_second": 24_000.0,
            "memory_mb": 8.84, "load_ms": 6.8,
        },
    }  # fmt: skip
    done = shown("export_blocks", report)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["model.fp32.onnx", "3.2e-08", "0.75"] in rows
    assert ["model.int8.onnx", "0.001", "-"] in rows
    assert done.stdout.endswith(
        "Served: int8, on this host with 1 thread: p50 40.2 µs, p99 90.5 µs, 24,000 requests/s, 8.8 MiB, "
        "6.8 ms to the first answer.\n"
    )


def test_what_has_no_value_is_left_out_on_the_screen() -> None:
    done = shown(
        "report_blocks", {"a": {"rows": 1, "served": None, "lag": 2}, "b": {"rows": 2, "served": None, "lag": None}}
    )
    words = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert [words[0], *words[2:]] == [["rows", "lag"], ["a", "1", "2"], ["b", "2", "-"]]


def test_a_report_on_the_screen_has_times_and_small_mappings() -> None:
    report = {
        "deployed_at": 1_709_251_199_999_999, "verdict": {"at": 1_709_251_200_000_000, "compared": 44_961},
        "served": {"shelf": 0}, "tables": {}, "views": {"shelf": {"ttl": 1}}, "many": dict.fromkeys(range(5)),
        "none": None, "path": "/a/[bold]b", "discloses": ("age of every key", "name of every key"),
    }  # fmt: skip
    done = shown("report_blocks", report)
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()] == [
        ["deployed_at", "2024-02-29T23:59:59+00:00"],
        ["verdict", "at 2024-03-01T00:00:00+00:00, compared 44,961"],
        ["served", "shelf 1970-01-01T00:00:00+00:00"],
        ["tables", "none"],
        ["views", "1 entry, see --json"],
        ["many", "5 entries, see --json"],
        ["path", "/a/[bold]b"],
        ["discloses", "age of every key, name of every key"],
    ]
