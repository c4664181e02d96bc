"""Values for the templates: settings of the project and package versions of this environment."""

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

# Mount points in the templates. A deployment names its package by path, so the state has the same path everywhere.
_STATE, _KEYS = "/project/.isthmus", "/etc/isthmus/keys"
_SPOOL = "/var/spool/isthmus"  # mount point of the spool, the only part of the state that servers may write
_REDIS, _SPOOL_KEY = "$(REDIS_URL)", "$(SPOOL_KEY)"
_MAX_NAME = 40


def values(project: Project) -> Mapping[str, Any]:
    """Return the values for the templates by name.

    Raises:
        ConfigurationError: settings that work only on this machine. All of them are listed.
    """
    name, settings = project.name.replace("_", "-"), project.settings
    ports = _redis_ports(settings.stores.online)
    if problems := _problems(project, name, ports):
        raise ConfigurationError(str(project.root / FILE), problems)
    return {
        "name": name,
        "version": metadata.version("isthmus").replace("+", "-"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        # Install Isthmus from a file, because a package index may have another package under this name.
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
    """Return the versions of all installed packages for `pip install --constraint`, without local parts like "+cpu".

    The fleet then runs the same versions that were measured and verified here.
    """
    versions = {
        package.name.lower().replace("_", "-"): package.version.partition("+")[0]
        for package in metadata.distributions()
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()) if name != "isthmus")


def _problems(project: Project, name: str, ports: tuple[int, ...]) -> list[Problem]:
    settings, problems = project.settings, []
    # It becomes the name of a Service, followed by "-training" and a number, and must be a label of RFC 1035.
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME - 2}}}[a-z0-9])?", name):
        expected = f"a letter first, a letter or digit last, and at most {_MAX_NAME} characters"
        problems.append(Problem("project.name", repr(project.name), expected))
    if not settings.server.port:
        problems.append(Problem("server.port", "0", "a fixed port"))
    if not ports:
        shown = without_credentials(settings.stores.online)
        problems.append(Problem("stores.online", repr(shown), "the URL of a Redis that other machines can reach"))
    if _has_password(project):
        expected = "no password in isthmus.toml, which is copied into images: set ISTHMUS_STORES__ONLINE"
        problems.append(Problem("stores.online", "has a password", expected))
    if settings.server.record is not None and not _in_state(project):
        expected = "a folder in .isthmus (the volume of the fleet) or a URL, because of [server.record]"
        problems.append(Problem("stores.offline", repr(settings.stores.offline), expected))
    if settings.profiles.training.device == "cuda" and settings.profiles.training.accelerator is None:
        expected = 'the GPU type of the nodes, for device = "cuda"'
        problems.append(Problem("profiles.training.accelerator", "is not set", expected))
    return problems


def _in_state(project: Project) -> bool:
    """Return whether pods can reach the offline tables, so that one of them can collect answers."""
    return "://" in project.offline or Path(os.path.normpath(project.offline)).is_relative_to(project.state)


def _redis_ports(online: str) -> tuple[int, ...]:
    if online == "embedded":
        return (6379,)  # the Secret has the URL of another Redis, so assume the default port
    try:
        return tuple(sorted({node.port for node in Address.of(online).nodes()}))
    except (ValueError, KeyError):  # not a URL, or a URL without a host
        return ()


def _has_password(project: Project) -> bool:
    with (project.root / FILE).open("rb") as file:
        online = str(tomllib.load(file).get("stores", {}).get("online"))
    return "@" in online or "password" in online


def _server_settings(project: Project) -> str:
    """Return the settings of a server as JSON, with references to the secrets: Redis URL and spool key."""
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
        "host": "0.0.0.0",  # noqa: S104 - in a container, with keys
        "port": server.port,
        "workers": server.workers,
        "limits": server.limits,
        "batch": project.settings.profiles.serving.batch,
        "public_key": project.public_key,
        "snapshots": None,  # a file host serves them: `isthmus features snapshot --to`
        "latency": None,  # no training runs on the same machine
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
