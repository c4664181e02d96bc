"""Asset specs of the project's nodes: keys, groups, owners, descriptions and automation conditions."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import dagster as dg

from isthmus.orchestration.graph.outline import CodeLocation, ModelOutline, Outline, SnapshotOutline, ViewOutline

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
}  # the library that writes each kind of node, shown as a badge in Dagster


@dataclass(frozen=True)
class AssetNode:
    """A node of the asset graph.

    Attributes:
        kind: kind of asset, such as "offline" or "student".
        name: name of the source, view, model or service; empty for the contract and for recorded answers.
        outline: the project.
        deps: nodes this node depends on.
        view: view of a build, offline or online node.
        model: model of a node from training set to deployment.
        snapshot: snapshot of a snapshot node.
    """

    kind: Kind
    name: str
    outline: Outline
    deps: Sequence["AssetNode"] = ()
    view: ViewOutline | None = None
    model: ModelOutline | None = None
    snapshot: SnapshotOutline | None = None

    @property
    def id(self) -> str:
        """Identifier in step requests: kind/name, or the kind if there is no name."""
        return f"{self.kind}/{self.name}" if self.name else self.kind


class IsthmusTranslator:
    """Maps nodes to asset specs. Override `get_asset_spec` to change keys, groups, owners, kinds, tags and automation.

        class Ours(IsthmusTranslator):
            def get_asset_spec(self, node):
                spec = super().get_asset_spec(node)
                return spec.replace_attributes(owners=["team:features"], key=spec.key.with_prefix("shop"))

    Dependencies between assets use the new keys.
    """

    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        """Return the asset spec of a node, without its dependencies."""
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
                # After the ttl, every value has expired.
                freshness = dg.FreshnessPolicy.time_window(timedelta(seconds=max(view.ttl, 60.0)))
        if model is not None:
            versions = {"training_set": model.examples, "package": model.export, "deployment": model.export}
            # A changed metric makes students stale (they are only evaluated again), but not teachers.
            versions |= dict.fromkeys(("teacher", "teacher_outputs"), model.teaching)
            version = versions.get(node.kind, model.training)
            description = {
                "training_set": "Every example with the features that were known at its time.",
                "teacher": "A large model that may use every feature of the server.",
                "teacher_outputs": "The teacher's prediction for each row, computed once and cached.",
                "student": model.description or "A small model trained on labels and the teacher's predictions.",
                "control": "The same small model, trained on labels only.",
                "package": "The model package that ships to devices.",
                "deployment": "The package that the API serves.",
            }[node.kind]
        if node.snapshot is not None:
            version = node.snapshot.code
            description = "The stored features for devices, as a signed file."
        if node.kind == "recorded":
            description = "The inputs of every recorded answer, enough to replay it exactly."
        if node.kind == "contract":
            version = node.outline.contract
            description = "The compiled definitions that every reader checks its data against."
        if node.kind == "source":
            description = next(source.declared.place for source in node.outline.sources if source.name == node.name)
        return dg.AssetSpec(
            # Dagster's graph shows only the last part of a key. Views are grouped by kind, so it is the view's name;
            # model assets are grouped by model, so it is the kind.
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


def _group(node: AssetNode) -> str:
    """Return the asset group. Package and deployment have a separate group, so that each group fits on a screen."""
    if node.model is None:
        return node.kind
    name = node.model.name.replace("-", "_")
    return f"{name}_release" if node.kind in ("package", "deployment") else name


def _reference(place: CodeLocation) -> dg.CodeReferencesMetadataValue:
    with warnings.catch_warnings():
        # Code references are still in beta.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.CodeReferencesMetadataValue(
            code_references=[dg.LocalFileCodeReference(file_path=place.file, line_number=place.line)]
        )


_FOLLOWING = {
    "offline", "online", "snapshot", "teacher", "teacher_outputs", "student", "control", "package", "deployment",
}  # fmt: skip


def condition(node: AssetNode) -> dg.AutomationCondition[Any] | None:
    """Return when a node is materialized automatically: after a dependency, if it was materialized before.

    Recorded answers are collected every hour. A training set is rebuilt on the project's schedule, or when the features
    drift from the data the model was trained on. The other assets of a model follow its training set.
    """
    of = dg.AutomationCondition
    ready = ~of.missing() & ~of.in_progress() & ~of.any_deps_in_progress() & of.all_deps_blocking_checks_passed()
    if node.kind in _FOLLOWING:
        upstream = of.any_deps_updated()
        if node.kind == "deployment":
            # A deployed package reads new online rows directly, without a new deployment.
            upstream = upstream.ignore(dg.AssetSelection.kind("redis"))
        updated: dg.AutomationCondition[Any] = upstream
        if node.snapshot is not None and node.snapshot.cron is not None:
            # A snapshot expires even if its rows do not change.
            updated = updated | of.cron_tick_passed(node.snapshot.cron)
        return (updated.since_last_handled() & ready).with_label("new upstream data")
    if node.kind == "recorded":
        hour: dg.AutomationCondition[Any] = of.cron_tick_passed("@hourly")
        return (hour.since_last_handled() & ~of.missing() & ~of.in_progress()).with_label("every hour")
    if node.kind == "training_set":
        # Drift is the only non-blocking check of a dependency. Each dependency is matched separately: blocking checks
        # change with every build, and a combined condition would make an old drift newly true.
        failed, blocking = (of.any_checks_match(of.check_failed(), blocking_only=only) for only in (False, True))
        drifted = of.any_deps_match(failed & ~blocking)
        due: dg.AutomationCondition[Any] = drifted.newly_true()
        if node.outline.retrain is not None:
            due = due | of.cron_tick_passed(node.outline.retrain)
        return (due.since_last_handled() & ready).with_label("drift or schedule")
    return None
