"""Nodes of a project's asset graph, and their Dagster specs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import dagster as dg

from isthmus.orchestration.graph.outline import ModelOutline, Outline, SnapshotOutline, ViewOutline
from isthmus.orchestration.graph.translator import AssetNode, IsthmusTranslator, Kind


class AssetGraph:
    """Nodes of a project in dependency order, and the asset spec of each.

    Attributes:
        specs: asset specs with dependencies, by node id.

    Raises:
        DagsterInvalidDefinitionError: two nodes have the same asset key, or nodes depend on each other in a cycle.
    """

    def __init__(self, outline: Outline, translator: IsthmusTranslator | None = None) -> None:
        self.outline = outline
        self.nodes = _nodes(outline)
        translator = translator or IsthmusTranslator()
        specs = {name: translator.get_asset_spec(node) for name, node in self.nodes.items()}
        keys = {node: spec.key for node, spec in specs.items()}
        counts = Counter(keys.values())
        if shared := ", ".join(node for node, key in keys.items() if counts[key] > 1):
            raise dg.DagsterInvalidDefinitionError(
                f"the translator gives several nodes the same key: {shared}. Give each a unique key"
            )
        self.specs = {
            node: spec.replace_attributes(deps=[*spec.deps, *(keys[dep.id] for dep in self.nodes[node].deps)])
            for node, spec in specs.items()
        }
        try:
            TopologicalSorter(
                {spec.key: {dep.asset_key for dep in spec.deps} for spec in self.specs.values()}
            ).prepare()
        except CycleError as error:
            circle = " <- ".join(key.to_user_string() for key in reversed(error.args[1]))
            raise dg.DagsterInvalidDefinitionError(
                f"the translator adds dependencies that form a cycle: {circle}. Remove one of them"
            ) from None

    def key(self, node: str) -> dg.AssetKey:
        return self.specs[node].key

    def of(self, *kinds: Kind) -> Sequence[str]:
        return [node.id for node in self.nodes.values() if node.kind in kinds]

    @cached_property
    def named(self) -> Mapping[dg.AssetKey, str]:
        return {spec.key: node for node, spec in self.specs.items()}


def _nodes(outline: Outline) -> Mapping[str, AssetNode]:
    nodes: dict[str, AssetNode] = {}

    def add(
        kind: Kind,
        name: str = "",
        deps: Iterable[str] = (),
        view: ViewOutline | None = None,
        model: ModelOutline | None = None,
        snapshot: SnapshotOutline | None = None,
    ) -> None:
        node = AssetNode(kind, name, outline, tuple(nodes[dep] for dep in deps), view, model, snapshot)
        nodes[node.id] = node

    add("contract")
    for source in outline.sources:
        add("source", source.name)
    for view in outline.views:
        raw = [f"source/{name}" for name in view.sources]
        if outline.days is not None:
            add("build", view.name, raw, view=view)
            raw = [*raw, f"build/{view.name}"]
        add("offline", view.name, raw, view=view)
        add("online", view.name, [f"offline/{view.name}"], view=view)
    for snapshot in outline.snapshots:
        add("snapshot", snapshot.name, [f"offline/{view}" for view in snapshot.views], snapshot=snapshot)
    if outline.records:
        add("recorded")  # no dependencies: servers record answers on their own
    for model in outline.models:
        name, examples = model.name, f"training_set/{model.name}"
        inputs = [*(f"offline/{view}" for view in model.views), *(f"source/{source}" for source in model.sources)]
        add("training_set", name, inputs, model=model)
        add("teacher", name, [examples], model=model)
        add("teacher_outputs", name, [f"teacher/{name}", examples], model=model)
        add("student", name, [f"teacher_outputs/{name}", examples], model=model)
        add("control", name, [examples], model=model)
        add("package", name, [f"student/{name}"], model=model)
        add("deployment", name, [f"package/{name}", *(f"online/{view}" for view in model.served)], model=model)
    return nodes
