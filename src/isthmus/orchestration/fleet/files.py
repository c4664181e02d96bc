"""`isthmus infra fleet`: write files for Kubernetes and Docker from the templates in `templates/`."""

import json
import math
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from importlib import resources
from pathlib import Path

import msgspec

from isthmus.features.errors import DataError, extra
from isthmus.features.files import write_atomically
from isthmus.orchestration.fleet.values import values
from isthmus.orchestration.project import Project

_MONITORING = (  # files copied from isthmus.serving
    ("monitoring/alerts.yaml", "prometheus/alerts.yaml"),
    ("monitoring/dashboard.json", "grafana/isthmus.json"),
)
NOTE = "fleet.json"  # names and checksums of the written files, to detect edited ones


def fleet(project: Project, out: Path) -> list[str]:
    """Write the folder and return the names of its files.

    Files of an earlier call are replaced, and other files are left alone. The same project in the same environment
    gives the same bytes.

    Raises:
        ConfigurationError: settings that work only on this machine. All of them are listed.
        DataError: a file that would be replaced was edited or written by another program.
        DependencyError: PyYAML or Jinja is not installed.
    """
    content = files(project)
    _write(out, content)
    return sorted(content)


def files(project: Project) -> dict[str, bytes]:
    """Render the templates. Return contents by file name.

    YAML is parsed and dumped again, which drops the comments and layout of the template. Empty results are left out.

    Raises:
        ConfigurationError: settings that work only on this machine. All of them are listed.
        DependencyError: PyYAML or Jinja is not installed.
    """
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
    content, context = {}, values(project)
    for name in templates.list_templates():
        text = templates.get_template(name).render(context)
        if name.endswith(".yaml") and text.strip():
            text = yaml.dump(yaml.safe_load(text), Dumper=Plain, sort_keys=False, width=1000)
        if text.strip():
            content[name] = text.encode()
    return content | {name: (resources.files("isthmus.serving") / file).read_bytes() for name, file in _MONITORING}


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
