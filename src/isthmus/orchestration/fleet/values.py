"""What the templates of a fleet are filled with: settings of the project, and versions of this environment."""

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.redis.address import Address, without_credentials
from isthmus.orchestration.fleet import probe
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import FILE

_STATE, _KEYS = "/project/.isthmus", "/etc/isthmus/keys"
"""Where the templates mount the state, for both fleets alike since a deployment names its package by path, and keys."""
_SPOOL = "/var/spool/isthmus"
"""Where a server has the spool of the state, which it may write to."""
_REDIS, _SPOOL_KEY = "$(REDIS_URL)", "$(SPOOL_KEY)"
_MAX_NAME = 40


def values(project: Project) -> Mapping[str, Any]:
    """Name to value.

    Raises:
        ConfigurationError: the settings work on this machine alone; every problem is named.
    """
    name, settings = project.name.replace("_", "-"), project.settings
    ports = _redis_ports(settings.stores.online)
    if problems := _problems(project, name, ports):
        raise ConfigurationError(str(project.root / FILE), problems)
    return {
        "name": name,
        "version": metadata.version("isthmus").replace("+", "-"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        # Isthmus is installed from a file: an index may have something else under its name.
        "wheel": f"isthmus-{metadata.version('isthmus')}-py3-none-any.whl",
        "constraints": constraints(),
        "engine": settings.engine,
        "training": settings.profiles.training,
        "serving": settings.profiles.serving,
        "server": settings.server,
        "server_settings": _server_settings(project),
        "record": project.recording(),
        "spool": _SPOOL,
        "spool_in_state": str(project.spool.relative_to(project.state)),
        "offline": settings.stores.offline,
        "redis_ports": ports,
        "signed": settings.packages.public_key is not None,
        "probe": Path(probe.__file__).read_text(encoding="utf-8"),
    }


@cache
def constraints() -> str:
    """Every package of this environment with its version, for `pip install --constraint`.

    What was measured and verified here runs in the same versions there. Without local parts ("+cpu"), which say where a
    build is from.
    """
    versions = {
        package.name.lower().replace("_", "-"): package.version.partition("+")[0]
        for package in metadata.distributions()
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()) if name != "isthmus")


def _problems(project: Project, name: str, ports: tuple[int, ...]) -> list[Problem]:
    settings, problems = project.settings, []
    # A Service's name, with "-training" and a number after it (RFC 1035).
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME - 2}}}[a-z0-9])?", name):
        expected = f"a letter first, a letter or digit last, and {_MAX_NAME} characters at most"
        problems.append(Problem("project.name", repr(project.name), expected))
    if not settings.server.port:
        problems.append(Problem("server.port", "0", "a port that others can know"))
    if not ports:
        shown = without_credentials(settings.stores.online)
        problems.append(Problem("stores.online", repr(shown), "the URL of a Redis that other machines reach"))
    if _has_password(project):
        expected = "none there, since images have the file in them: set ISTHMUS_STORES__ONLINE"
        problems.append(Problem("stores.online", "has a password", expected))
    if settings.server.record is not None and not _in_state(project):
        expected = "a folder in .isthmus, which is the volume of the fleet, or a URL, for [server.record]"
        problems.append(Problem("stores.offline", repr(settings.stores.offline), expected))
    if settings.profiles.training.device == "cuda" and settings.profiles.training.accelerator is None:
        expected = 'the accelerator of a node, for device = "cuda"'
        problems.append(Problem("profiles.training.accelerator", "is not set", expected))
    return problems


def _in_state(project: Project) -> bool:
    """Whether pods reach the offline tables, so that one can collect answers."""
    return "://" in project.offline or Path(os.path.normpath(project.offline)).is_relative_to(project.state)


def _redis_ports(online: str) -> tuple[int, ...]:
    """Of the online store: Redis's default for an embedded store, since the Secret has the URL; none if unreachable."""
    if online == "embedded":
        return (6379,)
    try:
        return tuple(sorted({node.port for node in Address.of(online).nodes()}))
    except (ValueError, KeyError):  # no URL, or a URL without a host
        return ()


def _has_password(project: Project) -> bool:
    """Whether the file, which is part of the training image, has a password; a variable may."""
    with (project.root / FILE).open("rb") as file:
        online = str(tomllib.load(file).get("stores", {}).get("online"))
    return "@" in online or "password" in online


def _server_settings(project: Project) -> str:
    """The settings of a server as JSON. The URL of its Redis and the key of its spool are secrets."""
    server, record = project.settings.server, project.recording()
    settings = {
        "contract": f"{_STATE}/{project.contract_file.name}",
        "deployment": f"{_STATE}/{project.deployment_file.name}",
        "redis": _REDIS,
        "keys": f"{_KEYS}/keys.json",
        "require_keys": server.require_keys,
        "hosts": server.hosts,
        "check_share": server.check_share,
        "missing": server.missing,
        "host": "0.0.0.0",  # noqa: S104 - of a container, with keys
        "port": server.port,
        "workers": server.workers,
        "limits": server.limits,
        "batch": project.settings.profiles.serving.batch,
        "public_key": project.public_key,
        "snapshots": None,  # a host of files offers them: `isthmus snapshot --to`
        "latency": None,  # no training runs beside it
        "latency_objective_ms": project.settings.latency_objective_ms,
        "freshness_objective_seconds": project.freshness_objectives(),
        "history_seconds": project.settings.stores.history_seconds,
        "record": record,
        "spool": None if record is None else _SPOOL,
        "spool_key": _SPOOL_KEY if record is not None and record.private else "",
        "now": project.fixed_now,
    }
    text = msgspec.json.encode(settings).decode().replace("$(", "$$(")
    for secret in (_REDIS, _SPOOL_KEY):
        text = text.replace("$" + secret, secret)
    return text
