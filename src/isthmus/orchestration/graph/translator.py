"""Asset specs of the project's nodes: keys, groups, owners, descriptions and automation conditions."""

import warnings
from datetime import timedelta
from typing import Any

import dagster as dg

from isthmus.orchestration.graph.steps import ASSETS
from isthmus.orchestration.steps.outline import CodeLocation
from isthmus.orchestration.steps.step import AssetNode

_CRON = {"recorded": ("@hourly", "every hour"), "maintenance": ("30 2 * * *", "every night")}


class IsthmusTranslator:
    """Maps the nodes of a project (its assets) to Dagster's asset specs.

    Override `get_asset_spec` to change keys, groups, owners, kinds, tags and automation:

        class Ours(IsthmusTranslator):
            def get_asset_spec(self, node):
                spec = super().get_asset_spec(node)
                return spec.replace_attributes(owners=["team:features"], key=spec.key.with_prefix("shop"))

    Dependencies between assets use the new keys.
    """

    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        """Return the Dagster asset spec of a node of the graph: key, group, description, owners, condition and so on.

        Override it to change these. The graph adds the dependencies.
        """
        view, model, asset = node.view, node.model, ASSETS.get(node.kind)
        owner = "" if (declared := view or model) is None else declared.owner
        metadata: dict[str, Any] = {}
        freshness = None
        if view is not None:
            metadata["dagster/column_schema"] = dg.TableSchema(
                [dg.TableColumn(name, dtype, description=text or None) for name, dtype, text in view.columns]
            )
            if view.place is not None:
                metadata["dagster/code_references"] = _reference(view.place)
            if node.kind == "offline":
                metadata["dagster/uri"] = view.table
            if node.kind == "online" and view.ttl:
                # After the ttl, every value has expired.
                freshness = dg.FreshnessPolicy.time_window(timedelta(seconds=max(view.ttl, 60.0)))
        if asset is None:
            version = None
            description = next(source.declared.place for source in node.outline.sources if source.name == node.name)
        else:
            part = view or model or node.snapshot or node.outline
            version, description = asset.version(part), asset.describe(part)
        return dg.AssetSpec(
            # Dagster's graph shows only the last part of a key. Views are grouped by kind, so it is the view's name;
            # model assets are grouped by model, so it is the kind.
            dg.AssetKey(node.id.split("/") if model is None else [model.name, node.kind]),
            group_name=_group(node),
            kinds=set() if asset is None else set(asset.library.split()),
            description=description,
            code_version=None if version is None else version[:12],
            metadata=metadata,
            owners=[owner] if owner else [],
            freshness_policy=freshness,
            automation_condition=condition(node),
        )


def _group(node: AssetNode) -> str:
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


def condition(node: AssetNode) -> dg.AutomationCondition[Any] | None:
    """Return the condition under which Dagster materializes a node without the user; None if it never does.

    The user materializes each node once by hand. From then on, most nodes follow their dependencies, if these pass
    their blocking checks. A snapshot is also rewritten on its own schedule. A training set is rebuilt only after drift
    or on the project's schedule. Recorded answers are collected every hour, and tables are maintained every night.
    Sources, the contract and builds by day have no condition.
    """
    of = dg.AutomationCondition
    ready = ~of.missing() & ~of.in_progress() & ~of.any_deps_in_progress() & of.all_deps_blocking_checks_passed()
    if node.kind in ASSETS and ASSETS[node.kind].follows:
        upstream = of.any_deps_updated()
        if node.kind == "deployment":
            # A deployed package reads new online rows directly, without a new deployment.
            upstream = upstream.ignore(dg.AssetSelection.kind("redis"))
        updated: dg.AutomationCondition[Any] = upstream
        if node.snapshot is not None and node.snapshot.cron is not None:
            # A snapshot expires even if its rows do not change.
            updated = updated | of.cron_tick_passed(node.snapshot.cron)
        return (updated.since_last_handled() & ready).with_label("new upstream data")
    if node.kind in _CRON:
        schedule, label = _CRON[node.kind]
        tick: dg.AutomationCondition[Any] = of.cron_tick_passed(schedule)
        return (tick.since_last_handled() & ~of.missing() & ~of.in_progress()).with_label(label)
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
