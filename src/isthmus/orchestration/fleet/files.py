"""`fleet`: a folder that Kubernetes and Docker take."""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem
from isthmus.features.files import write_atomically
from isthmus.features.redis.address import Address, without_credentials
from isthmus.orchestration.fleet import accelerate, images, serving, training
from isthmus.orchestration.fleet.parts import STATE, Fleets, Manifest, kustomization
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import FILE

NOTE = "fleet.json"
"""What was written, with the sums: what has been changed since is not replaced."""

_REDIS = "$(REDIS_URL)"
_LONGEST = 40
_EXAMPLE = "overlays/example/kustomization.yaml"


def fleet(project: Project, out: Path) -> list[str]:
    """Writes the folder, and gives the names of its files.

    Files of others in the folder stay. The same project in the same environment gives the same bytes.

    Args:
        project: the project.
        out: where to write; what an earlier call wrote there is replaced.

    Raises:
        ConfigurationError: the settings cannot be had on other machines; every problem is named.
        DataError: in place of a file there is one that an earlier call did not write, or that has been changed.
        DependencyError: PyYAML is not installed.
    """
    content = files(project)
    _write(out, content)
    return sorted(content)


def files(project: Project) -> dict[str, bytes]:
    """All files by name.

    Raises:
        ConfigurationError: the settings cannot be had on other machines; every problem is named.
        DependencyError: PyYAML is not installed.
    """
    fleets, settings = _fleets(project), project.settings
    signed = settings.packages.public_key is not None
    configuration = accelerate.configuration(fleets.training, training.first_node(fleets))
    generated = {"configMapGenerator": [{"name": f"{fleets.name}-accelerate", "files": ["accelerate.yaml"]}]}
    served, trained, claim = serving.manifests(fleets), training.manifests(fleets), {"claim.yaml": fleets.claim()}
    found: dict[str, Manifest] = {
        "base/kustomization.yaml": kustomization(["state", "serving", "training"]),
        **_folder("base/state", claim),
        **_folder("base/serving", served),
        **_folder("base/training", trained, **generated),
        "base/training/accelerate.yaml": configuration,
        _EXAMPLE: _example(fleets),
    }
    text = {
        "images/Dockerfile.serving": images.serving(fleets.port, signed=signed),
        "images/Dockerfile.training": images.training(fleets.training, settings.engine),
        "images/Dockerfile.training.dockerignore": images.ignored(),
        "images/constraints.txt": images.constraints(),
    }
    return {name: _yaml(one) for name, one in found.items()} | {name: one.encode() for name, one in text.items()}


def _folder(name: str, manifests: Mapping[str, Manifest], **more: Any) -> dict[str, Manifest]:
    """Manifests in a folder, and the file that lists them."""
    listed = {f"{name}/kustomization.yaml": kustomization(sorted(manifests), **more)}
    return listed | {f"{name}/{file}": manifest for file, manifest in manifests.items()}


def _fleets(project: Project) -> Fleets:
    settings = project.settings
    name, problems = project.name.replace("_", "-"), []
    # A Service's name, with "-training" and a number after it (RFC 1035).
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_LONGEST - 2}}}[a-z0-9])?", name):
        expected = f"a letter first, a letter or digit last, and {_LONGEST} characters at most"
        problems.append(Problem("project.name", repr(project.name), expected))
    if not settings.server.port:
        problems.append(Problem("server.port", "0", "a port that others can know"))
    ports = _ports(settings.stores.online)
    if not ports:
        shown = without_credentials(settings.stores.online)
        problems.append(Problem("stores.online", repr(shown), "the URL of a Redis that other machines reach"))
    if _has_password(project):
        expected = "none there, since images have the file in them: set ISTHMUS_STORES__ONLINE"
        problems.append(Problem("stores.online", "has a password", expected))
    if settings.profiles.training.device == "cuda" and settings.profiles.training.accelerator is None:
        expected = 'the accelerator of a node, for device = "cuda"'
        problems.append(Problem("profiles.training.accelerator", "is not set", expected))
    if problems:
        raise ConfigurationError(str(project.root / FILE), problems)
    return Fleets(
        name=name,
        version=metadata.version("isthmus").replace("+", "-"),
        training=settings.profiles.training,
        serving=settings.profiles.serving,
        port=settings.server.port,
        workers=settings.server.workers,
        # As long as the server itself waits for what is under way.
        drain_seconds=math.ceil(settings.server.limits.deadline_seconds) + 1,
        server=_server(project),
        redis=ports,
    )


def _ports(online: str) -> tuple[int, ...]:
    """Of the online store; none if no other machine reaches it. Redis's own where only the Secret knows."""
    if online == "embedded":
        return (6379,)
    try:
        return tuple(sorted({node.port for node in Address.of(online).nodes()}))
    except (ValueError, KeyError):  # no URL, or one without a host
        return ()


def _has_password(project: Project) -> bool:
    """Whether the file, which is in the training image, has a password: a variable's value is not."""
    with (project.root / FILE).open("rb") as file:
        online = str(tomllib.load(file).get("stores", {}).get("online"))
    return "@" in online or "password" in online


def _server(project: Project) -> str:
    """The settings of a server, but for the URL of its Redis, which is a secret: Kubernetes fills it in."""
    server = project.settings.server
    told = {
        "contract": f"{STATE}/{project.contract_file.name}",
        "deployment": f"{STATE}/{project.deployment_file.name}",
        "redis": _REDIS,
        "keys": f"{serving.KEYS}/keys.json",
        "host": "0.0.0.0",  # noqa: S104 - of a container, with keys
        "port": server.port,
        "workers": server.workers,
        "limits": server.limits,
        "batch": project.settings.profiles.serving.batch,
        "public_key": project.public_key,
        "latency": None,  # nothing is trained beside it
        "latency_objective_ms": project.settings.latency_objective_ms,
        "now": project.fixed_now,
    }
    text = msgspec.json.encode(told).decode()
    return text.replace("$(", "$$(").replace("$" + _REDIS, _REDIS)


def _example(fleets: Fleets) -> Manifest:
    """An overlay to copy: what differs between clusters."""
    registry = "registry.example.com/features"
    return kustomization(
        ["../../base"],
        namespace=fleets.name,
        images=[
            {"name": f"{fleets.name}-{component}", "newName": f"{registry}/{fleets.name}-{component}",
             "newTag": fleets.version}
            for component in (serving.COMPONENT, training.COMPONENT)
        ],
        patches=[
            {
                "target": {"kind": "PersistentVolumeClaim", "name": f"{fleets.name}-state"},
                "patch": _yaml([{"op": "add", "path": "/spec/storageClassName", "value": "shared"}]).decode(),
            }
        ],
    )  # fmt: skip


def _yaml(data: object) -> bytes:
    try:
        import yaml
    except ImportError as error:
        raise DependencyError(
            "orchestration", f"cannot be imported ({error})", remedy="install it: pip install 'isthmus[orchestration]'"
        ) from error

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Without aliases: the same labels stand in many places."""

        def ignore_aliases(self, _data: object) -> bool:
            return True

    return bytes(yaml.dump(data, Dumper=Plain, sort_keys=False, width=1000, encoding="utf-8"))


def _write(out: Path, content: Mapping[str, bytes]) -> None:
    """Writes the files, and removes those of an earlier call that are no longer made.

    Raises:
        DataError: one of them is somebody else's.
    """
    before = _written(out)
    sums = {name: sha256(one).hexdigest() for name, one in content.items()}
    changed = []
    for name in sorted({*sums, *before}):
        found = _sum(out / name)
        if found not in (None, before.get(name), sums.get(name)):
            changed.append(name)
    if changed:
        raise DataError(
            str(out), f"{', '.join(changed)} would be replaced, and this command did not write what is there",
            expected="a new folder, or one that this command wrote", remedy="write to another folder, or move them",
        )  # fmt: skip
    for name in sorted({*before} - {*sums}):
        (out / name).unlink(missing_ok=True)
    for name, one in content.items():
        write_atomically(out / name, one)
    # Last: what a killed call has written is what this one writes, and needs no line there.
    write_atomically(out / NOTE, json.dumps({"files": sums}, indent=1, sort_keys=True).encode() + b"\n")


def _written(out: Path) -> dict[str, str]:
    """File name to sum, as the last call left them.

    Raises:
        DataError: there is a note, and not one of ours.
    """
    try:
        note = msgspec.json.decode((out / NOTE).read_bytes(), type=dict[str, dict[str, str]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(str(out / NOTE), f"cannot be read ({error})", expected="what `isthmus fleet` wrote") from error
    names = note.get("files", {})
    # A file of ours is in the folder: nothing outside is touched, whatever the note says.
    return {name: one for name, one in names.items() if not Path(name).is_absolute() and ".." not in Path(name).parts}


def _sum(path: Path) -> str | None:
    """SHA-256 of a file; None if there is none, and no sum of any file if something else is there."""
    if path.is_symlink() or path.is_dir():
        return ""
    return sha256(path.read_bytes()).hexdigest() if path.exists() else None
