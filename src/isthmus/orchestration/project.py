"""A project: a folder with isthmus.toml, definitions, and the state folder `.isthmus`."""

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from isthmus.distill.declaration import Distillation
from isthmus.distill.inputs import input_problems
from isthmus.features import clock
from isthmus.features.contract.diff import differences, summary
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.definition.checks import Declaration
from isthmus.features.definition.compile import compile_contract
from isthmus.features.definition.failure import explain_error
from isthmus.features.definition.spec import (
    AtRequest,
    Entity,
    FeatureProjection,
    FeatureService,
    FeatureView,
    RequestSource,
    RequestTransform,
    Source,
    Spine,
)
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    Problem,
    RequestError,
    did_you_mean,
    missing_extra,
    one_of,
)
from isthmus.features.files import UNPRINTED, is_url, locked, require_delta
from isthmus.orchestration.settings import FILE, ProjectSettings, find, load
from isthmus.package.signature import PASSWORD, Signer, read_public_key
from isthmus.serving.recorder.options import Recording
from isthmus.transforms.request.compute import compiled

if TYPE_CHECKING:
    from isthmus.features.offline.store import OfflineStore

_WITHOUT_SESSION = "code that needs no Spark session: udf(function, DoubleType()), not udf(function, 'double')"
_DECLARATIONS = (Entity, Source, FeatureView, RequestSource, RequestTransform, FeatureService, Spine)


@dataclass(frozen=True)
class Definitions:
    """Declarations of a definitions module by name, in the order of the module.

    `spines` and `services` include those that distillations use, and `transforms` includes request sources with
    expectations. `contract` covers all declarations except the distillations.
    """

    views: Mapping[str, FeatureView]
    spines: Mapping[str, Spine]
    services: Mapping[str, FeatureService]
    transforms: Mapping[str, AtRequest]
    distillations: Mapping[str, Distillation]
    contract: Contract


class Project:
    """A project in the folder `root`.

    Attributes:
        state: folder that the steps write to.
        offline: folder or URL of the Delta tables.
        storage_options: options of object storage, without credentials.
        snapshots: folder of the device snapshots; subfolders are named by service.
        latency_folder: folder in which servers report their latency.
        recorded: folder of recorded answers.
        spool: folder of recorded answers that are not collected yet.
        keys_file: file with the hashes of the API keys.
        fixed_now: fixed time of the project's clock in microseconds since 1970 UTC; None for the wall clock.

    Raises:
        ConfigurationError: isthmus.toml is missing or has errors.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        self.settings: ProjectSettings = load(self.root / FILE)
        self.name = self.settings.project.name
        address = self.settings.stores.offline
        if odd := UNPRINTED.search(str(self.root)):
            problem = Problem("path", f"{str(self.root)!r} contains {odd[0]!r}, and engines cannot read such paths")
            raise ConfigurationError("project", [problem], remedy="rename the folder")
        self.offline = require_delta(
            "stores.offline", address if is_url(address) else str(self.root / address),
            f"rename the folder; or set offline in [stores] of {FILE}, or ISTHMUS_STORES__OFFLINE, to another folder",
        )  # fmt: skip
        self.storage_options = dict(self.settings.stores.storage_options)
        self.state = self.root / ".isthmus"
        self.contract_file = self.state / "contract.json"
        self.deployment_file = self.state / "deployment.json"
        self.snapshots = self.state / "snapshots"
        self.latency_folder = self.state / "latency"
        self.recorded = self.state / "recorded"
        self.spool = self.recorded / "spool"
        self.keys_file = self.state / "keys.json"
        fixed = self.settings.project.now
        self.fixed_now = None if fixed is None else clock.micros(fixed)

    @classmethod
    def find(cls, start: Path) -> "Project":
        return cls(find(start))

    @cached_property
    def public_key(self) -> str | None:
        """PEM public key that exported and deployed packages must be signed with; None if no key is configured.

        Raises:
            ConfigurationError: the configured file is not a public key.
            DependencyError: the extra `signing` is not installed.
        """
        configured = self.settings.packages.public_key
        return None if configured is None else read_public_key(self.root / configured)

    @property
    def signer(self) -> Signer | None:
        """Signer that signs packages when they are exported; None if the project configures no signing key.

        Raises:
            ConfigurationError: the configured file is not a private key, or its password is not in the environment.
            DependencyError: the extra `signing` is not installed.
        """
        configured = self.settings.packages.signing_key
        return None if configured is None else Signer(self.root / configured, os.environ.get(PASSWORD))

    @property
    def cluster(self) -> bool:
        """True if the engine is a Spark Connect server, whose executors may be other machines."""
        return self.settings.engine.startswith("sc://")

    def now(self) -> int:
        return clock.now() if self.fixed_now is None else self.fixed_now

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Let functions of the definitions import modules from the project's folder during the block.

        Use it around code that runs transforms or tasks of the project. Changes `sys.path` and turns off the writing of
        bytecode for this process. After the block, both are restored, and modules of the project are removed from
        `sys.modules`, so that the next block imports them again.
        """
        sys.path.insert(0, str(self.root))
        before = set(sys.modules)
        dont_write = sys.dont_write_bytecode
        # Cached bytecode is matched by size and modification time in seconds, so it could hide a quick edit.
        sys.dont_write_bytecode = True
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.dont_write_bytecode = dont_write
            sys.path.remove(str(self.root))
            for name in set(sys.modules) - before:
                file = getattr(sys.modules.get(name), "__file__", None)
                if file and Path(file).is_relative_to(self.root) and "site-packages" not in file:
                    sys.modules.pop(name, None)

    @contextmanager
    def redis(self) -> Iterator[str]:
        """Yield the URL of the project's Redis during the block, for code that reads or writes online rows.

        An embedded Redis is started if it is not running. All processes of the project share it, and it stops when the
        last of them leaves its block. A configured Redis is neither started nor contacted.
        """
        configured = self.settings.stores.online
        if configured != "embedded":
            yield configured
            return
        from isthmus.features.redis.embedded import EmbeddedRedis

        with EmbeddedRedis(self.state / "redis") as server:
            yield server.url

    def offline_store(self) -> "OfflineStore":
        from isthmus.features.offline.store import OfflineStore

        return OfflineStore(self.offline, self.storage_options)

    def running_redis(self) -> str | None:
        """Return the URL of the project's Redis without starting it, for reports such as `isthmus status`.

        Return None if Redis is embedded and not running. The URL of a configured Redis is returned without contacting
        it.
        """
        configured = self.settings.stores.online
        if configured != "embedded":
            return configured
        folder = self.state / "redis"
        if not folder.is_dir():
            return None
        from isthmus.features.redis.embedded import EmbeddedRedis

        return EmbeddedRedis(folder).running()

    @cached_property
    def definitions(self) -> Definitions:
        """Declarations of the project's definitions module, imported and checked.

        The first access executes the module, and sets the environment variable SPARK_CONNECT_MODE_ENABLED. Later
        accesses return the same object, even if the files have changed.

        Raises:
            ConfigurationError: the module cannot be imported, or declarations have errors. All errors are listed.
            DependencyError: the module imports a library of an extra that is not installed.
        """
        with self._imported(self.settings.project.definitions) as module:
            return self._compiled(module)

    def runtimes(self, declared: Distillation) -> tuple[str, ...]:
        """Return the names of the runtimes that a package of a distillation is exported for.

        These are the runtimes of the distillation and those of `[packages]` in isthmus.toml.
        """
        return tuple(dict.fromkeys((*declared.runtimes, *self.settings.packages.runtimes)))

    def distillation(self, name: str | None = None) -> Distillation:
        """Return the declared distillation with this name. Without a name, return the project's only distillation.

        Raises:
            RequestError: the name is unknown, or it is omitted and the project does not have exactly one distillation.
        """
        known = self.definitions.distillations
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or name not in known:
            problem = "no name was given" if name is None else f"{name!r} is not declared{did_you_mean(name, known)}"
            if not known:
                remedy = f"declare a Distillation in {self.settings.project.definitions}.py"
                raise RequestError("distillation", "the definitions declare no distillation", remedy=remedy)
            raise RequestError("distillation", problem, expected=one_of(known))
        return known[name]

    def _compiled(self, module: ModuleType) -> Definitions:
        where, values = str(module.__file__), list(vars(module).values())
        distillations = [value for value in values if isinstance(value, Distillation)]
        declarations: list[Declaration] = [value for value in values if isinstance(value, _DECLARATIONS)]
        for distillation in distillations:
            declarations += [distillation.spine, distillation.teacher, distillation.student]
        reached = _reached(declarations)
        problems = [problem for distillation in distillations for problem in distillation.problems()]
        problems += _hidden(module)
        if not distillations and not any(isinstance(value, FeatureView) for value in reached):
            problems.append(Problem(Path(where).name, "declares no feature view and no distillation", "at least one"))
        contract = None
        try:
            contract = compile_contract(self.name, _unique(declarations), where, compiled)
            for distillation in distillations:
                problems += input_problems(distillation, distillations, contract)
                problems += distillation.preparation_problems(contract.inputs(distillation.student.name))
        except ConfigurationError as error:
            problems += error.problems
        if problems or contract is None:
            raise ConfigurationError(where, problems)
        return Definitions(
            views={value.name: value for value in reached if isinstance(value, FeatureView)},
            spines={value.name: value for value in declarations if isinstance(value, Spine)},
            services={value.name: value for value in declarations if isinstance(value, FeatureService)},
            transforms={
                value.name: value
                for value in reached
                if isinstance(value, RequestTransform) or (isinstance(value, RequestSource) and value.checked)
            },
            distillations={value.name: value for value in distillations},
            contract=contract,
        )

    def applied(self) -> Contract:
        """Return the applied contract (the schema of the stores), and check that the definitions still match it.

        Call it before a step that uses the definitions and the stores together.

        Raises:
            ContractMismatch: nothing was applied, the definitions have changed since, or the contract file is damaged.
            ConfigurationError: the definitions have errors.
        """
        contract, applied = self.definitions.contract, self.last_applied()
        if applied.hash != contract.hash:
            changes = summary(differences(applied, contract))
            raise ContractMismatch(
                f"project {self.name}", f"the definitions have changed since the last apply ({changes})",
                remedy="run `isthmus apply`",
            )  # fmt: skip
        return applied

    def last_applied(self) -> Contract:
        """Return the contract that `isthmus apply` wrote last, even if the definitions have changed since.

        Unlike `applied`, it does not import the definitions.

        Raises:
            ContractMismatch: nothing was applied, or the contract file is damaged.
        """
        contract = self.generations().newest()
        if contract is None:
            raise ContractMismatch(f"project {self.name}", "nothing has been applied", remedy="run `isthmus apply`")
        return contract

    def generations(self) -> Generations:
        """Read the contracts that the project's stores and servers may use: the current, the next and previous ones.

        The next contract is one that was applied, but whose rows are still being built and written to the online store.

        Raises:
            ContractMismatch: a file is damaged.
        """
        return Generations.read(self.contract_file)

    def locked(self, name: str, *, shared: bool = False, wait: bool = True) -> AbstractContextManager[None]:
        """Hold the file lock `name` in the state folder during the block, to keep other processes of the project out.

        The block waits for the lock, unless `wait` is False. Several processes can hold the lock at once if all of them
        pass `shared`. Examples are `contract` to change contracts, `retirement` to remove old contracts, `keys` to
        change API keys, and `recorded` to collect answers. Deployments share `retirement`, so that their contract
        stays.

        Raises:
            BlockingIOError: another process holds the lock and `wait` is False.
        """
        return locked(self.state / f"{name}.lock", shared=shared, wait=wait)

    @contextmanager
    def building(self, tables: Iterable[str]) -> Iterator[None]:
        """Keep other processes from adding pushed rows to these offline tables during the block.

        Use it while the tables are built. `tables` has their names. Waits for processes that are adding rows to them.
        Builds do not block each other.
        """
        with ExitStack() as stack:
            for table in sorted(tables):
                stack.enter_context(self.locked(_lock_of(table), shared=True))
            yield

    def adding_to(self, table: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """Return a context manager that locks the offline table with the name `table`, to add pushed rows to it.

        During the block, no other process adds rows to the table or builds it. Entering the block waits for such
        processes. If `wait` is False, it raises a BlockingIOError instead.
        """
        return self.locked(_lock_of(table), wait=wait)

    def freshness_objectives(self) -> dict[str, float]:
        """Return the maximum age of the newest row of a view, in seconds by view name, from the server settings.

        Servers publish it as a metric, to alert about old rows. Raise ConfigurationError if a name is not a view of the
        current or the next contract. Without a readable contract, the names are not checked.
        """
        with suppress(ContractMismatch):
            generations = self.generations()
            contracts = [contract for contract in (generations.current, generations.next) if contract]
            if contracts:
                self.require_objectives_of({name for contract in contracts for name in contract.views})
        hours = self.settings.server.freshness_objective_hours
        return {name: 3600 * value for name, value in hours.items()}

    def require_objectives_of(self, views: Collection[str]) -> None:
        """Raise a ConfigurationError if the server settings have a freshness objective for a view not in `views`.

        Called when definitions are applied. A freshness objective is the age that the newest row of a view may reach.
        """
        expected = one_of(views)
        if problems := [
            Problem(f"server.freshness_objective_hours.{name}", "is not a view", expected)
            for name in self.settings.server.freshness_objective_hours
            if name not in views
        ]:
            raise ConfigurationError(str(self.root / FILE), problems)

    def recording(self) -> Recording | None:
        """Return the settings with which servers record their answers, or None if servers do not record.

        Raise ConfigurationError if a private view in the settings is not in the current or the next contract. Without a
        readable contract, the names are not checked.
        """
        record = self.settings.server.record
        with suppress(ContractMismatch):
            generations = self.generations()
            contracts = [contract for contract in (generations.current, generations.next) if contract]
            known = {name for contract in contracts for name in contract.views}
            if record is not None and contracts and (unknown := [name for name in record.private if name not in known]):
                place = "server.record.private"
                problems = [Problem(place, f"{name!r} is not a view", one_of(known)) for name in unknown]
                raise ConfigurationError(str(self.root / FILE), problems)
        return record

    @contextmanager
    def _imported(self, name: str) -> Iterator[ModuleType]:
        file = self.root.joinpath(*name.split(".")).with_suffix(".py")
        where = str(file)
        if not file.is_file():
            raise ConfigurationError(where, [Problem("definitions", "the file does not exist", "a Python module")])
        with self.importing():
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None  # noqa: S101 - it is a .py file that exists
            assert spec.loader is not None  # noqa: S101 - likewise
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and code digests look up classes in sys.modules.
            hidden = sys.modules.get(name)
            sys.modules[name] = module
            # With this, a udf declared before the session starts also works with Spark Connect.
            os.environ.setdefault("SPARK_CONNECT_MODE_ENABLED", "1")
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as error:  # the user's own code may raise anything
                if missing := missing_extra(error):
                    raise missing from error
                place = _place(error, self.root, file)
                found, expected = explain_error(error)
                if "SESSION" in found and "PySpark" in found:
                    expected = _WITHOUT_SESSION
                problem = Problem(place, found, expected)
                if isinstance(error, ConfigurationError):
                    known = error.problems[0]
                    problem = Problem(place, f"{known.where} {known.found}", known.expected, known.remedy)
                raise ConfigurationError(where, [problem], remedy=problem.remedy or "fix that line") from error
            else:
                yield module
            finally:
                sys.modules.pop(name, None)  # a block of `importing` in another thread may have removed it
                if hidden is not None:
                    sys.modules[name] = hidden


def _lock_of(table: str) -> str:
    return f"table.{table}"


def _place(error: BaseException, folder: Path, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        place, line = Path(error.filename), error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).is_relative_to(folder) and "site-packages" not in f.filename]
        if not own:
            return file.name
        place, line = Path(own[-1].filename), own[-1].lineno or 0
    return f"line {line}" if place == file else f"{place.name}, line {line}"


def _hidden(module: ModuleType) -> list[Problem]:
    file = Path(str(module.__file__))
    problems = []
    first: dict[str, int] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and isinstance(getattr(module, node.name, None), FeatureView | Spine):
            line = first.setdefault(node.name, node.lineno)
            if line != node.lineno:
                problems.append(Problem(f"line {node.lineno}: {node.name!r}",
                                        f"is already declared in line {line}", "unique names"))  # fmt: skip
    return problems


def _unique(declarations: list[Declaration]) -> list[Declaration]:
    return list({id(declaration): declaration for declaration in declarations}.values())


def _reached(declarations: list[Declaration]) -> list[Declaration]:
    reached: list[Declaration] = list(declarations)
    for declaration in reached:
        match declaration:
            case FeatureService(features=parts) | RequestTransform(inputs=parts) if isinstance(parts, Sequence):
                reached += [part.view if isinstance(part, FeatureProjection) else part for part in parts]
            case Spine(request=RequestSource() as request):
                reached.append(request)
    return _unique(reached)
