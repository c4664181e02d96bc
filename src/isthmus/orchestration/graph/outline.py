"""What Dagster shows of a project, as plain data: its graph is built without feast, pyspark and torch.

`python -m isthmus.orchestration.graph.outline FOLDER` compiles the definitions and writes it to stdout. It is kept in
the project's state, with a digest of everything it was made of: as long as that is the same nothing is compiled again.
"""

import ast
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.features.errors import ConfigurationError, IsthmusError, Problem
from isthmus.features.files import write_atomically
from isthmus.orchestration.settings import OTHERS

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.orchestration.project import Project

FORMAT = 1
FILE = "outline.json"


class Place(msgspec.Struct, frozen=True):
    """Where something is declared: a file and a line of it."""

    file: str
    line: int


class Source(msgspec.Struct, frozen=True):
    """Raw data: its name, and the path as it is declared."""

    name: str
    path: str


class View(msgspec.Struct, frozen=True):
    """A feature view.

    Attributes:
        name: of it.
        description: for people.
        code: hash of its contract.
        columns: name, type and description of its keys and features.
        table: folder or URL of its offline table.
        sources: names of what it reads.
        ttl: seconds that a value holds; None for ever.
        place: of its function.
    """

    name: str
    description: str
    code: str
    columns: tuple[tuple[str, str, str], ...]
    table: str
    sources: tuple[str, ...]
    ttl: float | None
    place: Place | None


class Model(msgspec.Struct, frozen=True):
    """A distillation.

    Attributes:
        name: of it.
        description: for people.
        views: names of those that teacher or student read.
        sources: names of what its spine reads.
        served: names of the views that its student reads.
        examples: code version of its training set.
        training: code version of what learns from that.
        export: code version of its package and its deployment.
    """

    name: str
    description: str
    views: tuple[str, ...]
    sources: tuple[str, ...]
    served: tuple[str, ...]
    examples: str
    training: str
    export: str


class Outline(msgspec.Struct, frozen=True):
    """A project.

    Attributes:
        project: its name.
        root: its folder.
        contract: hash of the contract.
        sources: all of them.
        views: in the order in which they are declared.
        models: its distillations.
        days: the first day of the daily partitions of builds, and the day after the last one, where the clock of the
            project stands; None for builds of whole tables only.
        automation: whether what depends on new data is made again by itself.
        retrain: when models are trained again, as cron; None for when their features have drifted only.
        made_of: digest of what it was compiled from.
        format: of this.
    """

    project: str
    root: str
    contract: str
    sources: tuple[Source, ...]
    views: tuple[View, ...]
    models: tuple[Model, ...]
    days: tuple[str, str | None] | None
    automation: bool
    retrain: str | None
    made_of: str
    format: int = FORMAT


def outline(root: Path) -> Outline:
    """The outline of a project as it is now: what was kept of it, or, compiled in a process of its own, a new one.

    Raises:
        ConfigurationError: the definitions are wrong.
        IsthmusError: what else the compilation says.
    """
    file, made_of = root / ".isthmus" / FILE, digest(root)
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Outline)
    except (OSError, msgspec.MsgspecError):
        kept = None
    if kept is not None and (kept.made_of, kept.format, kept.root) == (made_of, FORMAT, str(root)):
        return kept
    # -P: nothing in the working folder stands for a module of ours.
    command = [sys.executable, "-P", "-m", __spec__.name, str(root)]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - this interpreter and this module
    if done.returncode:
        raise _told(root, done)
    found = msgspec.json.decode(done.stdout, type=Outline)
    write_atomically(file, done.stdout)
    return found


def digest(root: Path) -> str:
    """Of the settings, of every Python file in a project's folder, and of the variables that override settings."""
    sha = hashlib.sha256()
    for file in [root / "isthmus.toml", *_files(root)]:
        sha.update(f"{file.relative_to(root)}\n".encode())
        sha.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    # Not what one process of ours sets for another: `isthmus dev` and the Dagster that it starts keep one outline.
    overriding = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith("ISTHMUS_") and name not in OTHERS
    )
    sha.update(repr(overriding).encode())
    return sha.hexdigest()


def _files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        # Environments, caches and our own state are nothing that the definitions import.
        inner[:] = sorted(
            name for name in inner if not name.startswith((".", "__")) and name not in ("node_modules", "site-packages")
        )
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _told(root: Path, done: "subprocess.CompletedProcess[bytes]") -> IsthmusError:
    try:
        said = msgspec.json.decode(done.stdout, type=dict[str, Any])
        problems = [Problem(one["where"], one["found"], one["expected"]) for one in said.get("problems", ())]
        if problems:
            return ConfigurationError(said["where"], problems, remedy=said["remedy"])
        return IsthmusError(said["where"], said["found"], expected=said["expected"], remedy=said["remedy"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return IsthmusError(str(root), f"its definitions cannot be compiled ({last[-1] if last else done.returncode})")


def compiled(project: "Project") -> Outline:
    """The outline of a project, of its definitions."""
    from isthmus.features.offline.store import OfflineStore

    definitions, settings = project.definitions, project.settings
    contract, store = definitions.contract, OfflineStore(project.offline)
    sources = {source.name: source for view in definitions.views.values() for source in view.sources}
    sources |= {source.name: source for spine in definitions.spines.values() for source in spine.sources}
    views = []
    for name, view in definitions.views.items():
        told = {field.name: field.description for field in view.schema}
        columns = (*contract.views[name].keys, *contract.views[name].fields)
        views.append(
            View(
                name, view.description, contract.views[name].hash,
                tuple((one.name, one.dtype.name, told.get(one.name, "")) for one in columns),
                store.path(contract.views[name].table), tuple(source.name for source in view.sources),
                None if view.ttl is None else view.ttl.total_seconds(), _place(view.function),
            )
        )  # fmt: skip
    now = project.fixed_now
    first = settings.orchestration.days_from
    return Outline(
        project.name,
        str(project.root),
        contract.hash,
        tuple(Source(source.name, source.path) for source in sources.values()),
        tuple(views),
        tuple(_model(project, one) for one in definitions.distillations.values()),
        None if first is None else (first.isoformat(), None if now is None else _day_after(now)),
        settings.orchestration.automation,
        settings.orchestration.retrain,
        digest(project.root),
    )


def _model(project: "Project", declared: "Distillation") -> Model:
    contract, profiles = project.definitions.contract, project.settings.profiles
    read = {
        role: tuple(dict.fromkeys(view for view, _ in contract.read(service.name)))
        for role, service in (("teacher", declared.teacher), ("student", declared.student))
    }
    learning = [declared.settings, declared.split, declared.split_by, declared.seeds, declared.seed]
    # Each version has those below it in it: whoever depends on what has changed is stale at once, not run by run.
    training = [
        contract.hash,
        repr(declared.task),
        repr(learning),
        repr(dict(declared.shape)),
        profiles.training.identity(),
    ]
    if isinstance(declared.task, str):
        training += _modules(project.root, declared.task.partition(":")[0])
    return Model(
        declared.name,
        declared.description,
        tuple(dict.fromkeys([*read["teacher"], *read["student"]])),
        tuple(source.name for source in declared.spine.sources),
        read["student"],
        # A training set belongs to a contract as a whole.
        contract.hash,
        _hash(training),
        _hash([training, list(declared.runtimes), profiles.serving.identity()]),
    )


def _modules(root: Path, name: str, seen: set[Path] | None = None) -> list[str]:
    """Syntax trees of a module in the project's folder and of those there that it imports: formatting is nothing."""
    seen = set() if seen is None else seen
    file = root.joinpath(*name.split(".")).with_suffix(".py")
    if file in seen or not file.is_file():
        return []
    seen.add(file)
    tree = ast.parse(file.read_bytes())
    found = [ast.dump(tree)]
    for node in ast.walk(tree):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for imported in named:
            found += _modules(root, imported, seen)
    return found


def _place(function: Callable[..., Any] | None) -> Place | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return None if code is None else Place(code.co_filename, code.co_firstlineno)


def _day_after(now: int) -> str:
    from isthmus.features.days import day_name, day_of

    return day_name(day_of(now) + 1)


def _hash(data: Iterable[Any]) -> str:
    return hashlib.sha256(repr(list(data)).encode()).hexdigest()


def _main(folder: str) -> Iterator[bytes]:
    from isthmus.orchestration.project import Project

    try:
        yield msgspec.json.encode(compiled(Project(Path(folder))))
    except IsthmusError as error:
        yield msgspec.json.encode(error.as_dict())
        sys.exit(error.exit_code)


if __name__ == "__main__":
    for part in _main(*sys.argv[1:]):
        sys.stdout.buffer.write(part)
