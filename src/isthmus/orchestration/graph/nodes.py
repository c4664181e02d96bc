"""The nodes of a project's graph, and how they stand in Dagster."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import dagster as dg

from isthmus.orchestration.graph.outline import Outline
from isthmus.orchestration.graph.translator import IsthmusTranslator, Kind, Node


class Graph:
    """What an outline is made of, each node after those that it is made of.

    Args:
        outline: of the project.
        translator: makes specs of nodes; by default as Isthmus has them.

    Raises:
        DagsterInvalidDefinitionError: two nodes were given one key, or nodes depend on themselves.
    """

    def __init__(self, outline: Outline, translator: IsthmusTranslator | None = None) -> None:
        self.outline = outline
        nodes: dict[str, Node] = {}

        def add(kind: Kind, name: str = "", deps: Iterable[str] = (), **of: object) -> None:
            node = Node(kind, name, outline, tuple(nodes[one] for one in deps), **of)  # type: ignore[arg-type]
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
        for model in outline.models:
            name, examples = model.name, f"training_set/{model.name}"
            made_of = [*(f"offline/{view}" for view in model.views), *(f"source/{one}" for one in model.sources)]
            add("training_set", name, made_of, model=model)
            add("teacher", name, [examples], model=model)
            add("teacher_outputs", name, [f"teacher/{name}", examples], model=model)
            add("student", name, [f"teacher_outputs/{name}", examples], model=model)
            add("control", name, [examples], model=model)
            add("package", name, [f"student/{name}"], model=model)
            add("deployment", name, [f"package/{name}", *(f"online/{view}" for view in model.served)], model=model)
        self.nodes: Mapping[str, Node] = nodes
        translator = translator or IsthmusTranslator()
        specs = {node: translator.get_asset_spec(node_) for node, node_ in nodes.items()}
        keys = {node: spec.key for node, spec in specs.items()}
        if doubled := {key for key in keys.values() if sum(key == other for other in keys.values()) > 1}:
            shared = ", ".join(node for node, key in keys.items() if key in doubled)
            raise dg.DagsterInvalidDefinitionError(
                f"the translator gives one key to several nodes: {shared}. Give each its own"
            )
        self._specs = {
            node: spec.replace_attributes(deps=[*spec.deps, *(keys[dep.id] for dep in nodes[node].deps)])
            for node, spec in specs.items()
        }
        try:
            TopologicalSorter(
                {spec.key: {dep.asset_key for dep in spec.deps} for spec in self._specs.values()}
            ).prepare()
        except CycleError as error:
            circle = " <- ".join(key.to_user_string() for key in reversed(error.args[1]))
            raise dg.DagsterInvalidDefinitionError(
                f"the translator makes assets depend on themselves: {circle}. Take one of these dependencies away"
            ) from None

    def spec(self, node: str) -> dg.AssetSpec:
        """The spec of a node."""
        return self._specs[node]

    def key(self, node: str) -> dg.AssetKey:
        """The key of a node."""
        return self._specs[node].key

    def of(self, *kinds: Kind) -> Sequence[str]:
        """The nodes of some kinds."""
        return [node.id for node in self.nodes.values() if node.kind in kinds]

    @cached_property
    def named(self) -> Mapping[dg.AssetKey, str]:
        """The nodes by their keys."""
        return {spec.key: node for node, spec in self._specs.items()}
