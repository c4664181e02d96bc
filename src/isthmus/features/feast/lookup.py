"""A lookup as Feast asks for it: some views and their entity keys, in one round trip, answered in Feast's protos."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FeatureView, utils
    from feast.protos.feast.serving.ServingService_pb2 import FieldStatus, GetOnlineFeaturesResponse
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.repo_config import RepoConfig

from isthmus.features import clock
from isthmus.features.clock import Status
from isthmus.features.contract.contract import Contract, one_of
from isthmus.features.errors import IsthmusError, RequestError
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.views import Layout, layout_of, project_of
from isthmus.features.online import record
from isthmus.features.online.plan import LookupPlan, ViewAnswer

_STATUSES = np.array(
    [FieldStatus.PRESENT, FieldStatus.NULL_VALUE, FieldStatus.OUTSIDE_MAX_AGE, FieldStatus.NOT_FOUND], np.uint8
)
"""Feast's code for each code of `Status`."""

Rows = list[tuple[datetime | None, dict[str, Value] | None]]
"""Event time and values of each key: (None, None) without a row, (event time, None) where it has expired."""


class Question:
    """What one view is asked.

    Raises:
        RequestError: a feature is none of the view, or an entity key is not the view's.
    """

    def __init__(
        self, config: RepoConfig, table: FeatureView, entity_keys: Sequence[EntityKey], features: Sequence[str] | None
    ) -> None:
        self.layout = layout_of(config, table, entity_keys)
        self.features = list(features or self.layout.forms)
        for feature in self.features:
            if feature not in self.layout.forms:
                raise RequestError(f"view {table.name}", f"no feature {feature!r}", expected=one_of(self.layout.forms))
        self.keys = self.layout.keys(entity_keys)
        self.count = len(entity_keys)

    def rows(self, answer: ViewAnswer) -> Rows:
        """The answer as Feast wants it."""
        forms = self.layout.forms
        columns = [feast_values.protos(answer.columns[name], forms[name]) for name in self.features]
        rows: Rows = []
        stated = zip(answer.status.tolist(), answer.event.tolist(), zip(*columns, strict=True), strict=True)
        for status, event, values in stated:
            time = None if status == Status.NOT_FOUND else clock.moment(event)
            held = status in (Status.PRESENT, Status.NULL)
            rows.append((time, dict(zip(self.features, values, strict=True)) if held else None))
        return rows


class Lookup:
    """Some questions in one round trip: views that are asked for the same keys share their commands."""

    def __init__(self, config: RepoConfig, questions: Sequence[Question]) -> None:
        self.config = config
        self._questions = questions
        groups: dict[tuple[Any, ...], list[Question]] = {}
        for question in questions:
            named = tuple((name, tuple(question.keys[name])) for name in sorted(question.keys))
            groups.setdefault(named, []).append(question)
        self._groups = [
            (_plan(project_of(config), tuple(dict.fromkeys(question.layout for question in group))), group)
            for group in groups.values()
        ]

    def sent_by(self, pipeline: Any) -> Any:
        """The pipeline, of whichever kind, with the commands of all questions."""
        for plan, group in self._groups:
            records = record.query(plan.contract.project, plan.views)
            for name, *rest in [records, *plan.commands(group[0].keys)]:
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
            for plan, group in self._groups:
                count = group[0].count
                stamps = record.stamps(plan.views, replies[start])
                answers = plan.decode(replies[start + 1 : start + 1 + count], count, at, stamps)
                start += 1 + count
                found.update({id(question): answers[question.layout.view.name] for question in group})
        return [found[id(question)] for question in self._questions]

    def rows(self, replies: Sequence[Any]) -> list[Rows]:
        """The rows of each question as Feast wants them."""
        answers = self.answers(replies)
        return [question.rows(answer) for question, answer in zip(self._questions, answers, strict=True)]


class Request:
    """One request of `get_online_features`, and which rows of the answer each looked-up key fills.

    Args:
        config: Feast's configuration.
        grouped_refs: the views, each with its features.
        join_key_values: join key name to n values.
        join_keys: entity name to join key name.
        response: what `answer` appends to.
        full_names: whether features are named with their views.
        versions: whether the response says the version of each view.
    """

    def __init__(
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
            question = Question(config, table, utils._get_entity_key_protos(unique), features)
            self._parts.append((question, table, places, length))
        self.lookup = Lookup(config, [question for question, *_ in self._parts])

    def answer(self, replies: Sequence[Any]) -> None:
        """Appends all features to Feast's response, with statuses that are true.

        Feast by itself would say PRESENT of a null and NOT_FOUND of what has expired.
        """
        answers = self.lookup.answers(replies)
        for (question, table, places, length), answer in zip(self._parts, answers, strict=True):
            features = question.features
            utils._populate_response_from_feature_data(
                features, question.rows(answer), places, self._response, self._full_names, table, length, self._versions
            )
            spread = np.zeros(length, np.int64)
            for n, rows in enumerate(places):
                spread[rows] = n
            for feature, result in zip(features, self._response.results[-len(features) :], strict=True):
                absent = ~answer.columns[feature].valid & (answer.status == Status.PRESENT)
                codes = np.where(absent, np.uint8(Status.NULL), answer.status)
                result.statuses[:] = _STATUSES[codes][spread].tolist()


@lru_cache(maxsize=256)
def _plan(project: str, layouts: tuple[Layout, ...]) -> LookupPlan:
    views = {layout.view.name: layout.view for layout in layouts}
    return LookupPlan(Contract(project, views, {}, {}, {}), views)


@contextmanager
def _rows_of_feast() -> Iterator[None]:
    """Gives the errors of stored rows the remedies of this side."""
    try:
        yield
    except IsthmusError as error:
        remedy = "write the view's rows again, with `feast materialize` or `isthmus materialize`"
        raise type(error)(error.where, error.found, expected=error.expected, remedy=remedy) from None
