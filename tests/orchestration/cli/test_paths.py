"""Every option and argument that names a file says that it takes no URL, and refuses one."""

from pathlib import Path

import pytest
import typer

from isthmus.features.errors import RequestError
from isthmus.features.pointintime.spine import spine_rows
from isthmus.orchestration.cli import cli
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.record import reproduce
from tests.commandline import run
from tests.orchestration.shop import Shop

_WORDS = ("folder", "file", "parquet", "package", "page here", "where to write")
_OTHER = {
    "model attribute precision", "deploy canary share", "features training-set like", "features training-set out",
}  # fmt: skip
"""Parameters whose help has such a word, and whose values are no path or may be a URL."""


def _parameters() -> list[tuple[list[str], object]]:
    found: list[tuple[list[str], object]] = []
    waiting: list[tuple[list[str], object]] = [([], typer.main.get_command(cli.app))]
    for words, command in waiting:
        found += [(words, parameter) for parameter in command.params]  # type: ignore[attr-defined]
        waiting += [([*words, name], part) for name, part in getattr(command, "commands", {}).items()]
    return [(words, parameter) for words, parameter in found if words]


PARAMETERS = _parameters()
PATHS = [(words, p) for words, p in PARAMETERS if "A local path, not a URL." in (getattr(p, "help", "") or "")]


def test_no_other_parameter_is_a_path() -> None:
    for words, parameter in PARAMETERS:
        if (words, parameter) in PATHS:
            continue
        name = " ".join([*words, parameter.name])  # type: ignore[attr-defined]
        about = (getattr(parameter, "help", "") or "").lower()
        assert parameter.type.name not in ("path", "file", "directory"), name  # type: ignore[attr-defined]
        assert name in _OTHER or not any(word in about for word in _WORDS), name


@pytest.mark.parametrize(("words", "parameter"), PATHS, ids=lambda part: " ".join(part) if type(part) is list else "")
@pytest.mark.parametrize("url", ["s3://bucket/set", "GS://b"])
def test_a_url_is_refused_and_nothing_is_written(words: list[str], parameter: object, url: str, tmp_path: Path) -> None:
    option = parameter.opts[0]  # type: ignore[attr-defined]
    done = run(*words, *([option, url] if option.startswith("-") else [url]), cwd=tmp_path)
    assert done.returncode == 2
    assert f"{url} is a URL" in done.stderr
    assert "Pass a local path, and copy" in done.stderr
    assert not list(tmp_path.iterdir())


def test_settings_refuse_what_takes_no_url(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, said in [
        ("ISTHMUS_PACKAGES__SIGNING_KEY", "s3://bucket/key.pem", "a local path, not a URL"),
        ("ISTHMUS_PACKAGES__PUBLIC_KEY", "s3://bucket/key.pem", "a local path, not a URL"),
        (
            "ISTHMUS_STORES__OFFLINE",
            "s3://bucket/c#",
            "deltalake cannot open 's3://bucket/c#', because it contains '#'",
        ),
    ]:
        monkeypatch.setenv(name, value)
        done = run("status", "--project", str(shop.root))
        monkeypatch.delenv(name)
        assert done.returncode == 2
        assert said in done.stderr


def test_the_same_in_python() -> None:
    with pytest.raises(RequestError, match="s3://bucket/rows is a URL; expected a local path"):
        spine_rows("s3://bucket/rows", {})


def test_an_id_is_no_pattern(shop: Shop) -> None:
    folder = Project(shop.root).state / "training" / "late" / "a1"
    folder.mkdir(parents=True)
    (folder / "_record.json").write_text("{")
    with pytest.raises(RequestError, match="no training set has this path or id"):
        reproduce(Project(shop.root), "a[1]", None, join="embedded")
