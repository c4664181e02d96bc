"""`isthmus init`: what it writes is a project that passes its own tests, and what is there already stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.project import Project
from isthmus.orchestration.scaffold import EXAMPLES, init
from tests.commandline import run
from tests.orchestration.cli.test_cli import refused
from tests.orchestration.shop import Shop, files

ROOT = Path(__file__).parents[2]


def listed(example: str) -> set[str]:
    """The files of an example that are in the repository, or will be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."]
    folder = ROOT / "examples" / example
    return set(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.accept
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_new_project_passes_its_own_tests(example: str, tmp_path: Path) -> None:
    made = json.loads(run("init", "shop-7", "--example", example, "--json", cwd=tmp_path).stdout)
    folder = tmp_path / "shop-7"
    assert (made["folder"], made["name"], made["example"]) == (str(folder), "shop-7", example)
    assert set(made["files"]) == set(files(folder)) == listed(example) | {".gitignore"}
    assert Project(folder).name == "shop-7"
    # In a temporary folder of its own: at its end pytest deletes older ones, some of which have many files.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "--color=no", f"--basetemp={tmp_path / 'temp'}"]
    stacks = ["-o", "faulthandler_timeout=200"]
    tested = subprocess.run([*command, *stacks], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    # Git sees nothing but what was written.
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    status = ["git", "status", "--porcelain", "-uall"]
    untracked = subprocess.run(status, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert {line.removeprefix("?? ") for line in untracked.splitlines()} == set(made["files"])


def test_every_example_is_offered() -> None:
    assert set(EXAMPLES) == {folder.name for folder in (ROOT / "examples").iterdir() if folder.is_dir()}


def test_the_last_lines_say_what_comes_next(tmp_path: Path) -> None:
    said = run("init", "a/new-shop", cwd=tmp_path).stdout
    assert said.startswith(f"new-shop: 6 files in {tmp_path}/a/new-shop\n\nNext:\n\n")
    assert "    cd a/new-shop\n    pip install pytest\n" in said
    (tmp_path / "here").mkdir()
    assert "cd" not in run("init", cwd=tmp_path / "here").stdout.partition("Next:")[2].split()


def test_the_next_steps_activate_the_environment_if_the_command_is_not_on_path(tmp_path: Path) -> None:
    command = [str(Path(sys.prefix) / "bin" / "isthmus"), "init", "shop"]
    bare = os.environ | {"PATH": "/usr/bin:/bin"}
    said = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True).stdout
    first = said.partition("Next:\n\n")[2].splitlines()[0].strip()
    check = ["bash", "-c", f"{first} && command -v isthmus"]
    found = subprocess.run(check, env=bare, capture_output=True, text=True, check=True).stdout.strip()
    assert found == str(Path(sys.prefix) / "bin" / "isthmus")


def test_hidden_files_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "shop" / ".git").mkdir(parents=True)
    (tmp_path / "shop" / ".gitignore").write_text("secrets\n")
    init(tmp_path / "shop")
    assert (tmp_path / "shop" / ".gitignore").read_text() == "secrets\n"
    assert sorted(path.name for path in (tmp_path / "shop").iterdir() if path.name[0] == ".") == [".git", ".gitignore"]
    assert Project(tmp_path / "shop").name == "shop"


def test_the_comment_behind_the_name_stays_in_its_column(tmp_path: Path) -> None:
    for name in ("s", "a-name-that-is-longer-than-the-column"):
        init(tmp_path / name)
        lines = (tmp_path / name / "isthmus.toml").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("name = ")]
        assert line.split("#")[0].split(" = ")[1].strip() == f'"{name}"'
        assert line.index("#") == max(35, len(f'name = "{name}" '))


@pytest.mark.parametrize("name", ["My Shop", "ladenöffnung", "-shop", "shop.d"])
def test_a_name_that_no_project_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"name: '{name}'; expected a name of lower-case letters"):
        init(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something(shop: Shop) -> None:
    before = files(shop.root)
    assert refused(shop, "init", str(shop.root), code=2) == (
        f"isthmus: {shop.root}: folder: contains data, definitions.py, isthmus.toml; expected "
        "a new or an empty folder. "
        "Nothing was written; choose another folder"
    )
    assert files(shop.root) == before
    (shop.root / "notes").touch()
    said = refused(shop, "init", "notes", code=2)
    assert "folder: is a file; expected a new or an empty folder" in said


def test_an_example_that_there_is_not(shop: Shop) -> None:
    assert "'flight' is not one of 'empty', 'flights', 'docsearch', 'docwriter', 'effects', 'topics'" in refused(
        shop, "init", "new", "--example", "flight", code=2
    )


def test_a_folder_that_cannot_be_made(shop: Shop) -> None:
    assert "/proc/new" in refused(shop, "init", "/proc/new", code=3)
