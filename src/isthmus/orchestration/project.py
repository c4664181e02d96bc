"""A project: a folder with isthmus.toml, its definitions, and the state the steps leave in `.isthmus`."""

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from isthmus.distill.declaration import Distillation
from isthmus.features import clock
from isthmus.features.contract.contract import Contract, one_of
from isthmus.features.contract.diff import differences, named
from isthmus.features.definition.checks import Declaration
from isthmus.features.definition.compile import compile_contract
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
from isthmus.features.errors import ConfigurationError, ContractMismatch, Problem, RequestError
from isthmus.features.package.signature import PASSWORD, Signer, read_public_key
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import INPUTS
from isthmus.orchestration.settings import FILE, ProjectSettings, find, load
from isthmus.transforms.request.compute import compiled

STATE = ".isthmus"
_WITHOUT_SESSION = "what PySpark makes without a session: udf(function, DoubleType()), not udf(function, 'double')"
_DECLARATIONS = (Entity, Source, FeatureView, RequestSource, RequestTransform, FeatureService, Spine)


@dataclass(frozen=True)
class Definitions:
    """What a definitions module declares.

    Attributes:
        views: by name, in the order in which they stand in the module.
        spines: by name.
        entities: by name, those that views and spines refer to included.
        transforms: request transforms by name, and request sources that are checked.
        distillations: by name.
        contract: all of it but the distillations, compiled.
    """

    views: Mapping[str, FeatureView]
    spines: Mapping[str, Spine]
    services: Mapping[str, FeatureService]
    transforms: Mapping[str, AtRequest]
    distillations: Mapping[str, Distillation]
    contract: Contract


class Project:
    """A folder with an isthmus.toml.

    Args:
        root: the folder.

    Raises:
        ConfigurationError: isthmus.toml is missing or wrong.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.settings: ProjectSettings = load(self.root / FILE)

    @classmethod
    def find(cls, start: Path) -> "Project":
        """The project of the nearest isthmus.toml, from `start` upwards."""
        return cls(find(start))

    @property
    def name(self) -> str:
        """The project's name."""
        return self.settings.project.name

    @property
    def state(self) -> Path:
        """The folder that holds what the steps write."""
        return self.root / STATE

    @property
    def offline(self) -> str:
        """Folder or URL of the Delta tables."""
        place = self.settings.stores.offline
        return place if "://" in place else str(self.root / place)

    @property
    def contract_file(self) -> Path:
        """The applied contract."""
        return self.state / "contract.json"

    @property
    def deployment_file(self) -> Path:
        """What is deployed."""
        return self.state / "deployment.json"

    @property
    def latency_folder(self) -> Path:
        """Where servers say how fast they answer."""
        return self.state / "latency"

    @property
    def keys_file(self) -> Path:
        """The API keys, as hashes."""
        return self.state / "keys.json"

    @cached_property
    def public_key(self) -> str | None:
        """Whose owner must have signed every package, as PEM; None if nobody must.

        Raises:
            ConfigurationError: what is configured is no public key.
            DependencyError: the extra `signing` is not installed.
        """
        configured = self.settings.packages.public_key
        return None if configured is None else read_public_key(self.root / configured)

    @property
    def signer(self) -> Signer | None:
        """What signs packages; None if nothing is configured.

        Raises:
            ConfigurationError: what is configured is no private key, or its password is not in the environment.
            DependencyError: the extra `signing` is not installed.
        """
        configured = self.settings.packages.signing_key
        return None if configured is None else Signer(self.root / configured, os.environ.get(PASSWORD))

    @property
    def fixed_now(self) -> int | None:
        """Where the project's clock stands, in microseconds, or None for the clock on the wall."""
        fixed = self.settings.project.now
        return None if fixed is None else clock.micros(fixed)

    def now(self) -> int:
        """The project's present, in microseconds since 1970 UTC."""
        return clock.now() if self.fixed_now is None else self.fixed_now

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Functions of the definitions that are called inside may import modules that lie beside them."""
        with _first_on_path(self.root):
            yield

    @contextmanager
    def redis(self) -> Iterator[str]:
        """The URL of the project's Redis; an embedded one runs at least as long as the block."""
        configured = self.settings.stores.online
        if configured != "embedded":
            yield configured
            return
        with EmbeddedRedis(self.state / "redis") as server:
            yield server.url

    @cached_property
    def definitions(self) -> Definitions:
        """The declarations, checked together.

        Raises:
            ConfigurationError: the module cannot be imported, or what it declares is wrong; every problem is named.
        """
        with self._imported(self.settings.project.definitions) as module:
            return self._compiled(module)

    def distillation(self, name: str | None = None) -> Distillation:
        """The distillation of this name, or the only one.

        Raises:
            RequestError: there is none, or there are several and none is named.
        """
        known = self.definitions.distillations
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or name not in known:
            found = "none is named" if name is None else f"{name!r} is not declared"
            if not known:
                raise RequestError("distillation", f"{found}, and the definitions declare none",
                                   remedy="declare one; `isthmus training-set --spine` needs none")  # fmt: skip
            raise RequestError("distillation", found, expected=one_of(known))
        return known[name]

    def _compiled(self, module: ModuleType) -> Definitions:
        found = [value for value in vars(module).values() if isinstance(value, (*_DECLARATIONS, Distillation))]
        distillations = [value for value in found if isinstance(value, Distillation)]
        declarations: list[Declaration] = [value for value in found if isinstance(value, _DECLARATIONS)]
        for distillation in distillations:
            declarations += [distillation.spine, distillation.teacher, distillation.student]
        where = str(module.__file__)
        problems = [problem for distillation in distillations for problem in distillation.problems()]
        problems += _hidden(module)
        if not any(isinstance(value, FeatureView) for value in _reached(declarations)):
            problems.append(Problem(Path(where).name, "declares no feature view", "at least one"))
        contract = None
        try:
            contract = compile_contract(self.name, _each_once(declarations), where, compiled)
            problems += _unreadable(distillations, contract)
            problems += _beyond_the_device(distillations, contract)
            problems += [p for one in distillations for p in one.misfits(contract.inputs(one.student.name))]
        except ConfigurationError as error:
            problems += error.problems
        if problems or contract is None:
            raise ConfigurationError(where, problems)
        return Definitions(
            views={value.name: value for value in _reached(declarations) if isinstance(value, FeatureView)},
            spines={value.name: value for value in declarations if isinstance(value, Spine)},
            services={value.name: value for value in declarations if isinstance(value, FeatureService)},
            transforms={
                value.name: value
                for value in _reached(declarations)
                if isinstance(value, RequestTransform) or (isinstance(value, RequestSource) and value.checked)
            },
            distillations={value.name: value for value in distillations},
            contract=contract,
        )

    def applied(self) -> Contract:
        """The contract of the last `apply`, which must be the contract of today's definitions.

        Raises:
            ContractMismatch: nothing was applied, or the definitions have changed since.
        """
        contract = self.definitions.contract
        if not self.contract_file.exists():
            raise ContractMismatch(f"project {self.name}", "nothing has been applied", remedy="run `isthmus apply`")
        applied = Contract.loads(self.contract_file.read_bytes(), str(self.contract_file))
        if applied.hash != contract.hash:
            changes = named(differences(applied, contract))
            raise ContractMismatch(
                f"project {self.name}", f"the definitions have changed since the last apply ({changes})",
                remedy="run `isthmus apply`",
            )  # fmt: skip
        return applied

    @contextmanager
    def _imported(self, name: str) -> Iterator[ModuleType]:
        """The definitions, run afresh, with the project's folder first on the path for modules beside them."""
        file = self.root.joinpath(*name.split(".")).with_suffix(".py")
        where = str(file)
        if not file.is_file():
            raise ConfigurationError(where, [Problem("definitions", "there is no such file", "a Python module")])
        with _first_on_path(self.root):
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None  # noqa: S101 - it is a .py file that exists
            assert spec.loader is not None  # noqa: S101 - likewise
            module = importlib.util.module_from_spec(spec)
            # Classes are looked up by their module, by dataclasses as by the digest of the code.
            hidden = sys.modules.get(name)
            sys.modules[name] = module
            # A Python function that becomes one of Spark's before there is a session is one of Spark Connect, too.
            os.environ.setdefault("SPARK_CONNECT_MODE_ENABLED", "1")
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as error:  # the user's own code may raise anything
                place = _place(error, self.root, file)
                found = f"fails with {type(error).__name__}: {str(error).rstrip('.')}"
                expected = _WITHOUT_SESSION if "SESSION" in found and "PySpark" in found else ""
                problem = Problem(place, found, expected)
                raise ConfigurationError(where, [problem], remedy="correct that line") from error
            else:
                yield module
            finally:
                del sys.modules[name]
                if hidden is not None:
                    sys.modules[name] = hidden


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Modules of the folder can be imported inside; afterwards they are forgotten, so that the next run is fresh."""
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    written = sys.dont_write_bytecode
    # Python takes cached bytecode for fresh if source time, in seconds, and size are equal: a quick edit would be lost.
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder) and "site-packages" not in file:
                del sys.modules[name]


def _place(error: BaseException, folder: Path, file: Path) -> str:
    """The file and line of the project at which an import failed: where the error is, not where it was noticed."""
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
    """Views and spines that are lost because a later function of the module has their name."""
    file = Path(str(module.__file__))
    problems = []
    first: dict[str, int] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and isinstance(getattr(module, node.name, None), FeatureView | Spine):
            line = first.setdefault(node.name, node.lineno)
            if line != node.lineno:
                problems.append(Problem(f"line {node.lineno}: {node.name!r}",
                                        f"is declared in line {line} already", "one name each"))  # fmt: skip
    return problems


def _each_once(declarations: list[Declaration]) -> list[Declaration]:
    return list({id(declaration): declaration for declaration in declarations}.values())


def _reached(declarations: list[Declaration]) -> list[Declaration]:
    """The declarations, and what services, request transforms and spines use without the module naming it."""
    reached: list[Declaration] = list(declarations)
    for declaration in reached:
        match declaration:
            case FeatureService(features=parts) | RequestTransform(inputs=parts):
                reached += [part.view if isinstance(part, FeatureProjection) else part for part in parts]
            case Spine(request=RequestSource() as request):
                reached.append(request)
    return _each_once(reached)


def _unreadable(distillations: list[Distillation], contract: Contract) -> list[Problem]:
    """Neither a teacher nor a student reads bytes or arrays, nor does a student's graph take any."""
    return [
        Problem(f"distillation {distillation.name}, {role}", f"reads {column.name}, of type {column.dtype}",
                "numbers, times and Strings")
        for distillation in distillations
        for role, service in (("teacher", distillation.teacher), ("student", distillation.student))
        for column in contract.inputs(service.name)
        if column.dtype not in INPUTS
    ] + [
        Problem(f"distillation {distillation.name}, student",
                f"reads request transform {transform.name}, which takes {column.name}, an Array",
                "request transforms of numbers, times and Strings: a package is fed no arrays")
        for distillation in distillations
        for transform in contract.used(distillation.student.name)
        for column in contract.transform_inputs(transform)
        if column.dtype.element is not None
    ]  # fmt: skip


def _beyond_the_device(distillations: list[Distillation], contract: Contract) -> list[Problem]:
    """A student may use only what a device can have."""
    problems = []
    for distillation in distillations:
        beyond = [c.name for c in contract.inputs(distillation.student.name) if c.available == "server"]
        if not beyond:
            continue
        found = f"uses {', '.join(beyond)}"
        for transform in contract.used(distillation.student.name):
            # All that a transform computes can exist only where everything can that it takes.
            if taken := [c.name for c in contract.transform_inputs(transform) if c.available == "server"]:
                found += f", where request transform {transform.name} takes {', '.join(taken)}"
        problems.append(Problem(f"distillation {distillation.name}, student", found,
                                'fields with available="device" and request fields, computed or not'))  # fmt: skip
    return problems
