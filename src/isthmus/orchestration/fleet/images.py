"""Dockerfiles of both images, and the versions that they install: those of this environment."""

import sys
from functools import cache
from importlib import metadata

from isthmus.features.profiles import TrainingProfile
from isthmus.orchestration.fleet.parts import ROOT, STATE, USER

_CPU = "https://download.pytorch.org/whl/cpu"
_PYPI = "https://pypi.org/simple"
_HERE = "/opt/isthmus"
_INSTALL = f"{_HERE}/bin/pip install --no-cache-dir --constraint /build/constraints.txt"


@cache
def constraints() -> str:
    """Every package of this environment with its version, for `pip install --constraint`.

    What is measured and verified here runs there in the same versions. Without local parts ("+cpu"), which say where a
    build is from.
    """
    found = {one.name.lower().replace("_", "-"): one.version.partition("+")[0] for one in metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()) if name != "isthmus")


def wheel() -> str:
    """File name of this version of Isthmus.

    From a file and not by its name: an index may have something else under it.
    """
    return f"isthmus-{metadata.version('isthmus')}-py3-none-any.whl"


def serving(port: int, *, signed: bool) -> str:
    """The Dockerfile of servers: Isthmus alone, without torch, pyspark, dagster or feast.

    Args:
        port: where a server listens.
        signed: whether it has to check signatures of packages.
    """
    lines = [
        *_built("[signing]" if signed else "", []),
        *_user([]),
        f"COPY --from=build {_HERE} {_HERE}",
        *_environment(),
        f"USER {USER}:{USER}",
        f"EXPOSE {port}",
        'CMD ["python", "-m", "isthmus.serving"]',
    ]
    return "\n".join(lines) + "\n"


def training(profile: TrainingProfile, engine: str) -> str:
    """The Dockerfile of what trains, with the project in it.

    Args:
        profile: how the student is trained.
        engine: what computes with PySpark.
    """
    index = _CPU if profile.accelerator is None else _PYPI
    torch = [
        f"ARG TORCH_INDEX={index}",
        f"RUN {_INSTALL} --index-url ${{TORCH_INDEX}} torch",
    ]
    packages = ["g++"] if profile.compile else []
    packages += ["openjdk-17-jre-headless"] if engine == "spark" else []
    lines = [
        *_built("[${EXTRAS}]", ["ARG EXTRAS=distill,transforms", *torch]),
        *_user(packages),
        f"COPY --from=build {_HERE} {_HERE}",
        f"COPY . {ROOT}",
        f"RUN install --directory --owner={USER} --group={USER} {STATE}",
        *_environment(),
        f"WORKDIR {ROOT}",
        f"USER {USER}:{USER}",
        f'CMD ["isthmus", "distill", "--project", "{ROOT}"]',
    ]
    return "\n".join(lines) + "\n"


def ignored() -> str:
    """What of a project gets into its image: settings and code. State, data and keys stay outside."""
    return "*\n!isthmus.toml\n!**/*.py\n**/.*\n"


def _built(extras: str, before: list[str]) -> list[str]:
    """The stage that installs into a folder of its own; compilers stay behind in it."""
    return [
        f"ARG BASE=python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm",
        "FROM ${BASE} AS build",
        *_apt(["g++", "gcc", "make"]),
        f"RUN python -m venv {_HERE}",
        f"COPY {'' if not before else '--from=images '}constraints.txt {wheel()} /build/",
        *before,
        f'RUN {_INSTALL} "/build/{wheel()}{extras}"',
        "",
        "FROM ${BASE}",
    ]


def _apt(packages: list[str]) -> list[str]:
    if not packages:
        return []
    install = f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
    return [f"RUN apt-get update && {install} && rm -rf /var/lib/apt/lists/*"]


def _user(packages: list[str]) -> list[str]:
    made = f"groupadd --gid {USER} isthmus && useradd --uid {USER} --gid {USER} --no-create-home isthmus"
    return [*_apt(packages), f"RUN {made}"]


def _environment() -> list[str]:
    return [f"ENV PATH={_HERE}/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1"]
