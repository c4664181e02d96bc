"""Feast's online store over our rows: what `online_store` in a `feature_store.yaml` names.

    online_store:
      type: isthmus.features.feast_store.IsthmusOnlineStore
      url: redis://localhost:6379

A view that `isthmus apply` has registered keeps its contract: its rows are the very rows that `isthmus materialize`
writes and the server reads. Any other view of Feast's gets a contract from its schema. Rows replace each other by the
time rules, so a correction with the same event timestamp and a later created timestamp arrives; ttl counts on reading.
"""

import asyncio
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import redis
import redis.asyncio

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import Entity, FeatureView, utils
    from feast.infra.online_stores.online_store import OnlineStore as FeastOnlineStore
    from feast.infra.supported_async_methods import SupportedAsyncMethods
    from feast.protos.feast.serving.ServingService_pb2 import FieldStatus, GetOnlineFeaturesResponse
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.repo_config import FeastConfigBaseModel, RepoConfig
    from pydantic import Field, StrictStr

from isthmus.features import _feast_values as feast_values
from isthmus.features import clock, columns
from isthmus.features._feast_values import FORMS, Form
from isthmus.features.address import Address
from isthmus.features.clock import Status
from isthmus.features.columns import from_arrow
from isthmus.features.contract import Column, Contract, ViewContract, one_of, sha256
from isthmus.features.entitykey import KeyValue
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
    DependencyError,
    IsthmusError,
    Problem,
    RequestError,
)
from isthmus.features.exchange import Client
from isthmus.features.online import LookupPlan, OnlineStore, ViewAnswer, answering, connect
from isthmus.features.types import KEY_TYPES

TIMEOUT_SECONDS = 5.0
BATCH = 1000
"""Keys that one round trip of a deletion covers."""

_STATUSES = np.array(
    [FieldStatus.PRESENT, FieldStatus.NULL_VALUE, FieldStatus.OUTSIDE_MAX_AGE, FieldStatus.NOT_FOUND], np.uint8
)
"""Feast's code for each code of `Status`."""

_NULL = Value()

Rows = list[tuple[datetime | None, dict[str, Value] | None]]
Batch = list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]]


class IsthmusOnlineStoreConfig(FeastConfigBaseModel):
    """The `online_store` section of a `feature_store.yaml`.

    Attributes:
        url: `redis://`, `rediss://` or `unix://`.
        project: the project that Isthmus knows the rows by, where that is not the name of Feast's project: Isthmus
            registers `my-shop` as `my_shop`.
    """

    type: Literal["isthmus.features.feast_store.IsthmusOnlineStore"] = "isthmus.features.feast_store.IsthmusOnlineStore"
    url: StrictStr = Field(repr=False)
    project: StrictStr | None = None


class IsthmusOnlineStore(FeastOnlineStore):
    """Our rows in Redis, behind Feast's interface."""

    def __init__(self) -> None:
        self._client: Client | None = None
        # A connection of asyncio lives and dies with its event loop.
        self._clients: dict[asyncio.AbstractEventLoop, redis.asyncio.Redis] = {}

    @property
    def async_supported(self) -> SupportedAsyncMethods:
        """Feast's server reads and writes without a thread of its own."""
        return SupportedAsyncMethods(read=True, write=True)

    def online_write_batch(
        self, config: RepoConfig, table: FeatureView, data: Batch, progress: Callable[[int], Any] | None
    ) -> None:
        """Writes rows; one replaces what is stored unless that is newer by (event, created, content).

        Raises:
            DataError: a value has another type than its feature.
            RequestError: an entity key has other join keys than the view.
            DependencyError: Redis does not answer.
        """
        if data:
            keys, rows, events, created = zip(*data, strict=True)
            layout = _layout(config, table, keys)
            view = layout.view
            columns = {
                name: feast_values.column([row.get(name, _NULL) for row in rows], form, f"{view.name}.{name}")
                for name, form in layout.forms.items()
            }
            event = feast_values.micros(events, view.name)
            stated = np.array([feast_values.is_time(time) for time in created], bool)
            known = event + view.delay
            known[stated] = feast_values.micros([time for time in created if feast_values.is_time(time)], view.name)
            with _told():
                store = OnlineStore(self._connected(config), _contract(config, [view]))
                with answering(config.online_store.url):
                    store.write(view, layout.keys(keys), event, known, columns)
        if progress:
            progress(len(data))

    def online_write_table(
        self,
        config: RepoConfig,
        table: FeatureView,
        rows: Mapping[str, pa.ChunkedArray],
        event: pa.ChunkedArray,
        created: pa.ChunkedArray | None,
    ) -> None:
        """`online_write_batch` of columns: no value becomes a proto.

        Args:
            config: the project's configuration.
            table: the view.
            rows: join keys and features by their names, shape (n,) each.
            event: event timestamps, shape (n,).
            created: created timestamps, shape (n,); None if there are none.

        Raises:
            DataError: a column has another type than its feature, or a row lacks its time or a key.
            DependencyError: Redis does not answer.
        """
        layout = _layout(config, table)
        view = layout.view
        values = {
            name: from_arrow(feast_values.typed(rows[name], form.dtype, f"{view.name}.{name}"), form.dtype)
            for name, form in layout.forms.items()
        }
        keys = {key.name: feast_values.plain_keys(rows[key.name], key, f"view {view.name}") for key in view.keys}
        times = feast_values.moments(event, f"view {view.name}, event timestamp")
        if times.null_count:
            raise DataError(view.name, "a row has no event timestamp", expected="one in every row")
        happened = columns.micros(times)
        known = happened + view.delay
        if created is not None:
            stated = feast_values.moments(created, f"view {view.name}, created timestamp")
            known = columns.micros(pc.coalesce(stated, pa.array(known).cast(feast_values.TIME)))
        with _told():
            store = OnlineStore(self._connected(config), _contract(config, [view]))
            with answering(config.online_store.url):
                store.write(view, keys, happened, known, values)

    async def online_write_batch_async(
        self, config: RepoConfig, table: FeatureView, data: Batch, progress: Callable[[int], Any] | None
    ) -> None:
        """`online_write_batch`, in a thread: packing a batch would hold up the event loop, too."""
        await asyncio.to_thread(self.online_write_batch, config, table, data, progress)

    def online_read(
        self,
        config: RepoConfig,
        table: FeatureView,
        entity_keys: list[EntityKey],
        requested_features: list[str] | None = None,
    ) -> Rows:
        """Event time and values of each key: (None, None) without a row, (event time, None) where it has expired.

        Raises:
            ContractMismatch: a row was written under another schema of the view.
            DependencyError: Redis does not answer.
        """
        lookup = _Lookup(config, [_Question(config, table, entity_keys, requested_features)])
        return lookup.rows(self._replies(config, lookup))[0]

    async def online_read_async(
        self,
        config: RepoConfig,
        table: FeatureView,
        entity_keys: list[EntityKey],
        requested_features: list[str] | None = None,
    ) -> Rows:
        """`online_read` on the event loop."""
        lookup = _Lookup(config, [_Question(config, table, entity_keys, requested_features)])
        return lookup.rows(await self._replies_async(config, lookup))[0]

    def _read_features_per_fv(
        self,
        config: RepoConfig,
        grouped_refs: list[tuple[FeatureView, list[str]]],
        join_key_values: dict[str, list[Value]],
        entity_name_to_join_key_map: dict[str, str],
        online_features_response: GetOnlineFeaturesResponse,
        full_feature_names: bool,
        include_feature_view_version_metadata: bool,
    ) -> None:
        """Feast's hook for stores that read all views of a request at once."""
        request = _Request(config, grouped_refs, join_key_values, entity_name_to_join_key_map)
        replies = self._replies(config, request.lookup)
        request.answer(replies, online_features_response, full_feature_names, include_feature_view_version_metadata)

    async def _read_features_per_fv_async(
        self,
        config: RepoConfig,
        grouped_refs: list[tuple[FeatureView, list[str]]],
        join_key_values: dict[str, list[Value]],
        entity_name_to_join_key_map: dict[str, str],
        online_features_response: GetOnlineFeaturesResponse,
        full_feature_names: bool,
        include_feature_view_version_metadata: bool,
    ) -> None:
        request = _Request(config, grouped_refs, join_key_values, entity_name_to_join_key_map)
        replies = await self._replies_async(config, request.lookup)
        request.answer(replies, online_features_response, full_feature_names, include_feature_view_version_metadata)

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Entity],  # noqa: ARG002 - Feast's interface
        entities_to_keep: Sequence[Entity],  # noqa: ARG002
        partial: bool,  # noqa: ARG002
    ) -> None:
        """Removes the rows of deleted views; a view that is kept must have a schema that rows can hold.

        Raises:
            ConfigurationError: with every view that has none.
            DependencyError: Redis does not answer.
        """
        problems: list[Problem] = []
        for table in tables_to_keep:
            if getattr(table, "write_to_online_store", True):
                try:
                    _layout(config, table)
                except ConfigurationError as error:
                    problems += error.problems
        if problems:
            raise ConfigurationError("feature views", problems)
        self._remove(config, tables_to_delete)

    def teardown(
        self,
        config: RepoConfig,
        tables: Sequence[FeatureView],
        entities: Sequence[Entity],  # noqa: ARG002 - Feast's interface
    ) -> None:
        """Removes the rows of all views of the project, and of no other project.

        Raises:
            DependencyError: Redis does not answer.
        """
        self._remove(config, tables)

    async def initialize(self, config: RepoConfig) -> None:
        """Connects; Feast's server calls it before its first request.

        Raises:
            DependencyError: Redis does not answer.
        """
        with _told(), answering(config.online_store.url):
            await self._connected_async(config).execute_command("PING")  # type: ignore[no-untyped-call]  # so in redis-py

    async def close(self) -> None:
        """Closes all connections of this event loop, and those that wait."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self, config: RepoConfig) -> Client:
        if self._client is None:
            self._client = connect(config.online_store.url, TIMEOUT_SECONDS)
        return self._client

    def _connected_async(self, config: RepoConfig) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # What a loop that has ended without `close` had open goes with it.
            self._clients = {other: held for other, held in self._clients.items() if not other.is_closed()}
            address = Address.of(config.online_store.url)
            kind: Any = redis.asyncio.RedisCluster if address.cluster else redis.asyncio.Redis
            self._clients[loop] = kind.from_url(
                address.urls[0], socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS
            )
        return self._clients[loop]

    def _replies(self, config: RepoConfig, lookup: "_Lookup") -> list[Any]:
        with _told():
            client = self._connected(config)
            with answering(config.online_store.url):
                replies: list[Any] = lookup.sent_by(client.pipeline(transaction=False)).execute()
                return replies

    async def _replies_async(self, config: RepoConfig, lookup: "_Lookup") -> list[Any]:
        with _told(), answering(config.online_store.url):
            pipeline = self._connected_async(config).pipeline(transaction=False)
            replies: list[Any] = await lookup.sent_by(pipeline).execute()
            return replies

    def _remove(self, config: RepoConfig, tables: Sequence[FeatureView]) -> None:
        """Removes the fields of some views from every hash of the project."""
        fields = [table.name for table in tables]
        if not fields:
            return
        # The project comes first in the name of a hash and ends with a colon: no other project's name begins so.
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", _project(config)) + ":*"
        with _told():
            client = self._connected(config)
            with answering(config.online_store.url):
                names = client.scan_iter(match=pattern, count=BATCH, _type="HASH")
                while batch := list(islice(names, BATCH)):
                    pipeline = client.pipeline(transaction=False)
                    for name in batch:
                        pipeline.hdel(name, *fields)
                    pipeline.execute()


@dataclass(frozen=True)
class _FeastView(ViewContract):
    """A view that only Feast knows. Its ttl says how rows are read, not what they are: it may change under them."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical form without the ttl, in hex."""
        return sha256({**self.as_dict(), "ttl": None})


@dataclass(frozen=True, eq=False)
class _Layout:
    """A view as rows know it.

    Attributes:
        view: its contract.
        forms: feature name to how it lies in a row and in a proto.
    """

    view: ViewContract
    forms: Mapping[str, Form]

    def keys(self, keys: Sequence[EntityKey]) -> dict[str, list[KeyValue]]:
        """Join key name to its values."""
        return feast_values.key_columns(keys, self.view.keys, f"view {self.view.name}")


def _project(config: RepoConfig) -> str:
    return config.online_store.project or config.project


def _contract(config: RepoConfig, views: Iterable[ViewContract]) -> Contract:
    return Contract(_project(config), {view.name: view for view in views}, {}, {}, {})


def _layout(config: RepoConfig, table: FeatureView, keys: Sequence[EntityKey] = ()) -> _Layout:
    """The layout of a view; the keys say what its join keys are if Feast made it up and gave it none.

    Raises:
        ConfigurationError: a type that rows cannot hold.
        ContractMismatch: the view was registered by Isthmus and changed since, or belongs to another project.
    """
    joined = [(field.name, str(field.dtype)) for field in table.entity_columns]
    if not joined and keys:
        named = zip(keys[0].join_keys, keys[0].entity_values, strict=True)
        joined = [(name, feast_values.key_type(value)) for name, value in named]
    fields = tuple((field.name, str(field.dtype)) for field in table.features)
    ttl = getattr(table, "ttl", None)
    if feast_values.is_registered(table.tags):
        return _registered(_project(config), table.name, tuple(joined), fields, tuple(sorted(table.tags.items())))
    return _derived(table.name, tuple(joined), fields, ttl // clock.MICROSECOND if ttl else None)


@lru_cache(maxsize=1024)
def _derived(
    name: str, keys: tuple[tuple[str, str], ...], fields: tuple[tuple[str, str], ...], ttl: int | None
) -> _Layout:
    problems = [
        Problem(f"{name}.{field}", f"has type {dtype}", one_of(FORMS)) for field, dtype in fields if dtype not in FORMS
    ]
    allowed = [dtype.name for dtype in KEY_TYPES]
    problems += [
        Problem(f"{name}.{key}", f"is a join key of type {dtype}", one_of(allowed))
        for key, dtype in keys
        if dtype not in allowed
    ]
    if problems:
        raise ConfigurationError("feature views", problems)
    forms = {field: FORMS[dtype] for field, dtype in fields}
    # In the order of their names: Feast gives the order of fields no meaning.
    columns = tuple(Column(field, forms[field].dtype) for field in sorted(forms))
    joined = tuple(Column(key, FORMS[dtype].dtype) for key, dtype in sorted(keys))
    return _Layout(_FeastView(name, (), joined, columns, ttl, 0, (), "feast"), forms)


@lru_cache(maxsize=1024)
def _registered(
    project: str,
    name: str,
    keys: tuple[tuple[str, str], ...],
    fields: tuple[tuple[str, str], ...],
    tags: tuple[tuple[str, str], ...],
) -> _Layout:
    where, remedy = f"view {name} in Feast's registry", "run `isthmus apply`, which registers it again"
    view, owner = feast_values.registered(name, dict(tags)), dict(tags).get("isthmus.project", "")
    if owner != project:
        raise ContractMismatch(
            where, f"belongs to project {owner}, these are the rows of {project}",
            remedy=f"set online_store.project to {owner} in feature_store.yaml, if that is what you want to read",
        )  # fmt: skip
    known = [(column.name, column.dtype.name) for column in view.fields]
    joined = [(column.name, column.dtype.name) for column in view.keys]
    if sorted(fields) != sorted(known) or sorted(keys) != sorted(joined):
        raise ContractMismatch(where, "has other fields than its contract", remedy=remedy)
    return _Layout(view, {field: FORMS[dtype] for field, dtype in known})


@lru_cache(maxsize=256)
def _plan(project: str, layouts: tuple[_Layout, ...]) -> LookupPlan:
    views = {layout.view.name: layout.view for layout in layouts}
    return LookupPlan(Contract(project, views, {}, {}, {}), views)


class _Question:
    """What one view is asked.

    Raises:
        RequestError: a feature is none of the view, or an entity key is not the view's.
    """

    def __init__(
        self, config: RepoConfig, table: FeatureView, entity_keys: Sequence[EntityKey], features: Sequence[str] | None
    ) -> None:
        self.layout = _layout(config, table, entity_keys)
        self.features = list(features or self.layout.forms)
        for feature in self.features:
            if feature not in self.layout.forms:
                raise RequestError(f"view {table.name}", f"no feature {feature!r}", expected=one_of(self.layout.forms))
        self.keys = self.layout.keys(entity_keys)
        self.rows = len(entity_keys)


class _Lookup:
    """Some questions in one round trip: views that are asked for the same keys share their commands."""

    def __init__(self, config: RepoConfig, questions: Sequence[_Question]) -> None:
        self.questions = questions
        groups: dict[tuple[Any, ...], list[_Question]] = {}
        for question in questions:
            named = tuple((name, tuple(question.keys[name])) for name in sorted(question.keys))
            groups.setdefault(named, []).append(question)
        self._groups = list(groups.values())
        self._plans = [
            _plan(_project(config), tuple(dict.fromkeys(question.layout for question in group)))
            for group in self._groups
        ]

    def sent_by(self, pipeline: Any) -> Any:
        """The pipeline, of whichever kind, with the commands of all questions."""
        for group, plan in zip(self._groups, self._plans, strict=True):
            for name, *rest in plan.commands(group[0].keys):
                # A cluster's pipeline looks the command up by its name as text.
                pipeline.execute_command(name.decode(), *rest)
        return pipeline

    def answers(self, replies: Sequence[Any]) -> list[ViewAnswer]:
        """The answer to each question as of now.

        Raises:
            ContractMismatch: a row was written under another schema of the view.
        """
        at, start = clock.now(), 0
        found: dict[int, ViewAnswer] = {}
        with _rows_of_feast():
            for group, plan in zip(self._groups, self._plans, strict=True):
                rows = group[0].rows
                answers = plan.decode(replies[start : start + rows], rows, at)
                start += rows
                found.update({id(question): answers[question.layout.view.name] for question in group})
        return [found[id(question)] for question in self.questions]

    def rows(self, replies: Sequence[Any]) -> list[Rows]:
        """The rows of each question as Feast wants them."""
        answers = self.answers(replies)
        return [_rows(question, answer) for question, answer in zip(self.questions, answers, strict=True)]


class _Request:
    """One request of `get_online_features`: which rows of the answer each looked-up key fills."""

    def __init__(
        self,
        config: RepoConfig,
        grouped_refs: Sequence[tuple[FeatureView, list[str]]],
        join_key_values: dict[str, list[Value]],
        join_keys: dict[str, str],
    ) -> None:
        self.parts = []
        for table, features in grouped_refs:
            unique, places, length = utils._get_unique_entities(table, join_key_values, join_keys)
            question = _Question(config, table, utils._get_entity_key_protos(unique), features)
            self.parts.append((question, table, places, length))
        self.lookup = _Lookup(config, [question for question, *_ in self.parts])

    def answer(
        self, replies: Sequence[Any], response: GetOnlineFeaturesResponse, full_names: bool, versions: bool
    ) -> None:
        """Appends all features to Feast's response, with statuses that are true.

        Feast by itself would say PRESENT of a null and NOT_FOUND of what has expired.
        """
        for (question, table, places, length), answer in zip(self.parts, self.lookup.answers(replies), strict=True):
            features = question.features
            utils._populate_response_from_feature_data(
                features, _rows(question, answer), places, response, full_names, table, length, versions
            )
            spread = np.zeros(length, np.int64)
            for n, rows in enumerate(places):
                spread[rows] = n
            for feature, result in zip(features, response.results[-len(features) :], strict=True):
                absent = ~answer.columns[feature].valid & (answer.status == Status.PRESENT)
                codes = np.where(absent, np.uint8(Status.NULL), answer.status)
                result.statuses[:] = _STATUSES[codes][spread].tolist()


def _rows(question: _Question, answer: ViewAnswer) -> Rows:
    forms = question.layout.forms
    columns = [feast_values.protos(answer.columns[name], forms[name]) for name in question.features]
    times = answer.event.tolist()
    rows: Rows = []
    for status, event, values in zip(answer.status.tolist(), times, zip(*columns, strict=True), strict=True):
        time = None if status == Status.NOT_FOUND else clock.moment(event)
        held = status in (Status.PRESENT, Status.NULL)
        rows.append((time, dict(zip(question.features, values, strict=True)) if held else None))
    return rows


@contextmanager
def _told() -> Iterator[None]:
    """Gives the errors of a connection the remedies of this side."""
    try:
        yield
    except DependencyError as error:
        remedy = "start it, or correct online_store.url in feature_store.yaml"
        raise DependencyError(error.where, error.found, expected=error.expected, remedy=remedy) from error.__cause__


@contextmanager
def _rows_of_feast() -> Iterator[None]:
    """Gives the errors of stored rows the remedies of this side."""
    try:
        yield
    except IsthmusError as error:
        remedy = "write the view's rows again, with `feast materialize` or `isthmus materialize`"
        raise type(error)(error.where, error.found, expected=error.expected, remedy=remedy) from None
