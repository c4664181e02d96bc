"""Settings of a project: isthmus.toml, with a class per table, and the environment variables that override it."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from datetime import date, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from isthmus.distill.declaration import RUNTIMES
from isthmus.features.errors import ConfigurationError, Problem, did_you_mean, mask_secrets, one_of
from isthmus.features.files import is_url
from isthmus.features.profiles import ServingProfile, TrainingProfile
from isthmus.features.redis.address import SCHEMES
from isthmus.package.signature import PASSWORD
from isthmus.serving.limits import Limits
from isthmus.serving.recorder.options import Recording
from isthmus.serving.settings import CHECK_SHARE

FILE = "isthmus.toml"
_ENVIRONMENT = "ISTHMUS_"
PROCESS_MB = 384  # MiB that a process takes with its libraries loaded and no rows
# Not settings: variables that our processes set for each other, and a secret that must not be in a file.
PROCESS_VARIABLES = ("ISTHMUS_ROOT", "ISTHMUS_SERVER", PASSWORD)

_Profile = TypeVar("_Profile", TrainingProfile, ServingProfile)


def _zoned(moment: object) -> datetime:
    try:
        zoned = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    except ValueError:
        zoned = None
    if not isinstance(zoned, datetime) or zoned.tzinfo is None:
        raise ValueError("a time with a time zone, for example 2013-12-31T12:00:00Z")
    return zoned


def _matching(matches: Callable[[str], object], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not matches(text):
            raise ValueError(expected)
        return text

    return AfterValidator(check)


_CRON_ITEM = r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/[1-9]\d?)?"  # "*", a value or a range, with an optional step
_CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def _is_cron(schedule: str) -> bool:
    if schedule in ("@hourly", "@daily", "@weekly", "@monthly", "@yearly"):
        return True
    fields = schedule.split(" ")
    return len(fields) == len(_CRON_RANGES) and all(
        (match := re.fullmatch(_CRON_ITEM, item)) is not None
        and low <= int(match[1] or low) <= int(match[2] or match[1] or low) <= high
        for field, (low, high) in zip(fields, _CRON_RANGES, strict=True)
        for item in field.split(",")
    )


_NAME = _matching(
    re.compile(r"[a-z0-9][a-z0-9_-]*").fullmatch,
    "lower-case letters, digits, _ and -, starting with a letter or digit",
)
_MODULE = _matching(
    re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*").fullmatch, "the name of a Python module, for example definitions"
)
_ENGINE = _matching(
    lambda name: name in ("sail", "spark") or name.startswith("sc://"),
    "sail, spark, or a Spark Connect URL like sc://host:15002",
)
_ONLINE = _matching(
    lambda url: url == "embedded" or url.startswith(SCHEMES),
    f'"embedded", or a URL that starts with {", ".join(SCHEMES[:-1])} or {SCHEMES[-1]}',
)
_LOCAL = _matching(lambda path: not is_url(path), "a local path, not a URL")
_RUNTIME = _matching(RUNTIMES.__contains__, one_of(RUNTIMES))
_STORAGE_OPTION = _matching(
    lambda name: not re.search("key|secret|token|password|credential", name, re.IGNORECASE),
    "an option that is not a credential: set it in the environment, such as AWS_SECRET_ACCESS_KEY",
)
_CRON = _matching(_is_cron, "five fields like 0 3 * * 0, or @hourly, @daily, @weekly, @monthly or @yearly")
_Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProjectTable(_Table):
    """Table `[project]` of isthmus.toml: identity and clock of the project.

    `name` is also the prefix of its online keys. `definitions` is a Python module in the project's folder. `now` is a
    fixed time for the project's clock, to replay history; by default the wall clock.
    """

    name: Annotated[str, _NAME]
    definitions: Annotated[str, _MODULE] = "definitions"
    now: Annotated[datetime | None, BeforeValidator(_zoned)] = None


class StoresTable(_Table):
    """Table `[stores]` of isthmus.toml: offline tables and Redis.

    Attributes:
        offline: folder (relative to the project) or object-storage URL of the Delta tables.
        storage_options: deltalake options for object storage, for `offline` and for sources, such as `AWS_REGION`.
            Credentials must be in the environment.
        online: "embedded", or the URL of a Redis server or Redis Cluster.
        keep_contracts_hours: hours to keep the online rows of a replaced contract; at least one minute, so that every
            server can switch.
        history_seconds: seconds between two collections of pushed rows, and of recorded answers, by `isthmus dev`,
            `isthmus pushes collect --follow` and `isthmus answers collect --follow`.
        keep_days: days for which `isthmus maintain` keeps replaced versions of offline tables, and cached teacher
            outputs after their last use.
    """

    offline: str = ".isthmus/offline"
    storage_options: dict[Annotated[str, _STORAGE_OPTION], str] = {}
    online: Annotated[str, _ONLINE] = "embedded"
    keep_contracts_hours: Annotated[float, Field(ge=0)] = 24.0
    history_seconds: Annotated[float, Field(gt=0)] = 60.0
    keep_days: Annotated[float, Field(ge=1)] = 90.0


class _ContradictionsError(ValueError):
    """Contradicting values in a table; each argument is a Problem."""


def _check_profile(profile: _Profile) -> _Profile:
    if problems := list(profile.problems()):
        raise _ContradictionsError(*problems)
    return profile


class ProfilesTable(_Table):
    training: Annotated[TrainingProfile, AfterValidator(_check_profile)] = TrainingProfile()
    serving: Annotated[ServingProfile, AfterValidator(_check_profile)] = ServingProfile()


class PricesTable(_Table):
    """Table `[prices]` of isthmus.toml: prices of devices, for the boundary card and `isthmus infra plan`.

    `hour` has prices per hour by device: "cpu" and "cuda" for the boundary card, or a name from the device catalog.
    """

    currency: str = ""
    hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}


class PackagesTable(_Table):
    """Table `[packages]` of isthmus.toml: runtimes and signatures of packages.

    Attributes:
        runtimes: runtimes to export for, besides the runtimes of each distillation; their libraries must be installed.
        signing_key: PEM file (relative to the project) with the private key that `export` signs with. The password of
            an encrypted key comes from the environment.
        public_key: PEM file with the public key that every deployed or served package must be signed with.
    """

    runtimes: tuple[Annotated[str, _RUNTIME], ...] = ()
    signing_key: Annotated[str, _LOCAL] | None = None
    public_key: Annotated[str, _LOCAL] | None = None


class ServerTable(_Table):
    """Table `[server]` of isthmus.toml: address and limits of the API.

    Attributes:
        port: port to listen on; 0 for any free port. The default is not Feast's 6566, which browsers block.
        workers: number of processes.
        require_keys: reject every request until an API key exists, even on loopback.
        hosts: host names besides `localhost` that may be used without keys, such as the name of a container.
        check_share: share of requests whose rows are checked against their stored hashes.
        missing: answer for rows that the online store has lost: "refuse" (status 503) or "null".
        latency_objective_ms: p99 latency of the API in milliseconds above which training yields; by default the
            objective in `[profiles.serving]`, which also selects the exported precision.
        freshness_objective_hours: maximum age of the newest row, in hours by view; not part of the contract.
        record: recording of answers; off by default.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 6570
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    require_keys: bool = False
    hosts: tuple[str, ...] = ()
    check_share: Annotated[float, Field(ge=0, le=1)] = CHECK_SHARE
    missing: Literal["refuse", "null"] = "refuse"
    latency_objective_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    freshness_objective_hours: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    limits: Limits = Limits()
    record: Recording | None = None


class MonitorTable(_Table):
    """Table `[monitor]` of isthmus.toml: recorded answers that count for production quality and rollback.

    `callers` are names of API keys; by default all answers count, with or without a key.
    """

    callers: tuple[str, ...] | None = None


class DevTable(_Table):
    port: Annotated[int, Field(ge=1, le=65535)] = 3000
    log_level: Literal["debug", "info", "warning", "error"] = "warning"


class PoolsTable(_Table):
    """Table `[orchestration.pools]`: maximum number of concurrent steps, by kind.

    `engine` steps compute with PySpark, `train` steps train or measure models, and `serve` steps write to the online
    store, snapshots and deployments.
    """

    engine: _Count = 1
    train: _Count = 1
    serve: _Count = 1


class OrchestrationTable(_Table):
    """Table `[orchestration]` of isthmus.toml: settings of Dagster.

    Attributes:
        automation: update assets automatically when new data arrives.
        retrain: cron schedule (UTC) for training; by default models are trained after drift.
        days_from: first day of the daily build partitions; by default builds write complete tables.
    """

    automation: bool = True
    retrain: Annotated[str, _CRON] | None = None
    days_from: date | None = None
    pools: PoolsTable = PoolsTable()


class ProjectSettings(BaseSettings):
    """Settings of a project (see `load`): isthmus.toml, overridden by variables such as `ISTHMUS_STORES__ONLINE`."""

    model_config = SettingsConfigDict(
        env_prefix=_ENVIRONMENT, env_nested_delimiter="__", extra="forbid", frozen=True, toml_file=FILE
    )

    project: ProjectTable
    engine: Annotated[str, _ENGINE] = "sail"
    memory_mb: Annotated[int, Field(ge=PROCESS_MB + 128)] | None = None  # of a build by this process and its engine
    stores: StoresTable = StoresTable()
    profiles: ProfilesTable = ProfilesTable()
    prices: PricesTable = PricesTable()
    packages: PackagesTable = PackagesTable()
    server: ServerTable = ServerTable()
    monitor: MonitorTable = MonitorTable()
    dev: DevTable = DevTable()
    orchestration: OrchestrationTable = OrchestrationTable()

    @property
    def latency_objective_ms(self) -> float:
        return self.server.latency_objective_ms or self.profiles.serving.latency_objective_ms

    @property
    def engine_memory(self) -> int | None:
        """Bytes for the engine: half of `memory_mb` minus `PROCESS_MB`; None for no limit."""
        return None if self.memory_mb is None else (self.memory_mb - PROCESS_MB) << 19

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is the library's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is the library's
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(path: Path) -> ProjectSettings:
    if not path.is_file():
        problem = Problem(FILE, "does not exist", "a file with a [project] table")
        raise ConfigurationError(str(path.parent), [problem], remedy="pass the project's folder with --project")

    if unknown := list(_unknown_variables()):
        raise ConfigurationError(str(path), unknown)

    class Located(ProjectSettings):
        model_config = SettingsConfigDict(toml_file=path)

    try:
        return Located()  # type: ignore[call-arg]  # values come from the sources
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(str(path), [Problem("TOML syntax", str(error))]) from error
    except SettingsError as error:
        raise ConfigurationError(str(path), list(_not_json()) or [Problem("environment", str(error))]) from error
    except ValidationError as error:
        raise ConfigurationError(str(path), list(_problems(error))) from error


_NESTED = {tuple: "a list in brackets", dict: "a table"}
_EXPECTED = {
    "string_type": "a text",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("date_from_datetime_parsing", "date_from_datetime_inexact"), "a date, for example 2013-12-31"),
    **{f"{kind.__name__}_type": expected for kind, expected in _NESTED.items()},
}
_WHY: dict[tuple[str, ...], str] = {  # advice for common mistakes
    ("profiles", "training", "precision"): ": gradients need floating point. For an INT8 package, set "
    'profiles.serving.precision = "int8"'
}


def _key(place: tuple[str, ...]) -> str:
    variable = _ENVIRONMENT + "__".join(place).upper()
    return variable if variable in {name.upper() for name in os.environ} else ".".join(place)


def _problems(error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors():
        place = tuple(map(str, detail["loc"]))
        key, kind, table = _key(place), detail["type"], _fields(place)
        cause, value = detail.get("ctx", {}).get("error"), detail["input"]
        shown = mask_secrets(repr(value.isoformat() if isinstance(value, date) else value))
        if isinstance(cause, _ContradictionsError):
            yield from (replace(problem, where=_key((*place, problem.where))) for problem in cause.args)
        elif kind == "missing":
            yield Problem(key, "is missing", f"a table [{key}]" if table else "a value")
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            known = _fields(place[:-1])
            yield Problem(key, f"is not a setting{did_you_mean(place[-1], known)}", one_of(known))
        elif table:
            yield Problem(key, shown, f"a table [{'.'.join(place)}]")
        else:
            message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            yield Problem(key, shown, _EXPECTED.get(kind, message) + _WHY.get(place, ""))


def _fields(place: tuple[str, ...]) -> list[str]:
    table = _type_of(place)
    if is_dataclass(table):
        return [field.name for field in fields_of(table)]
    return list(getattr(table, "model_fields", {}))


def _type_of(place: tuple[str, ...]) -> Any:
    kind: Any = ProjectSettings
    for key in place:
        fields = get_type_hints(kind) if is_dataclass(kind) else getattr(kind, "model_fields", {})
        field = fields.get(key)
        kind = getattr(field, "annotation", field)
        if isinstance(kind, UnionType):
            # An optional table: take the dataclass out of the union.
            kind = next((part for part in kind.__args__ if is_dataclass(part)), kind)
    return kind


def _unknown_variables() -> Iterator[Problem]:
    """Report variables with our prefix that are not settings; misspelled names would otherwise be ignored."""
    known = {f"{_ENVIRONMENT}{name}".upper() for name in ProjectSettings.model_fields}
    for name in os.environ:
        table = name.upper().partition("__")[0]
        if name.upper().startswith(_ENVIRONMENT) and table not in known and name not in PROCESS_VARIABLES:
            found = f"is not a setting{did_you_mean(table, known)}"
            yield Problem(name, found, f"a name that starts with {', '.join(sorted(known))}")


def _not_json() -> Iterator[Problem]:
    """Report variables for tables and lists that are not JSON; pydantic's error does not name them."""
    for name, value in os.environ.items():
        place = tuple(name.upper().removeprefix(_ENVIRONMENT).lower().split("__"))
        expected = f"a table [{'.'.join(place)}]" if _fields(place) else _NESTED.get(get_origin(_type_of(place)))
        if name.upper().startswith(_ENVIRONMENT) and expected:
            try:
                json.loads(value)
            except ValueError:
                yield Problem(name, mask_secrets(repr(value)), f"{expected} as JSON")


def find(start: Path) -> Path:
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / FILE).is_file():
            return folder
    problem = Problem(FILE, "not found in this folder or its parents", "a project folder")
    remedy = "change to the project's folder, or pass it with --project"
    raise ConfigurationError(str(start.resolve()), [problem], remedy=remedy)
