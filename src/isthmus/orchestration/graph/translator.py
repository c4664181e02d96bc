"""How a node of the project's graph looks in Dagster: override it here."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import dagster as dg

from isthmus.orchestration.graph.outline import Model, Outline, Place, Snapshot, View

Kind = Literal[
    "source", "contract", "build", "offline", "online", "training_set", "teacher", "teacher_outputs", "student",
    "control", "package", "deployment", "snapshot", "recorded",
]  # fmt: skip
KINDS = {
    "contract": {"feast"},
    "build": {"pyspark"},
    "offline": {"pyspark", "deltalake"},
    "online": {"redis"},
    "training_set": {"duckdb"},
    "teacher": {"pytorch"},
    "teacher_outputs": {"pytorch"},
    "student": {"pytorch"},
    "control": {"pytorch"},
    "package": {"onnx"},
    "deployment": {"onnx"},
    "snapshot": {"file"},
    "recorded": {"deltalake"},
}
"""The library that creates each, as a badge in Dagster."""


@dataclass(frozen=True)
class Node:
    """A node of the graph, and the view, the model or the snapshot that it belongs to.

    Its name is that of the source, the view, the model or the snapshot's service; the contract and recorded answers
    have none. `deps` are the nodes it depends on.
    """

    kind: Kind
    name: str
    outline: Outline
    deps: Sequence["Node"] = ()
    view: View | None = None
    model: Model | None = None
    snapshot: Snapshot | None = None

    @property
    def id(self) -> str:
        """Kind and name: how steps refer to it."""
        return f"{self.kind}/{self.name}" if self.name else self.kind


class IsthmusTranslator:
    """Turns nodes into asset specs. Override `get_asset_spec` for keys, groups, owners, kinds, tags and automation.

        class Ours(IsthmusTranslator):
            def get_asset_spec(self, node):
                spec = super().get_asset_spec(node)
                return spec.replace_attributes(owners=["team:features"], key=spec.key.with_prefix("shop"))

    Dependencies follow the keys.
    """

    def get_asset_spec(self, node: Node) -> dg.AssetSpec:
        """The spec of a node, without its dependencies."""
        view, model = node.view, node.model
        owner = "" if (declared := view or model) is None else declared.owner
        metadata: dict[str, Any] = {}
        description, version, freshness = "", None, None
        if view is not None:
            version = view.code
            metadata["dagster/column_schema"] = dg.TableSchema(
                [dg.TableColumn(name, dtype, description=text or None) for name, dtype, text in view.columns]
            )
            if view.place is not None:
                metadata["dagster/code_references"] = _reference(view.place)
            described = {
                "build": f"Days of {view.name}, computed by its PySpark transform and written to the offline table.",
                "offline": view.description or f"The full history of {view.name}.",
                "online": f"The latest row of every key of {view.name}, in Redis.",
            }
            description = described[node.kind]
            if node.kind == "offline":
                metadata["dagster/uri"] = view.table
            if node.kind == "online" and view.ttl:
                # After that, every answer has expired.
                freshness = dg.FreshnessPolicy.time_window(timedelta(seconds=max(view.ttl, 60.0)))
        if model is not None:
            versions = {"training_set": model.examples, "package": model.export, "deployment": model.export}
            # A metric that has changed makes students stale, which are then only judged again, but no teacher.
            versions |= dict.fromkeys(("teacher", "teacher_outputs"), model.teaching)
            version = versions.get(node.kind, model.training)
            description = {
                "training_set": "Every example with what each view answered at its moment.",
                "teacher": "A large model that sees everything the server has.",
                "teacher_outputs": "What the teacher says of each row: computed once, kept by row.",
                "student": model.description or "A small model that learned from the teacher.",
                "control": "The same small model, without the teacher.",
                "package": "The folder a mobile engineer receives.",
                "deployment": "The package behind the API.",
            }[node.kind]
        if node.snapshot is not None:
            version = node.snapshot.code
            description = "The stored features that devices keep, as a signed file."
        if node.kind == "recorded":
            description = "What each answer of the servers rested on: enough to compute it again."
        if node.kind == "contract":
            version = node.outline.contract
            description = "The compiled definitions: what every reader holds its data against."
        if node.kind == "source":
            description = next(source.declared.place for source in node.outline.sources if source.name == node.name)
        return dg.AssetSpec(
            # Graphs show only the last part: the name of a view, grouped by kind, or the kind, grouped by model.
            dg.AssetKey(node.id.split("/") if model is None else [model.name, node.kind]),
            group_name=_group(node),
            kinds=KINDS.get(node.kind, set()),
            description=description,
            code_version=None if version is None else version[:12],
            metadata=metadata,
            owners=[owner] if owner else [],
            freshness_policy=freshness,
            automation_condition=condition(node),
        )


def _group(node: Node) -> str:
    """Its kind, or its model; a package and its deployment have their own, so that a screen holds each group."""
    if node.model is None:
        return node.kind
    name = node.model.name.replace("-", "_")
    return f"{name}_release" if node.kind in ("package", "deployment") else name


def _reference(place: Place) -> dg.CodeReferencesMetadataValue:
    with warnings.catch_warnings():
        # Links to code are still in beta; only the way they are shown may change.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.CodeReferencesMetadataValue(
            code_references=[dg.LocalFileCodeReference(file_path=place.file, line_number=place.line)]
        )


_FOLLOWING = {
    "offline", "online", "snapshot", "teacher", "teacher_outputs", "student", "control", "package", "deployment",
}  # fmt: skip


def condition(node: Node) -> dg.AutomationCondition[Any] | None:
    """When a node is materialized again: after one of its dependencies, if it has been materialized before.

    Recorded answers are collected every hour. A training set follows the project's schedule, or drift of its views from
    what the model has learned; everything else of a model follows its training set.
    """
    of = dg.AutomationCondition
    ready = ~of.missing() & ~of.in_progress() & ~of.any_deps_in_progress() & of.all_deps_blocking_checks_passed()
    if node.kind in _FOLLOWING:
        below = of.any_deps_updated()
        if node.kind == "deployment":
            # New online rows need no new deployment: the deployed package reads them as they come.
            below = below.ignore(dg.AssetSelection.kind("redis"))
        updated: dg.AutomationCondition[Any] = below
        if node.snapshot is not None and node.snapshot.cron is not None:
            # A snapshot grows old, whether its rows change or not.
            updated = updated | of.cron_tick_passed(node.snapshot.cron)
        return (updated.since_last_handled() & ready).with_label("something new below it")
    if node.kind == "recorded":
        hour: dg.AutomationCondition[Any] = of.cron_tick_passed("@hourly")
        return (hour.since_last_handled() & ~of.missing() & ~of.in_progress()).with_label("every hour")
    if node.kind == "training_set":
        # Drift is the only check of a dependency that does not block. Each dependency is matched separately: checks of
        # the rest come and go with every build, and would make an old drift newly true.
        failed, blocking = (of.any_checks_match(of.check_failed(), blocking_only=only) for only in (False, True))
        drifted = of.any_deps_match(failed & ~blocking)
        due: dg.AutomationCondition[Any] = drifted.newly_true()
        if node.outline.retrain is not None:
            due = due | of.cron_tick_passed(node.outline.retrain)
        return (due.since_last_handled() & ready).with_label("drift or schedule")
    return None
