from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus import ConfigurationError
from isthmus.orchestration.settings import OrchestrationTable, ProjectSettings, load

SMALLEST = '[project]\nname = "shop"\n'


def settings(folder: Path, text: str) -> ProjectSettings:
    path = folder / "isthmus.toml"
    path.write_text(text)
    return load(path)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        settings(folder, text)
    assert caught.value.exit_code == 2
    assert caught.value.where == str(folder / "isthmus.toml")
    return [str(problem) for problem in caught.value.problems]


def test_the_smallest_file_has_every_default(tmp_path: Path) -> None:
    read = settings(tmp_path, SMALLEST)
    assert (read.engine, read.stores.online, read.stores.offline) == ("sail", "embedded", ".isthmus/offline")
    assert (read.project.definitions, read.project.now) == ("definitions", None)
    assert read.profiles.training.batch == 1024
    assert read.server.port == 6570
    assert (read.packages.runtimes, read.packages.signing_key, read.packages.public_key) == ((), None, None)
    assert (read.server.limits.rows, read.server.limits.requests_per_second) == (10_000, None)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    text = """
        engine = "flink"
        colour = "red"
        [project]
        name = "My Shop"
        now = 2013-12-31T12:00:00
        definitions = "my definitions"
        [stores]
        online = "localhost:6379"
        onlin = "embedded"
        [profiles.training]
        device = "tpu"
        batch = 0
        epochs = "four"
        [profiles.serving]
        thread = 1
        latency_objective_ms = -1
        [server]
        port = 70000
        workers = 0
        [server.limits]
        rows = 0
        deadline_seconds = 61
        requests_per_second = "many"
        row = 1
        [server.freshness_objective_hours]
        orders = 0
        stock = "2h"
        [dev]
        log_level = "loud"
    """
    found = dict(line.split(": ", 1) for line in problems(tmp_path, text))
    assert found == {
        "engine": "'flink'; expected sail, spark, or a Spark Connect URL like sc://host:15002",
        "colour": (
            "is not a setting; expected one of dev, engine, memory_mb, monitor, orchestration, packages, prices, "
            "profiles, project, server, stores"
        ),
        "project.name": "'My Shop'; expected lower-case letters, digits, _ and -, starting with a letter or digit",
        "project.now": "'2013-12-31T12:00:00'; expected a time with a time zone, for example 2013-12-31T12:00:00Z",
        "project.definitions": "'my definitions'; expected the name of a Python module, for example definitions",
        "stores.online": (
            "'localhost:6379'; expected \"embedded\", or a URL that starts with redis://, rediss://, "
            "unix://, redis+cluster:// or rediss+cluster://"
        ),
        "stores.onlin": (
            "is not a setting (did you mean online?); expected one of history_seconds, keep_contracts_hours, "
            "keep_days, offline, online, storage_options"
        ),
        "profiles.training.device": "'tpu'; expected 'cpu', 'cuda' or 'auto'",
        "profiles.training.batch": "0; expected greater than or equal to 1",
        "profiles.training.epochs": "'four'; expected a whole number",
        "profiles.serving.thread": (
            "is not a setting (did you mean threads?); expected one of batch, device, latency_objective_ms, load_ms, "
            "memory_mb, package_kb, precision, probation_seconds, replicas_max, replicas_min, runtime, "
            "target_utilization, threads"
        ),
        "profiles.serving.latency_objective_ms": "-1; expected greater than 0",
        "server.port": "70000; expected less than or equal to 65535",
        "server.workers": "0; expected greater than or equal to 1",
        "server.freshness_objective_hours.orders": "0; expected greater than 0",
        "server.freshness_objective_hours.stock": "'2h'; expected a number",
        "server.limits.rows": "0; expected greater than or equal to 1",
        "server.limits.deadline_seconds": "61; expected less than or equal to 60",
        "server.limits.requests_per_second": "'many'; expected a whole number",
        "server.limits.row": (
            "is not a setting (did you mean rows?); expected one of "
            "body_bytes, concurrency, deadline_seconds, generated_tokens, generation_seconds, generations, "
            "head_bytes, head_fields, push_days, requests_per_second, rows, values, waiting_rows"
        ),
        "dev.log_level": "'loud'; expected 'debug', 'info', 'warning' or 'error'",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "project: is missing; expected a table [project]"),
        ("[project]\n", "project.name: is missing; expected a value"),
        ('project = "shop"\n', "project: 'shop'; expected a table [project]"),
        (SMALLEST + "[profiles]\ntraining = 3\n", "profiles.training: 3; expected a table [profiles.training]"),
        (SMALLEST + "now = 2013-12-31\n", "project.now: '2013-12-31'; expected a time with a time zone, for example"),
        (SMALLEST + 'now = "soon"\n', "project.now: 'soon'; expected a time with a time zone, for example"),
        ("engine = 3\n" + SMALLEST, "engine: 3; expected a text"),
        (SMALLEST + '[packages]\nruntimes = "litert"\n', "packages.runtimes: 'litert'; expected a list in brackets"),
        (SMALLEST + '[packages]\nruntimes = ["litret"]\n', "packages.runtimes.0: 'litret'; expected one of coreml,"),
        (SMALLEST + '[server]\nrequire_keys = "always"\n', "server.require_keys: 'always'; expected true or false"),
        (SMALLEST + '[orchestration]\ndays_from = "x"\n', "orchestration.days_from: 'x'; expected a date, for example"),
        (SMALLEST + "[prices]\nhour = 3\n", "prices.hour: 3; expected a table"),
        ('engine = "sail\n' + SMALLEST, "TOML syntax: Illegal character '\\n' (at line 1, column 15)"),
        (SMALLEST + SMALLEST, "TOML syntax: Cannot declare ('project',) twice (at line 3, column 9)"),
    ],
)
def test_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(problem)


def test_profiles_that_cannot_be_had_are_refused_all_at_once(tmp_path: Path) -> None:
    text = """
        [profiles.training]
        device = "cpu"
        accelerator = "nvidia-t4"
        precision = "bf16"
        nodes = 2
        per_node = 2
        batch = 3
        [profiles.serving]
        replicas_min = 3
        replicas_max = 2
    """
    found = dict(line.split(": ", 1) for line in problems(tmp_path, 'engine = "flink"\n' + SMALLEST + text))
    assert found == {
        "engine": "'flink'; expected sail, spark, or a Spark Connect URL like sc://host:15002",
        "profiles.training.device": '"cpu" leaves the accelerator nvidia-t4 idle; expected "cuda" or "auto"',
        "profiles.training.precision": '"bf16", which nvidia-t4 does not support; expected "fp32"',
        "profiles.training.batch": "3 rows cannot be divided among 4 processes; expected 4 or more",
        "profiles.serving.replicas_max": "2; expected replicas_min (3) or more",
    }


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("profiles.training", 'precision = "int8"',
         ("precision: 'int8'; expected 'fp32' or 'bf16': gradients need floating point. For an INT8 package, set "
          'profiles.serving.precision = "int8"')),
        ("profiles.training", 'accelerator = "tpu"', "accelerator: 'tpu'; expected 'nvidia-t4', 'nvidia-a10', "),
        ("profiles.training", 'framework = "jax"', "framework: 'jax'; expected 'torch'"),
        ("profiles.training", 'interconnect = "wifi"', "interconnect: 'wifi'; expected 'ethernet' or 'infiniband'"),
        ("profiles.training", 'nodes = "two"', "nodes: 'two'; expected a whole number"),
        ("profiles.training", "per_node = 0", "per_node: 0; expected greater than or equal to 1"),
        ("profiles.training", "script = 3", "script: 3; expected a text"),
        ("profiles.serving", "replicas_min = 1.5", "replicas_min: 1.5; expected a whole number"),
        ("profiles.serving", 'replicas_max = "many"', "replicas_max: 'many'; expected a whole number"),
        ("profiles.serving", "target_utilization = 60", "target_utilization: 60; expected less than or equal to 1"),
        ("profiles.serving", 'target_utilization = "half"', "target_utilization: 'half'; expected a number"),
        ("profiles.serving", "batch = 0", "batch: 0; expected greater than or equal to 1"),
        ("orchestration.pools", "gpu = 1", "gpu: is not a setting; expected one of engine, serve, train"),
        ("orchestration.pools", 'train = "all"', "train: 'all'; expected a whole number"),
        ("orchestration", 'retrain = "0 24 * * 0"', "retrain: '0 24 * * 0'; expected five fields like 0 3 * * 0, or"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_names_key_value_and_what_would_do(
    tmp_path: Path, table: str, line: str, said: str
) -> None:
    (found,) = problems(tmp_path, f"{SMALLEST}[{table}]\n{line}\n")
    assert found.startswith(f"{table}.{said}")


def test_a_contradiction_from_a_variable_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_PROFILES__SERVING__REPLICAS_MAX", "1")
    assert problems(tmp_path, SMALLEST) == [
        "ISTHMUS_PROFILES__SERVING__REPLICAS_MAX: 1; expected replicas_min (2) or more"
    ]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "isthmus.toml").write_bytes(b'[project]\nname = "\xff"\n')
    with pytest.raises(ConfigurationError, match=r"isthmus.toml: TOML syntax: .*utf-8"):
        load(tmp_path / "isthmus.toml")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path / "isthmus.toml")
    assert str(caught.value) == (
        f"{tmp_path}: isthmus.toml: does not exist; expected a file with a [project] table. "
        "Pass the project's folder with --project"
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"ISTHMUS_ENGINE": "spark", "ISTHMUS_STORES__ONLINE": "redis://there",
         "ISTHMUS_PROFILES__TRAINING__BATCH": "64"},
        {"isthmus_engine": "spark", "ISTHMUS_STORES": '{"online": "redis://there"}',
         "ISTHMUS_PROFILES": '{"training": {"batch": 64}}'},
    ],
)  # fmt: skip
def test_the_environment_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = SMALLEST + '[stores]\noffline = "here"\nonline = "embedded"\n[profiles.training]\nbatch = 8\nepochs = 3\n'
    read = settings(tmp_path, text)
    assert (read.engine, read.stores.online, read.stores.offline) == ("spark", "redis://there", "here")
    assert (read.profiles.training.batch, read.profiles.training.epochs) == (64, 3)


def test_a_wrong_variable_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_SERVER__PORT", "http")
    monkeypatch.setenv("ISTHMUS_PROJECT__NOW", "2013-12-31T12:00:00")
    monkeypatch.setenv("ISTHMUS_STORES__ONLIN", "embedded")
    assert sorted(problems(tmp_path, SMALLEST)) == [
        (
            "ISTHMUS_PROJECT__NOW: '2013-12-31T12:00:00'; expected a time with a time zone, for example "
            "2013-12-31T12:00:00Z"
        ),
        "ISTHMUS_SERVER__PORT: 'http'; expected a whole number",
        (
            "ISTHMUS_STORES__ONLIN: is not a setting (did you mean online?); expected one of history_seconds, "
            "keep_contracts_hours, keep_days, offline, online, storage_options"
        ),
    ]


def test_a_table_in_a_variable_must_be_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_STORES", "embedded")
    assert problems(tmp_path, SMALLEST) == ["ISTHMUS_STORES: 'embedded'; expected a table [stores] as JSON"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ISTHMUS_PACKAGES__RUNTIMES", "litert", "a list in brackets as JSON"),
        ("ISTHMUS_PRICES__HOUR", "3,", "a table as JSON"),
        ("ISTHMUS_SERVER__LIMITS", "rows", "a table [server.limits] as JSON"),
    ],
)
def test_a_list_or_table_within_a_table_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    assert problems(tmp_path, SMALLEST) == [f"{name}: {value!r}; expected {expected}"]


def test_variables_that_are_no_settings_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_ROOT", str(tmp_path))
    assert settings(tmp_path, SMALLEST).project.name == "shop"


def test_a_misspelled_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_ENGIN", "spark")
    (problem,) = problems(tmp_path, SMALLEST)
    assert problem.startswith(
        "ISTHMUS_ENGIN: is not a setting (did you mean ISTHMUS_ENGINE?); expected a name that starts with ISTHMUS_DEV, "
    )


def test_a_refused_url_is_shown_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "isthmus.toml").write_text('[project]\nname = "shop"\n')
    for variable in ("ISTHMUS_STORES__ONLINE", "ISTHMUS_STORES"):
        for password in ("hunter2", "'hun ter2"):
            monkeypatch.setenv(variable, f"http://:{password}@host")
            with pytest.raises(ConfigurationError) as refused:
                load(tmp_path / "isthmus.toml")
            assert "ter2" not in str(refused.value)
        assert "host" in str(refused.value)
        monkeypatch.delenv(variable)


_NUMBERS = st.integers(0, 70).map(str)
_PARTS = st.one_of(st.just("*"), _NUMBERS, st.tuples(_NUMBERS, _NUMBERS).map("-".join))
_FIELDS = st.lists(st.one_of(_PARTS, st.tuples(_PARTS, _NUMBERS).map("/".join)), min_size=1, max_size=3).map(",".join)


@given(st.lists(_FIELDS, min_size=4, max_size=6).map(" ".join))
@example("0 3 * * 0")
@example("*/15 0-6,12 1 12 1-5")
@example("0 3 * * 7")
@example("@weekly")
def test_a_schedule_that_is_taken_is_one_of_dagster(schedule: str) -> None:
    try:
        OrchestrationTable(retrain=schedule)
    except ValidationError:
        assert schedule not in ("0 3 * * 0", "*/15 0-6,12 1 12 1-5", "@weekly")
    else:
        dg.AutomationCondition.cron_tick_passed(schedule)


def test_a_runtime_that_there_is_not_is_named(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, SMALLEST + '[packages]\nruntimes = ["tensorrt"]\n')
    assert problem == "packages.runtimes.0: 'tensorrt'; expected one of coreml, executorch, litert, onnxruntime"


def test_a_credential_among_the_storage_options_is_refused_and_not_repeated(tmp_path: Path) -> None:
    options = '\n[stores.storage_options]\nAWS_REGION = "eu"\nAWS_SECRET_ACCESS_KEY = "sesame"\n'
    (found,) = problems(tmp_path, SMALLEST + options)
    assert "AWS_SECRET_ACCESS_KEY" in found
    assert "in the environment" in found
    assert "sesame" not in found
