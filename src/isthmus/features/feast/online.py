"""Feast's online store over our rows: what `online_store` in a `feature_store.yaml` names.

    online_store:
      type: isthmus.features.feast.IsthmusOnlineStore
      url: redis://localhost:6379

A view that `isthmus apply` has registered keeps its contract: its rows are the very rows that `isthmus materialize`
writes and the server reads. Any other view of Feast's gets a contract from its schema. Rows replace each other by the
time rules, so a correction with the same event timestamp and a later created timestamp arrives; ttl counts on reading.
"""

import asyncio
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
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
    from feast import Entity, FeatureView
    from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
    from feast.infra.online_stores.online_store import OnlineStore as FeastOnlineStore
    from feast.infra.supported_async_methods import SupportedAsyncMethods
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.repo_config import FeastConfigBaseModel, RepoConfig
    from pydantic import Field, StrictStr

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.lookup import Lookup, Question, Request, Rows
from isthmus.features.feast.views import contract_of, layout_of, project_of
from isthmus.features.online import record
from isthmus.features.online.scripts import locked, suspects
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.address import Address
from isthmus.features.redis.connection import answering, connect
from isthmus.features.redis.pipeline import Client
from isthmus.features.values import columns
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import KeyValue
from isthmus.features.values.rows import Int64

TIMEOUT_SECONDS = 5.0
SETTING = "online_store.url in feature_store.yaml"
BATCH = 1000
"""Keys that one round trip of a deletion covers."""

_NULL = Value()
_NOBODY = EntityKey(join_keys=[DUMMY_ENTITY_ID], entity_values=[Value(string_val=DUMMY_ENTITY_VAL)])

Batch = list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]]


class IsthmusOnlineStoreConfig(FeastConfigBaseModel):
    """The `online_store` section of a `feature_store.yaml`.

    Attributes:
        url: `redis://`, `rediss://` or `unix://`.
        project: the project that Isthmus knows the rows by, where that is not the name of Feast's project: Isthmus
            registers `my-shop` as `my_shop`.
    """

    type: Literal["isthmus.features.feast.IsthmusOnlineStore", "isthmus.features.feast_store.IsthmusOnlineStore"] = (
        "isthmus.features.feast.IsthmusOnlineStore"
    )
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
            stated_keys, rows, events, created = zip(*data, strict=True)
            # Of a view without entities, `materialize` and lookups name a key that `write_to_online_store` leaves out.
            keys = [key if key.join_keys else _NOBODY for key in stated_keys]
            layout = layout_of(config, table, keys)
            view = layout.view
            values = {
                name: feast_values.column([row.get(name, _NULL) for row in rows], form, f"{view.name}.{name}")
                for name, form in layout.forms.items()
            }
            event = feast_values.micros(events, view.name)
            stated = np.array([feast_values.is_time(time) for time in created], bool)
            known = event + view.delay
            known[stated] = feast_values.micros([time for time in created if feast_values.is_time(time)], view.name)
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
    ) -> None:
        """`online_write_batch` of columns: no value becomes a proto, but for those that rows hold as protos.

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
        layout = layout_of(config, table)
        view = layout.view
        values = {
            field.name: feast_values.arrow_column(
                rows[field.name], field.dtype, layout.forms[field.name], f"{view.name}.{field.name}"
            )
            for field in table.features
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
        self._write(config, view, keys, happened, known, values)

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
        lookup = Lookup(config, [Question(config, table, entity_keys, requested_features)])
        return lookup.rows(self._replies(lookup))[0]

    async def online_read_async(
        self,
        config: RepoConfig,
        table: FeatureView,
        entity_keys: list[EntityKey],
        requested_features: list[str] | None = None,
    ) -> Rows:
        """`online_read` on the event loop."""
        lookup = Lookup(config, [Question(config, table, entity_keys, requested_features)])
        return lookup.rows(await self._replies_async(lookup))[0]

    def _read_features_per_fv(self, *asked: Any, **named: Any) -> None:
        """Feast's hook for stores that read all views of a request at once: takes what `Request` takes."""
        request = Request(*asked, **named)
        request.answer(self._replies(request.lookup))

    async def _read_features_per_fv_async(self, *asked: Any, **named: Any) -> None:
        request = Request(*asked, **named)
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
        """Removes the rows of deleted views; a view that is kept must have a schema that rows can hold.

        Raises:
            ConfigurationError: with every view that has none.
            DependencyError: Redis does not answer.
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
        with answering(config.online_store.url, SETTING):
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
            self._client = connect(config.online_store.url, TIMEOUT_SECONDS, SETTING)
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

    def _replies(self, lookup: Lookup) -> list[Any]:
        with answering(lookup.config.online_store.url, SETTING):
            pipeline = self._connected(lookup.config).pipeline(transaction=False)
            replies: list[Any] = lookup.sent_by(pipeline).execute()
        return replies

    async def _replies_async(self, lookup: Lookup) -> list[Any]:
        with answering(lookup.config.online_store.url, SETTING):
            pipeline = self._connected_async(lookup.config).pipeline(transaction=False)
            replies: list[Any] = await lookup.sent_by(pipeline).execute()
        return replies

    def _write(
        self,
        config: RepoConfig,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Int64,
        known: Int64,
        values: Mapping[str, Values],
    ) -> None:
        with answering(config.online_store.url, SETTING):
            store = OnlineStore(self._connected(config), contract_of(config, [view]))
            store.write(view, keys, event, known, values)

    def _remove(self, config: RepoConfig, tables: Sequence[FeatureView]) -> None:
        """Removes the fields of some views from every hash of the project, and first what Redis knows of their tables.

        A materialization under way so ends with an error, and one that follows takes no row to be there.
        """
        fields = [table.name for table in tables]
        if not fields:
            return
        # The project comes first in the name of a hash and ends with a colon: no other project's name begins so.
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", project_of(config)) + ":*"
        with answering(config.online_store.url, SETTING):
            client = self._connected(config)
            project = project_of(config)
            client.hdel(record.records(project).decode(), *fields)
            for field in fields:
                for beside in (locked(project, field), suspects(project, field)):
                    client.delete(beside)
            names = client.scan_iter(match=pattern, count=BATCH, _type="HASH")
            while batch := list(islice(names, BATCH)):
                pipeline = client.pipeline(transaction=False)
                for name in batch:
                    pipeline.hdel(name, *fields)
                pipeline.execute()
