"""`isthmus infra fleet`: write files for Kubernetes and Docker from the templates in `templates/`."""

import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from hashlib import sha256
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.features.files import write_atomically
from isthmus.features.redis.address import Address, without_credentials
from isthmus.orchestration.fleet import probe
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import FILE

_MONITORING = (  # files copied from isthmus.serving
    ("monitoring/alerts.yaml", "prometheus/alerts.yaml"),
    ("monitoring/dashboard.json", "grafana/isthmus.json"),
)
NOTE = "fleet.json"  # names and checksums of the written files, to detect edited ones
# Mount points in the templates. A deployment names its package by path, so the state has the same path everywhere.
_STATE, _KEYS = "/project/.isthmus", "/etc/isthmus/keys"
_SPOOL = "/var/spool/isthmus"  # mount point of the spool, the only part of the state that servers may write
_REDIS, _SPOOL_KEY = "$(REDIS_URL)", "$(SPOOL_KEY)"
_MAX_NAME = 40


def fleet(project: Project, out: Path) -> list[str]:
    """Write the files to run a project on Kubernetes (such as manifests) to a folder, and return their sorted names.

    `out` is the folder. A later call replaces the files that an earlier call wrote (`fleet.json` lists them), and
    deletes those that the project no longer needs. It leaves all other files alone. The same project in the same
    environment gives the same bytes. Raise ConfigurationError for settings that work only on this machine, and
    DependencyError without PyYAML or Jinja. Raise DataError, before writing anything, if a file to replace or delete
    was edited or written by another program.
    """
    content = files(project)
    _write(out, content)
    return sorted(content)


def files(project: Project) -> dict[str, bytes]:
    with extra("orchestration"):
        import jinja2
        import yaml

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        def ignore_aliases(self, _data: object) -> bool:
            return True

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - not HTML; free text goes through `quoted`
    )
    templates.filters["quoted"] = partial(yaml.safe_dump, default_style='"', width=math.inf)
    content, context = {}, _values(project)
    for name in templates.list_templates():
        text = templates.get_template(name).render(context)
        if name.endswith(".yaml") and text.strip():
            text = yaml.dump(yaml.safe_load(text), Dumper=Plain, sort_keys=False, width=1000)
        if text.strip():
            content[name] = text.encode()
    content |= _chart(content, partial(yaml.dump, Dumper=Plain, sort_keys=False, width=1000), yaml.safe_load)
    return content | {name: (resources.files("isthmus.serving") / file).read_bytes() for name, file in _MONITORING}


def _chart(
    content: Mapping[str, bytes], dump: Callable[[Any], str], load: Callable[[bytes | str], Any]
) -> dict[str, bytes]:
    """Return the values and templates of a Helm chart with the manifests of the kustomize base.

    The values are the images, the size of the serving fleet, and the resources of each component. The templates only
    insert them.
    """
    values: dict[str, dict[str, Any]] = {"images": {}, "replicas": {}, "resources": {}}

    def move(place: dict[str, Any], name: str, group: str, key: str) -> None:
        values[group][key] = place[name]
        place[name] = f"VALUE_{group}.{key}_"

    templates = {}
    for name, text in content.items():
        folder, _, rest = name.partition("/")
        component, _, file = rest.partition("/")
        if folder != "base" or not file or file == "kustomization.yaml":
            continue
        manifest = load(text)
        if "kind" not in manifest:  # the file of which kustomize makes a ConfigMap
            (generator,) = load(content[f"base/{component}/kustomization.yaml"])["configMapGenerator"]
            head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}}
            manifest = {**head, "data": {file: text.decode()}}
        spec = manifest.get("spec", {})
        if manifest["kind"] == "HorizontalPodAutoscaler":
            for limit in ("minReplicas", "maxReplicas"):
                move(spec, limit, "replicas", limit)
        pods = spec.get("jobTemplate", manifest).get("spec", {}).get("template", {}).get("spec", {})
        for container in pods.get("containers", ()):
            move(container, "image", "images", container["image"].partition(":")[0].rpartition("-")[2])
            move(container, "resources", "resources", component)
        template = dump(manifest).replace("{{", '{{ "{{" }}')
        template = re.sub(r": VALUE_(\w+\.\w+)_$", r": {{ toJson .Values.\1 }}", template, flags=re.MULTILINE)
        templates[f"chart/templates/{component}-{file}"] = template.encode()
    return templates | {"chart/values.yaml": dump(values).encode()}


def _write(out: Path, content: Mapping[str, bytes]) -> None:
    before = _written(out)
    sums = {name: sha256(data).hexdigest() for name, data in content.items()}
    changed = [
        name for name in sorted({*sums, *before}) if _sum(out / name) not in (None, before.get(name), sums.get(name))
    ]
    if changed:
        raise DataError(
            str(out), f"{', '.join(changed)} would be replaced, but was edited or written by another program",
            expected="a new folder, or one that this command wrote", remedy="write to another folder, or move them",
        )  # fmt: skip
    for name in sorted({*before} - {*sums}):
        (out / name).unlink(missing_ok=True)
    for name, data in content.items():
        write_atomically(out / name, data)
    # Write the note last: after a kill, the next call writes the same bytes, so its files need no entry.
    write_atomically(out / NOTE, json.dumps({"files": sums}, indent=1, sort_keys=True).encode() + b"\n")


def _written(out: Path) -> dict[str, str]:
    try:
        note = msgspec.json.decode((out / NOTE).read_bytes(), type=dict[str, dict[str, str]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            str(out / NOTE), f"cannot be read ({error})", expected="what `isthmus infra fleet` wrote"
        ) from error
    # Never touch files outside the folder, even if the note lists them.
    return {
        name: checksum
        for name, checksum in note.get("files", {}).items()
        if not Path(name).is_absolute() and ".." not in Path(name).parts
    }


def _sum(path: Path) -> str | None:
    if path.is_symlink() or path.is_dir():
        return ""
    return sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _values(project: Project) -> Mapping[str, Any]:
    name, settings = project.name.replace("_", "-"), project.settings
    ports = _redis_ports(settings.stores.online)
    if problems := _problems(project, name, ports):
        raise ConfigurationError(str(project.root / FILE), problems)
    return {
        "name": name,
        "version": metadata.version("isthmus").replace("+", "-"),
        "onnxruntime": _onnxruntime(),
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
        "streams": _streams(project),
        "spool": _SPOOL,
        "spool_in_state": str(project.spool.relative_to(project.state)),
        "offline": settings.stores.offline,
        "redis_ports": ports,
        "signed": settings.packages.public_key is not None,
        "probe": Path(probe.__file__).read_text(encoding="utf-8"),
    }


def _streams(project: Project) -> bool:
    # A project may have settings before it has definitions.
    file = project.root / f"{project.settings.project.definitions}.py"
    return file.exists() and any(
        source.stream is not None for view in project.definitions.views.values() for source in view.sources
    )


@cache
def constraints() -> str:
    versions = {
        package.name.lower().replace("_", "-"): package.version.partition("+")[0]
        for package in metadata.distributions()
    }
    versions["onnxruntime"] = _onnxruntime()
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()) if name != "isthmus")


def _onnxruntime() -> str:
    import onnxruntime  # its distribution for GPUs has another name

    return str(onnxruntime.__version__)


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
    """Return True if pods can reach the offline tables, so that one pod can collect recorded answers."""
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
