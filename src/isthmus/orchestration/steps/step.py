"""Steps of a project: what each one makes or checks, and the events it reports, as plain data.

Each module `steps` declares steps, and `graph.steps` lists them. Building Dagster's graph imports these modules, so
they import heavy libraries only inside functions, and never Dagster.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from isthmus.features.document.blocks import Block, cell
from isthmus.features.document.markdown import to_markdown
from isthmus.features.progress import Progress
from isthmus.orchestration.steps.outline import ModelOutline, Outline, SnapshotOutline, ViewOutline

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project

Part = TypeVar("Part", Outline, ViewOutline, SnapshotOutline, ModelOutline)
Pool = Literal["engine", "train", "serve"]
Kind = Literal[
    "source", "contract", "build", "offline", "online", "training_set", "teacher", "teacher_outputs", "student",
    "control", "package", "deployment", "snapshot", "recorded", "events", "maintenance",
]  # fmt: skip

Share = tuple[str, int, int]
"""A share of the work of a step for a model: its name, the index of the share, and the number of shares."""
Metadata = dict[str, Any]
"""Names mapped to numbers, texts, or {"type": ..., "raw_value": ...} in the format of Dagster Pipes."""
REPORT = "report"  # the metadata entry that holds the complete report
FAILED = "failed"  # name of the Pipes message that carries a StepFailure
_HASH = re.compile("[0-9a-f]{64}")
_PLOT_CHARACTERS = 50_000  # limit for the images of one event: Dagster loads all with every list of events


class StepRequest(msgspec.Struct, frozen=True):
    """Request to run a step: ids of nodes to materialize, and (node id, check name) pairs to check.

    `days` has the first day and the day after the last; None without partitions. `everything` means all possible days.
    """

    step: str
    nodes: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    days: tuple[str, str] | None = None
    everything: bool = False
    share: Share | None = None


@dataclass(frozen=True)
class NodeMaterialization:
    node: str
    version: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCheck:
    """Result of a check. `message` says why it failed; a failed `blocking` check stops everything downstream."""

    node: str
    check: str
    passed: bool
    message: str = ""
    metadata: Metadata = field(default_factory=dict)
    blocking: bool = True


@dataclass(frozen=True)
class AssetNode:
    """A node of the asset graph.

    Attributes:
        name: name of the source, view, model or service; empty for the contract and for recorded answers.
        deps: nodes that this node depends on.
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
        """Return the text that names the node in step requests: "kind/name", or only the kind if the name is empty."""
        return f"{self.kind}/{self.name}" if self.name else self.kind


@dataclass(frozen=True)
class Asset(Generic[Part]):
    """Declares a kind of asset. The project has one such asset for each part of type `of`, for example for each view.

    Attributes:
        library: library that writes the asset; Dagster shows it as a badge. Several are separated by spaces.
        version: returns the code version of a part's asset; a new one makes the asset stale.
        deps: returns the ids of the nodes that a part's asset depends on. Nodes that the project lacks are left out.
        follows: the asset is materialized automatically after its dependencies.
    """

    kind: Kind
    of: type[Part]
    describe: Callable[[Part], str]
    library: str
    version: Callable[[Part], str | None] = lambda _part: None
    deps: Callable[[Part], Iterable[str]] = lambda _part: ()
    follows: bool = True


@dataclass(frozen=True)
class Work:
    """The nodes that a step handles in one go or, with `checks`, the one node to check and the checks to run."""

    project: "Project"
    request: StepRequest
    nodes: Sequence[str]
    checks: Sequence[str]
    progress: Progress
    began: float = field(default_factory=time.perf_counter)

    @property
    def names(self) -> list[str]:
        return [node.partition("/")[2] for node in self.nodes]

    @property
    def name(self) -> str:
        return self.names[0]

    def metadata(self, report: Mapping[str, Any], series: Sequence[str] = ()) -> Metadata:
        plain = msgspec.to_builtins(report, str_keys=True, enc_hook=str)
        figures = {name: plain[name] for name in series} | {"seconds": round(time.perf_counter() - self.began, 3)}
        single = {name: _text(name, value) for name, value in plain.items() if isinstance(value, int | float | str)}
        single = {name: text for name, text in single.items() if text != ""}
        return {**figures, **(single | figures), REPORT: {"raw_value": plain, "type": "json"}}


Results = Iterator[tuple[str, Metadata]]
"""For each node, its data version and metadata. For each check, why it failed (empty if it passed) and metadata."""


@dataclass(frozen=True)
class Step:
    """A step of a project. It materializes `assets`, or runs `checks` on nodes of the kinds `checked`.

    Attributes:
        pool: concurrency pool; it limits how many steps run at once.
        run: yields a result for each node or check of its work, in order.
        checks: check descriptions by name.
        op: name of the op; empty for the name of the step.
        select: returns whether the project has the asset of a node, or checks it.
        together: all nodes of a request are one work; by default each node is one.
        divisible: a subset of the nodes can be selected.
        without_days: name of the step that runs instead in a project without daily partitions.
        waits_for: kinds of other nodes that the checks read.
        applies: changed definitions are applied first, so that the step uses the ones that Dagster loaded.
        changes_status: the status of the project is written after an asset or a failed check.
        divides: name of the step that does shares of the work before, side by side, if `profiles.training.parallel`
            asks for it.
    """

    name: str
    pool: Pool
    run: Callable[[Work], Results]
    assets: tuple[Asset[Any], ...] = ()
    checked: tuple[Kind, ...] = ()
    checks: Mapping[str, str] = field(default_factory=dict)
    op: str = ""
    select: Callable[[AssetNode], bool] = lambda _node: True
    together: bool = False
    divisible: bool = True
    daily: bool = False
    without_days: str = ""
    waits_for: tuple[Kind, ...] = ()
    blocking: bool = True
    cron: str | None = None
    applies: bool = False
    changes_status: bool = False
    divides: str = ""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.checked or tuple(asset.kind for asset in self.assets)

    def events(
        self, project: "Project", request: StepRequest, progress: Progress
    ) -> Iterator[NodeMaterialization | NodeCheck]:
        """Run the step for the nodes and checks in `request`, and yield an event for each when it is done.

        Runs only while the caller iterates.
        """
        nodes = list(dict.fromkeys([*request.nodes, *(node for node, _ in request.checks)]))
        parts = [nodes] if self.together else [[node] for node in nodes]
        for n, part in enumerate(parts):
            checks = [check for node, check in request.checks if node in part]
            results = self.run(Work(project, request, part, checks, _share(progress, n, len(parts))))
            if self.checks:
                for check, (message, metadata) in zip(checks, results, strict=True):
                    yield NodeCheck(part[0], check, not message, message, metadata, self.blocking)
            else:
                for node, (version, metadata) in zip(part, results, strict=True):
                    yield NodeMaterialization(node, version, metadata)


def _share(progress: Progress, n: int, count: int) -> Progress:
    return lambda text, done: progress(text, (n + done) / count)


class StepFailure(msgspec.Struct, frozen=True):
    """Failure of a step. `passes` means that a retry may succeed."""

    sentence: str
    passes: bool = False


def _text(name: str, value: float | str) -> Any:
    """Convert a scalar to a form that Dagster does not plot: a timestamp, a path, a short hash, or text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and (name == "at" or name.endswith("_at")):
        return {"raw_value": value / 1e6, "type": "timestamp"}
    if isinstance(value, str) and Path(value).is_absolute():
        return {"raw_value": value, "type": "path"}
    return value[:12] if isinstance(value, str) and _HASH.fullmatch(value) else cell(value)


def display_metadata(event: NodeMaterialization | NodeCheck) -> Metadata:
    if isinstance(event, NodeMaterialization):
        rounded = {name: float(f"{v:.4g}") for name, v in event.metadata.items() if isinstance(v, float)}
        return event.metadata | rounded
    # Dagster ignores line breaks in text, and would plot a number of a check as a single point.
    message = {"found": "; ".join(event.message.splitlines())} if event.message else {}
    return message | {
        name: cell(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in event.metadata.items()
    }


def markdown(*blocks: Block) -> Metadata:
    return {"raw_value": to_markdown(blocks), "type": "md"}


def plots(images: Mapping[str, str]) -> Metadata:
    shown, left = [], _PLOT_CHARACTERS
    for name, address in images.items():
        left -= len(address)
        title = re.sub(r"([^\w\s.,]|_)", r"\\\1", name)
        shown += [f"**{title}**", f"![{title}]({address})" if left >= 0 else "is on the page"]
    return {"raw_value": "\n\n".join(shown), "type": "md"}
