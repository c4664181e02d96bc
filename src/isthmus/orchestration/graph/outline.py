"""Compile a project's outline, the data behind its Dagster graph. Run with `python -m` and a folder to print it."""

import ast
import copy
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.features.errors import ConfigurationError, IsthmusError, Problem
from isthmus.features.files import write_atomically
from isthmus.orchestration.settings import PROCESS_VARIABLES
from isthmus.orchestration.steps.outline import (
    FORMAT,
    CodeLocation,
    ModelOutline,
    Outline,
    SnapshotOutline,
    SourceOutline,
    ViewOutline,
)

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.features.contract.schema import Contract
    from isthmus.features.definition.spec import Snapshot as DeviceSnapshot
    from isthmus.orchestration.project import Project

FILE = "outline.json"


def outline(root: Path) -> Outline:
    """Return the outline of the project in the folder `root`: the plain data from which its Dagster graph is built.

    Dagster's processes call it instead of importing the definitions. `root` must be absolute. The outline is cached in
    `.isthmus/outline.json`. It is compiled again, in another process, if isthmus.toml, Python files or `ISTHMUS_`
    variables have changed. Raise an IsthmusError if it cannot be compiled.
    """
    file, inputs = root / ".isthmus" / FILE, digest(root)
    try:
        cached = msgspec.json.decode(file.read_bytes(), type=Outline)
    except (OSError, msgspec.MsgspecError):
        cached = None
    if cached is not None and (cached.made_of, cached.format, cached.root) == (inputs, FORMAT, str(root)):
        return cached
    # -P keeps files in the working folder from shadowing modules.
    command = [sys.executable, "-P", "-m", __spec__.name, str(root)]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - this interpreter and this module
    if done.returncode:
        raise _error(root, done)
    result = msgspec.json.decode(done.stdout, type=Outline)
    write_atomically(file, done.stdout)
    return result


def digest(root: Path) -> str:
    sha = hashlib.sha256()
    for file in [root / "isthmus.toml", *_files(root)]:
        sha.update(f"{file.relative_to(root)}\n".encode())
        sha.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    # Variables that our processes set for each other are left out, so that `isthmus dev` and Dagster share an outline.
    overriding = sorted(
        item for item in os.environ.items() if item[0].startswith("ISTHMUS_") and item[0] not in PROCESS_VARIABLES
    )
    sha.update(repr(overriding).encode())
    return sha.hexdigest()


def _files(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        # Skip environments, caches and the state folder.
        inner[:] = sorted(
            name for name in inner if not name.startswith((".", "__")) and name not in ("node_modules", "site-packages")
        )
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _error(root: Path, done: "subprocess.CompletedProcess[bytes]") -> IsthmusError:
    try:
        error = msgspec.json.decode(done.stdout, type=dict[str, Any])
        problems = [Problem(**problem) for problem in error.get("problems", ())]
        if problems:
            return ConfigurationError(error["where"], problems, remedy=error["remedy"])
        return IsthmusError(error["where"], error["found"], expected=error["expected"], remedy=error["remedy"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return IsthmusError(str(root), f"the definitions cannot be compiled ({last[-1] if last else done.returncode})")


def compile_outline(project: "Project") -> Outline:
    from isthmus.features.days import day_name, day_of

    definitions, settings = project.definitions, project.settings
    contract, store = definitions.contract, project.offline_store()
    sources = {source.name: source for view in definitions.views.values() for source in view.sources}
    sources |= {source.name: source for spine in definitions.spines.values() for source in spine.sources}
    views = []
    for name, view in definitions.views.items():
        descriptions = {key: entity.description for entity in view.entities for key in entity.join_keys}
        descriptions |= {field.name: field.description for field in view.schema}
        columns = (*contract.views[name].keys, *contract.views[name].fields)
        views.append(
            ViewOutline(
                name, view.description, view.owner, contract.views[name].hash,
                tuple((column.name, column.dtype.name, descriptions.get(column.name, "")) for column in columns),
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
        tuple(
            SourceOutline(*(getattr(source, name) for name in SourceOutline.__struct_fields__))
            for source in sources.values()
        ),
        tuple(views),
        tuple(_model(project, declared) for declared in definitions.distillations.values()),
        tuple(
            _snapshot(contract, service.name, service.device, moves=now is None)
            for service in definitions.services.values()
            if service.device is not None
        ),
        None if first is None else (first.isoformat(), None if now is None else day_name(day_of(now) + 1)),
        settings.orchestration.automation,
        settings.orchestration.retrain,
        digest(project.root),
        project.storage_options,
        settings.server.record is not None,
        tuple(sorted({source.name for view in definitions.views.values() for source in view.streams})),
        settings.profiles.training.parallel,
    )


def _snapshot(contract: "Contract", service: str, device: "DeviceSnapshot", *, moves: bool) -> SnapshotOutline:
    views = tuple(dict.fromkeys(view for view, _ in contract.stored_features(service)))
    code = _hash([contract.service(service).hash, repr(device)])
    return SnapshotOutline(service, views, _cron(device.every.total_seconds()) if moves else None, code)


def _cron(seconds: float) -> str:
    """Return an evenly spaced cron schedule that fires at least every `seconds`, or every minute if that is less."""
    minutes, hours = max(int(seconds // 60), 1), min(int(seconds // 3600), 24)
    if hours:
        step = next(step for step in (24, 12, 8, 6, 4, 3, 2, 1) if step <= hours)
        return f"0 {'0' if step == 24 else f'*/{step}'} * * *"
    return f"*/{next(step for step in (30, 20, 15, 12, 10, 6, 5, 4, 3, 2, 1) if step <= minutes)} * * * *"


def _model(project: "Project", declared: "Distillation") -> ModelOutline:
    from isthmus.distill.gates import STAGES, bounded, bounds_on

    contract, profiles = project.definitions.contract, project.settings.profiles
    read = {
        role: tuple(dict.fromkeys(view for view, _ in contract.stored_features(service.name)))
        for role, service in (("teacher", declared.teacher), ("student", declared.student))
    }
    learning = [declared.settings, declared.split, declared.split_by, declared.seeds, declared.seed]
    # Each version includes the upstream versions, so that a change marks everything downstream as stale at once.
    training = [
        contract.hash,
        repr(declared.task),
        repr(learning),
        repr(dict(declared.shape)),
        profiles.training.identity(),
    ]
    functions = getattr(declared.task, "functions", ())  # a Causal task names its functions
    named = [declared.task] if isinstance(declared.task, str) else functions
    trees = [tree for name in named for tree in _modules(project.root, name.partition(":")[0])]
    teaching = [*training, *(_without_judging(trees) if isinstance(declared.task, str) else map(ast.dump, trees))]
    training += map(ast.dump, trees)
    return ModelOutline(
        declared.name,
        declared.description,
        declared.owner,
        tuple(dict.fromkeys([*read["teacher"], *read["student"]])),
        tuple(source.name for source in declared.spine.sources),
        read["student"],
        # The training set depends on the complete contract.
        contract.hash,
        _hash(teaching),
        _hash(training),
        _hash([training, list(project.runtimes(declared)), profiles.serving.identity(), *_owner(declared)]),
        bool(bounds_on(declared.bounds, *STAGES)),
        project.settings.server.record is not None and bool(bounded(declared.label)),
    )


def _owner(declared: "Distillation") -> list[str]:
    device = declared.student.device
    return [device.owner] if device is not None and device.owner is not None else []


def _without_judging(trees: Iterable[ast.AST]) -> list[str]:
    """Return dumps of the trees without class members that only judge a student.

    Keep members that other code mentions.
    """
    from isthmus.distill.declaration import JUDGING

    left_out, dumps = set(JUDGING), list[str]()
    while True:
        text = "".join(dumps := [ast.dump(_Without(left_out).visit(copy.deepcopy(tree))) for tree in trees])
        if not (mentioned := {name for name in left_out if f"'{name}'" in text}):
            return dumps
        left_out -= mentioned


class _Without(ast.NodeTransformer):
    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        def defines(part: ast.stmt) -> str | None:
            target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
            return target.id if isinstance(target, ast.Name) else getattr(part, "name", None)

        node.body = [part for part in node.body if defines(part) not in self.names]
        self.generic_visit(node)
        return node


def _modules(root: Path, name: str, seen: set[Path] | None = None) -> list[ast.AST]:
    """Return the syntax trees of a project module and the project modules that it imports. Trees ignore formatting."""
    seen = set() if seen is None else seen
    file = root.joinpath(*name.split(".")).with_suffix(".py")
    if file in seen or not file.is_file():
        return []
    seen.add(file)
    tree = ast.parse(file.read_bytes())
    trees: list[ast.AST] = [tree]
    for node in ast.walk(tree):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for imported in named:
            trees += _modules(root, imported, seen)
    return trees


def _place(function: Callable[..., Any] | None) -> CodeLocation | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return None if code is None else CodeLocation(code.co_filename, code.co_firstlineno)


def _hash(data: Iterable[Any]) -> str:
    return hashlib.sha256(repr(list(data)).encode()).hexdigest()


def _main(folder: str) -> int:
    from isthmus.orchestration.project import Project

    code = 0
    try:
        content = msgspec.json.encode(compile_outline(Project(Path(folder))))
    except IsthmusError as error:
        content, code = msgspec.json.encode(error.as_dict()), error.exit_code
    sys.stdout.buffer.write(content)
    return code


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
