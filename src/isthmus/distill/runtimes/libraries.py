"""Checks the pinned libraries of a runtime. Users install them with `--no-deps`, since their requirements conflict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from isthmus.features.errors import ConfigurationError, DependencyError, Problem


@dataclass(frozen=True, eq=False)
class Libraries:
    """The packages that a runtime needs besides `isthmus[distill]`; `pins` has the required version of each package.

    `name` is for messages, and `runtime` is the name in a declaration's `runtimes`.
    """

    name: str
    runtime: str
    pins: Mapping[str, str]

    @property
    def install(self) -> str:
        return f"pip install --no-deps {' '.join(f'{name}=={version}' for name, version in self.pins.items())}"

    def absent(self, reason: str) -> DependencyError:
        return DependencyError(self.name, reason, remedy=f"run {self.install}", passes=False)

    def problems(self) -> list[Problem]:
        problems = []
        for name, version in self.pins.items():
            try:
                installed = metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                problems.append(Problem("runtimes", f"{self.name} needs {name}, which is not installed", version))
                continue
            if installed != version:
                problems.append(Problem("runtimes", f"{self.name} needs {name}, but {installed} is installed", version))
        return problems


def libraries(name: str, runtime: str) -> Libraries:
    lines = Path(__file__).parents[1].joinpath(f"{runtime}.txt").read_text(encoding="utf-8").splitlines()
    return Libraries(name, runtime, dict(line.split("==") for line in lines if not line.startswith("#")))


def require_installed(where: str, needed: Sequence[Libraries]) -> None:
    missing = {each: problems for each in needed if (problems := each.problems())}
    if missing:
        runtimes = " and ".join(f'"{each.runtime}"' for each in missing)
        raise ConfigurationError(
            where, [problem for problems in missing.values() for problem in problems],
            remedy=f"run {' and '.join(each.install for each in missing)}, or leave {runtimes} out of the runtimes",
        )  # fmt: skip
