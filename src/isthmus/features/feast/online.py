"""An online store for Feast with our rows in Redis: `online_store` in a `feature_store.yaml`."""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import redis
import redis.asyncio
from feast import Entity, FeatureView
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_NAME, DUMMY_ENTITY_VAL
from feast.infra.online_stores.online_store import OnlineStore as FeastOnlineStore
from feast.infra.supported_async_methods import SupportedAsyncMethods
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import FeastConfigBaseModel, RepoConfig
from pydantic import Field, PositiveInt, StrictStr

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import ConfigurationError, DataError, Problem, RequestError
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.lookup import FeastLookup, FeastRows, OnlineRequest, ViewLookup
from isthmus.features.feast.views import contract_of, layout_of, online_name, project_of
from isthmus.features.online import record
from isthmus.features.online.scripts import lock_key, suspects_key
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.address import Address
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.pipeline import Client
from isthmus.features.values import arrow
from isthmus.features.values.columns import Ints, Values
from isthmus.features.values.entitykey import KeyValue, entity_keys

TIMEOUT_SECONDS = 5.0
SETTING = "online_store.url in feature_store.yaml"
BATCH = 1000
"""Keys per round trip of a deletion."""

_NULL = Value()
_DUMMY_KEY = EntityKey(join_keys=[DUMMY_ENTITY_ID], entity_values=[Value(string_val=DUMMY_ENTITY_VAL)])

Batch = list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]]


class IsthmusOnlineStoreConfig(FeastConfigBaseModel):
    """The `online_store` section of a `feature_store.yaml`.

    Attributes:
        url: URL of Redis, `redis://`, `rediss://` or `unix://`; for a cluster `redis+cluster://` or
            `rediss+cluster://`.
        project: name of the project in Isthmus, if Feast's differs: Isthmus registers `my-shop` as `my_shop`.
        serve_expired: True to return values older than their view's ttl, as Feast's own stores do. Training never sees
            such values. Registered views always apply their ttl.
        types: number types of views that only Feast knows. `declared` uses the types of the view; `written` keeps the
            types that were written, as Feast's own stores do, in larger and slower rows.
        key_ttl_seconds: seconds without a write after which Redis deletes an entity, as in Feast's own store. Writes
            raise ConfigurationError if the project has rows of `isthmus materialize`, which would be deleted, too.
    """

    type: Literal["isthmus.feast.IsthmusOnlineStore", "isthmus.features.feast.IsthmusOnlineStore"] = (
        "isthmus.feast.IsthmusOnlineStore"
    )
    url: StrictStr = Field(repr=False)
    project: StrictStr | None = None
    serve_expired: bool = False
    types: Literal["declared", "written"] = "declared"
    key_ttl_seconds: PositiveInt | None = None


class IsthmusOnlineStore(FeastOnlineStore):
    """Feast online store with our rows in Redis. Methods raise DependencyError if Redis does not answer.

    A view that `isthmus apply` has registered keeps its contract: Feast reads and writes the same rows as `isthmus
    materialize` and the server. Any other view gets a contract from its schema. A correction with the same event time
    and a later created time replaces the row. The ttl applies on reading.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        # An asyncio connection belongs to its event loop.
        self._clients: dict[asyncio.AbstractEventLoop, redis.asyncio.Redis] = {}

    @property
    def async_supported(self) -> SupportedAsyncMethods:
        return SupportedAsyncMethods(read=True, write=True)

    def _is_versioned_read_supported(self) -> bool:
        return True

    def online_write_batch(
        self, config: RepoConfig, table: FeatureView, data: Batch, progress: Callable[[int], Any] | None
    ) -> None:
        """Write rows to Redis, except rows whose stored row is newer by (event time, created time, content).

        Feast calls this for rows that users write or push. Each item of `data` is a key, values by feature, event time
        and created time or None.

        `progress` is called with the number of rows after the write, unless it is None.

        Raises:
            DataError: a value has another type than its feature, or a row has no event timestamp.
            RequestError: an entity key has other join keys than the view.
            ConfigurationError: `key_ttl_seconds` is set although the project has rows of `isthmus materialize`, which
                would expire, too.
        """
        if data:
            entity_keys, rows, events, created = zip(*data, strict=True)
            keys = _whole(table, entity_keys)
            layout = layout_of(config, table, keys)
            view = layout.view
            values = {
                name: feast_values.from_protos([row.get(name, _NULL) for row in rows], form, f"{view.name}.{name}")
                for name, form in layout.forms.items()
            }
            event = feast_values.micros(events, view.name)
            has_created = np.array([feast_values.is_time(time) for time in created], bool)
            known = event + view.delay
            known[has_created] = feast_values.micros(
                [time for time in created if feast_values.is_time(time)], view.name
            )
            self._write(config, view, layout.keys(keys), event, known, values)
        if progress:
            progress(len(data))

    def online_write_table(
        self,
        config: RepoConfig,
        table: FeatureView,
        rows: Mapping[str, pa.ChunkedArray],
        event: pa.ChunkedArray,
        created: pa.ChunkedArray | None,
        untyped: Sequence[str] = (),
    ) -> None:
        """Write rows from Arrow columns to Redis, faster than `online_write_batch`. `feast materialize` calls this.

        A row is skipped if its stored row is newer. `rows` has the columns of the join keys and features, by name.
        `event` and `created` are the times of each row. `created` is None if the source does not have created times.
        Join keys in `untyped` do not have a declared type and get the type of their column.

        Raises:
            DataError: a column has another type than its feature, or a row lacks its time or a key.
            ConfigurationError: `key_ttl_seconds` is set although the project has rows of `isthmus materialize`, which
                would expire, too.
        """
        inferred = [(name, feast_values.inferred_key_type(rows[name].type, f"{table.name}.{name}")) for name in untyped]
        layout = layout_of(config, table, inferred=inferred)
        view = layout.view
        values = {
            field.name: feast_values.arrow_column(
                rows[field.name], field.dtype, layout.forms[field.name], f"{view.name}.{field.name}"
            )
            for field in table.features
        }
        keys = {key.name: feast_values.plain_keys(rows[key.name], key, f"view {view.name}") for key in view.keys}
        event_times = feast_values.to_timestamps(event, f"view {view.name}, event timestamp")
        if event_times.null_count:
            raise DataError(view.name, "a row has no event timestamp", expected="one in every row")
        event_micros = arrow.micros(event_times)
        known = event_micros + view.delay
        if created is not None:
            created_times = feast_values.to_timestamps(created, f"view {view.name}, created timestamp")
            known = arrow.micros(pc.coalesce(created_times, pa.array(known).cast(feast_values.TIME)))
        self._write(config, view, keys, event_micros, known, values)

    async def online_write_batch_async(
        self, config: RepoConfig, table: FeatureView, data: Batch, progress: Callable[[int], Any] | None
    ) -> None:
        # Packing a batch would block the event loop.
        await asyncio.to_thread(self.online_write_batch, config, table, data, progress)

    def online_read(
        self,
        config: RepoConfig,
        table: FeatureView,
        entity_keys: list[EntityKey],
        requested_features: list[str] | None = None,
    ) -> FeastRows:
        """Return the event time and the feature values of each entity key, in the order of the keys.

        The result has (None, None) for a key without a row, and (time, None) if the row has expired by the view's ttl.
        Without `requested_features`, return all features.

        Raises:
            DataError: a row is damaged.
            ContractMismatch: a row was written under another schema of the view.
            RequestError: the view has no such feature, or an entity key has other join keys than the view.
        """
        view = ViewLookup(config, table, entity_keys, requested_features)
        lookup = FeastLookup(config, [view])
        return view.rows(lookup.answers(self._replies(lookup))[0])

    async def online_read_async(
        self,
        config: RepoConfig,
        table: FeatureView,
        entity_keys: list[EntityKey],
        requested_features: list[str] | None = None,
    ) -> FeastRows:
        view = ViewLookup(config, table, entity_keys, requested_features)
        lookup = FeastLookup(config, [view])
        return view.rows(lookup.answers(await self._replies_async(lookup))[0])

    def _read_features_per_fv(self, *args: Any, **kwargs: Any) -> None:
        """Answer a whole `get_online_features` request in one round trip; Feast calls this, not `online_read`."""
        request = OnlineRequest(*args, **kwargs)
        request.answer(self._replies(request.lookup))

    async def _read_features_per_fv_async(self, *args: Any, **kwargs: Any) -> None:
        request = OnlineRequest(*args, **kwargs)
        request.answer(await self._replies_async(request.lookup))

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Entity],  # noqa: ARG002 - Feast's interface
        entities_to_keep: Sequence[Entity],  # noqa: ARG002
        partial: bool,  # noqa: ARG002
    ) -> None:
        """Prepare Redis for a changed set of views: delete the rows of the removed views. `feast apply` calls this.

        First check that Redis can hold the types of all remaining views. If a view is removed, all its versions are
        deleted. If only a version of it is removed, the other versions stay. Entities and `partial` are ignored.

        Raises:
            ConfigurationError: Redis cannot hold the types of some views. The message lists all these views, and
                nothing is deleted.
        """
        problems: list[Problem] = []
        for table in tables_to_keep:
            if getattr(table, "write_to_online_store", True):
                try:
                    layout_of(config, table)
                except ConfigurationError as error:
                    problems += error.problems
        if problems:
            raise ConfigurationError("feature views", problems)
        self._remove(config, tables_to_delete, {table.name for table in tables_to_keep})

    def teardown(
        self,
        config: RepoConfig,
        tables: Sequence[FeatureView],
        entities: Sequence[Entity],  # noqa: ARG002 - Feast's interface
    ) -> None:
        """Delete the rows of these views from Redis. `feast teardown` calls this. Rows of other projects stay."""
        self._remove(config, tables)

    async def initialize(self, config: RepoConfig) -> None:
        """Connect to Redis before Feast's server accepts requests. Raise DependencyError if Redis does not answer."""
        with translate_errors(config.online_store.url, SETTING):
            await self._connected_async(config).execute_command("PING")  # type: ignore[no-untyped-call]  # so in redis-py

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self, config: RepoConfig) -> Client:
        if self._client is None:
            self._client = connect(config.online_store.url, TIMEOUT_SECONDS, SETTING)
        return self._client

    def _connected_async(self, config: RepoConfig) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # Drop the clients of loops that ended without `close`.
            self._clients = {alive: client for alive, client in self._clients.items() if not alive.is_closed()}
            address = Address.of(config.online_store.url)
            kind: Any = redis.asyncio.RedisCluster if address.cluster else redis.asyncio.Redis
            self._clients[loop] = kind.from_url(
                address.urls[0], protocol=2, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS
            )
        return self._clients[loop]

    def _replies(self, lookup: FeastLookup) -> list[Any]:
        with translate_errors(lookup.config.online_store.url, SETTING):
            pipeline = self._connected(lookup.config).pipeline(transaction=False)
            return list(lookup.queue(pipeline).execute())

    async def _replies_async(self, lookup: FeastLookup) -> list[Any]:
        with translate_errors(lookup.config.online_store.url, SETTING):
            pipeline = self._connected_async(lookup.config).pipeline(transaction=False)
            return list(await lookup.queue(pipeline).execute())

    def _write(
        self,
        config: RepoConfig,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Ints,
        known: Ints,
        values: Mapping[str, Values],
    ) -> None:
        with translate_errors(config.online_store.url, SETTING):
            client, project = self._connected(config), project_of(config)
            seconds = config.online_store.key_ttl_seconds
            # All views of an entity share a hash, which expires whole.
            if seconds is not None and client.exists(record.records(project).decode()):
                problem = "would also delete rows that `isthmus materialize` wrote"
                raise ConfigurationError(
                    "feature_store.yaml", [Problem("online_store.key_ttl_seconds", problem)],
                    remedy=f"remove it; {seconds} seconds later, run `isthmus materialize --full` to restore such rows",
                )  # fmt: skip
            OnlineStore(client, contract_of(project, [view])).write(view, keys, event, known, values)
            if seconds is not None:
                pipeline = client.pipeline(transaction=False)
                for name in entity_keys(project, view.keys, keys):
                    pipeline.expire(name, seconds)
                pipeline.execute()

    def _remove(self, config: RepoConfig, tables: Sequence[FeatureView], remaining: Collection[str] = ()) -> None:
        """Delete the records and rows of views from Redis; all versions if a view's name is not in `remaining`."""
        # Without its record, a running materialization ends with an error and the next run compares every row.
        fields = [online_name(config, table) for table in tables]
        if not fields:
            return
        versioned = config.registry.enable_online_feature_view_versioning
        gone = {table.name.encode() for table in tables if versioned and table.name not in remaining}
        project = project_of(config)
        # The names of hashes start with the project and a colon, so other projects do not match.
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", project) + ":*"
        with translate_errors(config.online_store.url, SETTING):
            client = self._connected(config)
            client.hdel(record.records(project).decode(), *fields)
            for field in fields:
                client.delete(lock_key(project, field))
                client.delete(suspects_key(project, field))
            names = client.scan_iter(match=pattern, count=BATCH, _type="HASH")
            while batch := list(islice(names, BATCH)):
                versions: list[list[bytes]] = [[]] * len(batch)
                pipeline = client.pipeline(transaction=False)
                if gone:
                    for name in batch:
                        pipeline.hkeys(name)
                    versions = pipeline.execute()
                for name, held in zip(batch, versions, strict=True):
                    pipeline.hdel(name, *fields, *(field for field in held if field.partition(b"@v")[0] in gone))
                pipeline.execute()


def _whole(table: FeatureView, keys: Sequence[EntityKey]) -> list[EntityKey]:
    """Return complete entity keys: Feast omits keys without a type. Raise RequestError if one lacks a join key."""
    entities = [name for name in table.entities if name != DUMMY_ENTITY_NAME]
    if len(table.entity_columns) < len(entities) and min(len(key.join_keys) for key in keys) < len(entities):
        raise RequestError(
            f"view {table.name}", "a row lacks a join key, because Feast does not know its type",
            expected=f"a value for {' and '.join(entities)}",
            remedy="declare its type with a field of the view or value_type of the entity, and run `feast apply`",
        )  # fmt: skip
    # For a view without entities, `materialize` and lookups use a dummy key that `write_to_online_store` omits.
    return [key if key.join_keys else _DUMMY_KEY for key in keys]
