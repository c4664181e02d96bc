"""What a node of the project's graph is in Dagster: the one place to override."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import dagster as dg

from isthmus.orchestration.graph.outline import Model, Outline, Place, View

Kind = Literal[
    "source", "contract", "build", "offline", "online", "training_set", "teacher", "teacher_outputs", "student",
    "control", "package", "deployment",
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
}
"""What makes each, as Dagster's badges."""


@dataclass(frozen=True)
class Node:
    """A node of the graph.

    Attributes:
        kind: what it is.
        name: of the source, the view or the model; empty for the contract.
        outline: of the project.
        deps: what it is made of.
        view: whose it is; None if it is no view's.
        model: whose it is; None if it is no model's.
    """

    kind: Kind
    name: str
    outline: Outline
    deps: Sequence["Node"] = ()
    view: View | None = None
    model: Model | None = None

    @property
    def id(self) -> str:
        """Kind and name: what its step calls it."""
        return f"{self.kind}/{self.name}" if self.name else self.kind


class IsthmusTranslator:
    """Turns nodes into asset specs. Override `get_asset_spec` for keys, groups, owners, kinds, tags and automation.

        class Ours(IsthmusTranslator):
            def get_asset_spec(self, node):
                spec = super().get_asset_spec(node)
                return spec.replace_attributes(owners=["team:features"], key=spec.key.with_prefix("shop"))

    Dependencies follow keys by themselves.
    """

    def get_asset_spec(self, node: Node) -> dg.AssetSpec:
        """The spec of a node, without its dependencies.

        Args:
            node: of the graph.
        """
        view, model = node.view, node.model
        metadata: dict[str, Any] = {}
        description, version, freshness = "", None, None
        if view is not None:
            version = view.code
            metadata["dagster/column_schema"] = dg.TableSchema(
                [dg.TableColumn(name, dtype, description=told or None) for name, dtype, told in view.columns]
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
                # Later than that, every answer is expired.
                freshness = dg.FreshnessPolicy.time_window(timedelta(seconds=max(view.ttl, 60.0)))
        if model is not None:
            versions = {"training_set": model.examples, "package": model.export, "deployment": model.export}
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
        if node.kind == "contract":
            version = node.outline.contract
            description = "The compiled definitions: what every reader holds its data against."
        if node.kind == "source":
            description = next(one.path for one in node.outline.sources if one.name == node.name)
        return dg.AssetSpec(
            # Graphs show the last part alone: of views the name, in a group per kind; of models the kind, in their own.
            dg.AssetKey(node.id.split("/") if model is None else [model.name, node.kind]),
            group_name=model.name.replace("-", "_") if model is not None else node.kind,
            kinds=KINDS.get(node.kind, set()),
            description=description,
            code_version=None if version is None else version[:12],
            metadata=metadata,
            freshness_policy=freshness,
            automation_condition=condition(node),
        )


def _reference(place: Place) -> dg.CodeReferencesMetadataValue:
    with warnings.catch_warnings():
        # Links to code are in beta: what may change is how they are shown.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.CodeReferencesMetadataValue(
            code_references=[dg.LocalFileCodeReference(file_path=place.file, line_number=place.line)]
        )


_FOLLOWING = {"offline", "online", "teacher", "teacher_outputs", "student", "control", "package", "deployment"}


def condition(node: "Node") -> dg.AutomationCondition[Any] | None:
    """When a node is made again: once there is something new for it, if it has been made before.

    Models are trained again when the project says so, or when what they are fed has drifted from what they learned;
    from the training set on everything follows.
    """
    of = dg.AutomationCondition
    ready = ~of.missing() & ~of.in_progress() & ~of.any_deps_in_progress() & of.all_deps_blocking_checks_passed()
    if node.kind in _FOLLOWING:
        updated = of.any_deps_updated()
        if node.kind == "deployment":
            # New rows are no new package: what is deployed answers from them, and the verdict is on those before.
            updated = updated.ignore(dg.AssetSelection.kind("redis"))
        return (updated.since_last_handled() & ready).with_label("something new below it")
    if node.kind == "training_set":
        # Of the checks of what they are fed, drift alone blocks nothing. Each dependency is asked by itself: checks of
        # others come and go with every build, and would make an old drift newly true.
        failed, blocking = (of.any_checks_match(of.check_failed(), blocking_only=only) for only in (False, True))
        drifted = of.any_deps_match(failed & ~blocking)
        due: dg.AutomationCondition[Any] = drifted.newly_true()
        if node.outline.retrain is not None:
            due = due | of.cron_tick_passed(node.outline.retrain)
        return (due.since_last_handled() & ready).with_label("drift or schedule")
    return None
