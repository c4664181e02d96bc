"""Feast lookups: read the rows of several views in one round trip, and return them as Feast's protos."""

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
from feast import FeatureView, utils
from feast.protos.feast.serving.ServingService_pb2 import FieldStatus, GetOnlineFeaturesResponse
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig

from isthmus.features import clock
from isthmus.features.errors import IsthmusError, RequestError, one_of
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.views import ViewLayout, contract_of, is_registered, layout_of, project_of
from isthmus.features.online import record
from isthmus.features.online.plan import LookupPlan, ViewAnswer

_STATUSES = np.array(
    [
        FieldStatus.PRESENT,
        FieldStatus.NULL_VALUE,
        FieldStatus.OUTSIDE_MAX_AGE,
        FieldStatus.NOT_FOUND,
        FieldStatus.INVALID,
    ],
    np.uint8,
)

FeastRows = list[tuple[datetime | None, dict[str, Value] | None]]
"""Event time and values of each key: (None, None) without a row, (event time, None) if the row has expired."""


class ViewLookup:
    """The features and keys to read from one view. Raise RequestError if the view lacks a feature or has other keys."""

    def __init__(
        self, config: RepoConfig, table: FeatureView, entity_keys: Sequence[EntityKey], features: Sequence[str] | None
    ) -> None:
        self.layout = layout_of(config, table, entity_keys)
        self.registered = is_registered(table.tags)
        self.features = list(features or self.layout.forms)
        for feature in self.features:
            if feature not in self.layout.forms:
                raise RequestError(f"view {table.name}", f"no feature {feature!r}", expected=one_of(self.layout.forms))
        self.keys = self.layout.keys(entity_keys)
        self.count = len(entity_keys)

    def rows(self, answer: ViewAnswer) -> FeastRows:
        forms = self.layout.forms
        columns = [feast_values.to_protos(answer.columns[name], forms[name]) for name in self.features]
        rows: FeastRows = []
        for status, event, values in zip(
            answer.status.tolist(), answer.event.tolist(), zip(*columns, strict=True), strict=True
        ):
            time = None if status == clock.Status.NOT_FOUND else clock.moment(event)
            present = status in (clock.Status.PRESENT, clock.Status.NULL)
            rows.append((time, dict(zip(self.features, values, strict=True)) if present else None))
        return rows


class FeastLookup:
    """A lookup of several views in one round trip. Views with the same keys share their Redis commands."""

    def __init__(self, config: RepoConfig, views: Sequence[ViewLookup]) -> None:
        self.config = config
        self._views = views
        groups: dict[tuple[Any, ...], list[ViewLookup]] = {}
        for view in views:
            keys = tuple((name, tuple(view.keys[name])) for name in sorted(view.keys))
            groups.setdefault((view.registered, keys), []).append(view)
        self._groups = [
            (_plan(project_of(config), tuple(dict.fromkeys(view.layout for view in group)), not registered), group)
            for (registered, _), group in groups.items()
        ]

    def queue(self, pipeline: Any) -> Any:
        for plan, group in self._groups:
            records = record.query(plan.contract.project, plan.views)
            for name, *rest in [records, *plan.commands(group[0].keys)]:
                # A cluster's pipeline needs the name of the command as text.
                pipeline.execute_command(name.decode(), *rest)
        return pipeline

    def answers(self, replies: Sequence[Any]) -> list[ViewAnswer]:
        at, start = clock.now(), 0
        by_view: dict[int, ViewAnswer] = {}
        try:
            for plan, group in self._groups:
                count = group[0].count
                stamps = record.stamps(plan.views, replies[start])
                answers = plan.decode(replies[start + 1 : start + 1 + count], count, at, stamps)
                start += 1 + count
                by_view.update({id(view): answers[view.layout.view.name] for view in group})
        except IsthmusError as error:
            # Feast users have other remedies.
            remedy = "write the view's rows again, with `feast materialize` or `isthmus materialize --full`"
            raise type(error)(error.where, error.found, expected=error.expected, remedy=remedy) from None
        return [by_view[id(view)] for view in self._views]


class OnlineRequest:
    """A `get_online_features` request; the arguments are those of Feast's `_read_features_per_fv`, in its order."""

    def __init__(  # noqa: PLR0913 - the signature is Feast's
        self,
        config: RepoConfig,
        grouped_refs: Sequence[tuple[FeatureView, list[str]]],
        join_key_values: dict[str, list[Value]],
        join_keys: dict[str, str],
        response: GetOnlineFeaturesResponse,
        full_names: bool,
        versions: bool,
    ) -> None:
        self._response, self._full_names, self._versions = response, full_names, versions
        self._parts = []
        for table, features in grouped_refs:
            unique, places, length = utils._get_unique_entities(table, join_key_values, join_keys)
            view = ViewLookup(config, table, utils._get_entity_key_protos(unique), features)
            self._parts.append((view, table, places, length))
        self.lookup = FeastLookup(config, [view for view, *_ in self._parts])

    def answer(self, replies: Sequence[Any]) -> None:
        answers = self.lookup.answers(replies)
        for (view, table, places, length), answer in zip(self._parts, answers, strict=True):
            features = view.features
            utils._populate_response_from_feature_data(
                features, view.rows(answer), places, self._response, self._full_names, table, length, self._versions
            )
            spread = np.zeros(length, np.int64)
            for n, rows in enumerate(places):
                spread[rows] = n
            for feature, result in zip(features, self._response.results[-len(features) :], strict=True):
                absent = ~answer.columns[feature].valid & (answer.status == clock.Status.PRESENT)
                codes = np.where(absent, np.uint8(clock.Status.NULL), answer.status)
                result.statuses[:] = _STATUSES[codes][spread].tolist()


@lru_cache(maxsize=256)
def _plan(project: str, layouts: tuple[ViewLayout, ...], ahead: bool) -> LookupPlan:
    contract = contract_of(project, [layout.view for layout in layouts])
    return LookupPlan(contract, contract.views, ahead=ahead)
