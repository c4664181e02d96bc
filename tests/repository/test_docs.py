"""Blocks of code in the documentation: Python and the tutorial are run, all others held against what they speak of."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import tree_sitter_kotlin
import tree_sitter_swift
import typer
import yaml
from dagster._cli import create_dagster_cli
from feast.repo_config import RepoConfig
from tree_sitter import Language, Parser

from isthmus.dagster import IsthmusProjectComponent
from isthmus.features.definition.checks import Declarations
from isthmus.orchestration import settings
from isthmus.orchestration.cli import cli
from isthmus.orchestration.graph.instance import INSTANCE
from isthmus.orchestration.planning import devices
from isthmus.orchestration.project import Project
from isthmus.orchestration.scaffold import init
from isthmus.orchestration.status import status
from tests.commandline import run
from tests.repository.pages import PAGES, ROOT, Block, Terminal, blocks, prose, words

ELSEWHERE = {"docs/packages.md": "tests/serving/rollout/test_signature.py"}
"""Where a page's block of bash is run."""
OTHERS = {
    "cd": "changes nothing",
    "head": "shows what is there",
    "sed": "run with the tutorial",
    "curl": "run with the tutorial, or asks a server that is not here",
    "openssl": "makes keys, as tests/signing.py does",
    "docker": "builds images, which no test here does",
    "kubectl": "needs a cluster",
    "accelerate": "starts a script of the reader's",
}
"""Commands that are not ours, with the reason why nothing is asked of them."""

OTHER_OPTIONS = {
    "--build-arg": "docker",
    "--multi_gpu": "accelerate",
    "--engine": "benchmarks/scaling.py",
    "--no-deps": "pip",
}
"""Options of other programs that a text names alone."""

# --- python

BEFORE = {
    "docs/attribution.md": "flights",
    "docs/deployment.md": "flights",
    "docs/request-features.md": "empty",
    "docs/sources.md": "empty",
    "docs/distillation.md": "flights",
    "docs/production.md": "flights",
    "docs/search.md": "flights",
    "docs/causal.md": "docwriter",
    "docs/phones.md": "effects",
    "docs/snapshots.md": "flights",
}
"""Pages whose blocks go on in the definitions of an example."""
WHOLE = ("README.md", "docs/tutorial.md")
"""Pages that are run from top to bottom, in tests of their own."""


def evaluated(names: Mapping[str, Any]) -> None:
    assert names["taught"].low < 0.0085 < names["taught"].high
    worst = names["worst_slices"](names["columns"], names["measure"], least=500, count=3)
    assert len(worst) == 3
    assert all(one.student < one.teacher for one in worst)


def taught(names: Mapping[str, Any]) -> None:
    sizes = {key: (value.dtype, tuple(value.shape)) for key, value in names["targets"].items()}
    assert sizes == {"logits": (torch.float16, (3, 3)), "hidden": (torch.float16, (3, 64))}


def trained(names: Mapping[str, Any]) -> None:
    best = min(one["error"] for one in names["history"])
    assert len(names["history"]) == 3
    assert names["evaluate"](names["student"])["error"] == pytest.approx(best, abs=1e-6)


def graphed(names: Mapping[str, Any]) -> None:
    (offline, *_) = [key for key in names["defs"].resolve_all_asset_keys() if "offline" in key.path]
    assert offline.path == ["shop", "offline", "habits"]


def fed(names: Mapping[str, Any]) -> None:
    assert names["fed"].tensors["numbers"][0] == 0.5
    assert np.isnan(names["fed"].tensors["numbers"][1])


def pushed(names: Mapping[str, Any]) -> None:
    folder = Path("path/to/the/project")
    project = Project(folder)
    project.state.mkdir()
    project.contract_file.write_bytes(project.definitions.contract.dumps())
    with project.redis():
        names["corrected"](folder)
        assert status(project, measure=False).views["habits"].waiting == 1


def generated(names: Mapping[str, Any]) -> None:
    assert names["report"].files["model.fp32.ort"].agreement == 1


def declared(names: Mapping[str, Any]) -> None:
    assert names["task"].problems("task") == []


def followed(names: Mapping[str, Any]) -> None:
    declarations = Declarations("shop")
    declarations.add(names["flights"])
    declarations.check()
    assert declarations.problems == []
    assert names["flights"].known_column == "landed_at"


AFTER: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "docs/evaluation.md": evaluated,
    "docs/teachers.md": taught,
    "docs/transfer.md": declared,
    "docs/training.md": trained,
    "docs/dagster.md": graphed,
    "docs/decoding.md": generated,
    "docs/heads.md": fed,
    "docs/serving.md": pushed,
    "docs/streams.md": followed,
}
"""What the blocks of a page leave, and what is known of it."""


def test_the_page_of_results_has_every_benchmark() -> None:
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"`python benchmarks/{file.stem}.py`, {json.loads(file.read_text())['at']}" in text, file.name


@pytest.mark.accept
@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE and blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(block.text for block in blocks(page, "python"))
    if example := BEFORE.get(page):
        folder = copied(example, tmp_path / example)
        with (folder / "definitions.py").open("a") as definitions:
            definitions.write(code)
        contract = Project(folder).definitions.contract
        assert page != "docs/request-features.md" or {"moment", "dot", "checked"} <= set(contract.transforms)
        return
    copied("empty", tmp_path / "path" / "to" / "the" / "project")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    exec(compile(code, page, "exec"), names)  # noqa: S102 - our own
    AFTER[page](names)


def copied(example: str, folder: Path) -> Path:
    """An example without what was made in it."""
    return shutil.copytree(ROOT / "examples" / example, folder, ignore=shutil.ignore_patterns(".*", "data", "site"))


@pytest.mark.accept
@pytest.mark.timeout(900)
def test_the_tutorial_runs_from_top_to_bottom(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        printed = [terminal.run(block) for block in blocks("docs/tutorial.md")]
        # The page on the API asks the same project.
        served = [terminal.run(block) for block in blocks("docs/serving.md", "sh") if block.text.startswith("curl")]
    text = "\n".join(printed)
    assert '"PRESENT"' in text
    assert '"NOT_FOUND"' in text
    assert re.search(r"v007 .*present\n.*v007 .*\n.*v007 .*not_found", text)
    assert text.count("Verdict: passed") == 2
    assert '"contract"' in text
    assert "will_buy" in printed[-2]
    assert '"written":1' in served[1]
    gain = re.search(r"The teacher improves the student's auc by ([\d.]+) \(([\d.]+) to ([\d.]+)\)", text)
    assert gain
    assert float(gain[2]) > 0


@pytest.mark.accept
@pytest.mark.slowest
def test_the_gate_of_the_tutorial_refuses_a_teacher_that_adds_nothing(tmp_path: Path) -> None:
    init(tmp_path / "shop")
    (block,) = [block for block in blocks("docs/tutorial.md", "python") if "Distillation" in block.text]
    with (tmp_path / "shop" / "definitions.py").open("a") as file:
        file.write(block.text.replace("teacher=server", "teacher=phone"))
    steps = ("python visits.py", "isthmus apply", "isthmus build", "isthmus features training-set", "isthmus distill")
    with Terminal(tmp_path / "shop") as terminal:
        terminal.run(Block("docs/tutorial.md", 1, "sh", "\n".join(steps)))
    refused = run("model", "export", cwd=tmp_path / "shop")
    assert refused.returncode == 1
    assert "gate taught failed: " in refused.stderr


def test_a_benchmark_that_cannot_run_stands_on_the_page_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "git").symlink_to(str(shutil.which("git")))
    page = tmp_path / "page.html"
    command = [sys.executable, str(ROOT / "benchmarks/benchmark.py"), "--only", "online", "--page", str(page)]
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, check=False)
    assert done.returncode == 1
    lookups, writes = re.findall(r"Not measured: ([^<]*)", page.read_text())
    assert "wrk is not on PATH: install the package wrk" in lookups
    assert "wrk" not in writes
    assert "redis-server is not on PATH: install the package redis-server" in writes


# --- commands


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh", "console")])
def test_the_commands_of_a_page_are_there(page: str) -> None:
    for block in blocks(page, "sh", "console"):
        for command in block.commands:
            known(words(command), block)


@pytest.mark.parametrize("page", PAGES)
def test_the_verbs_and_options_in_the_text_of_a_page_are_there(page: str) -> None:
    for command in re.findall(r"`(isthmus [a-z][^`]*)`", prose(page)):
        parsed(words(command)[1:], f"{page}: {command}")
    ours = options(typer.main.get_command(cli.app))
    for option in re.findall(r"`(--[a-z][\w-]*)[^`]*`", prose(page)):
        assert option in ours | OTHER_OPTIONS.keys(), f"{page}: {option}"


def test_the_commands_that_messages_name_are_there() -> None:
    named = set[str]()
    for file in (ROOT / "src" / "isthmus").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                named.update(re.findall("`isthmus ([a-z][^`]*?)(?: --help)?`", node.value))
    assert {"apply", "build", "materialize --full", "keys create NAME --scope 'read:*'"} < named
    for command in sorted(named):
        parsed(words(command.replace("SHARE", "0.1")), command)


def options(command: click.Command) -> set[str]:
    """Of a command and of those below it."""
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*(options(one) for one in command.commands.values())) if isinstance(command, click.Group) else own


def known(command: list[str], block: Block) -> None:
    """Holds a command, or several with `&&` or `|` between, against what there is."""
    for mark in ("&&", "|"):
        if mark in command:
            place = command.index(mark)
            known(command[:place], block)
            return known(command[place + 1 :], block)
    said = f"{block}: {' '.join(command)}"
    match command:
        case ["isthmus" | ".venv/bin/isthmus", *arguments]:
            parsed(arguments, said)
        case ["torchrun", "--nproc-per-node", _, "-m", "isthmus", *arguments]:
            parsed(arguments, said)
        case ["dagster", *arguments]:
            parsed(arguments, said, create_dagster_cli())  # type: ignore[no-untyped-call]
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), said
        case ["pip", "install", "-c", "isthmus/constraints.txt", *packages]:
            known(["pip", "install", *packages], block)
        case ["python3", "-m", "venv", ".venv"] | [".", ".venv/bin/activate"]:
            pass
        case ["pip", "install", *arguments]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for argument in arguments:
                named = re.fullmatch(r"(?:\./)?isthmus\[(.*)\]", argument)
                assert set(named[1].split(",")) <= set(extras) if named else True, said
                if code := re.search(r'\$\(python -c "(.*)"\)', argument):
                    printed(code[1], said)
        case ["python", "-c", code]:
            printed(code, said)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), said
        case ["python", file, *_]:
            folders = (ROOT, (ROOT / block.page).parent, ROOT / "examples" / "empty")
            assert any((folder / file).is_file() for folder in folders), said
        case [name, *_]:
            assert name in OTHERS, said
    return None


def parsed(arguments: list[str], said: str, command: click.Command | None = None) -> None:
    """Reads a command line as the real one does, by default ours, and runs nothing."""
    command = command or typer.main.get_command(cli.app)
    name = command.name or "isthmus"
    try:
        while isinstance(command, click.Group) and arguments:
            context = click.Context(command, info_name=name)
            found, inner, arguments = command.resolve_command(context, arguments)
            assert inner is not None
            name, command = str(found), inner
        if isinstance(command, click.Group):
            return
        command.make_context(name, [*arguments]).close()
    except click.UsageError as error:
        raise AssertionError(f"{said}: {error.format_message()}") from error


def printed(code: str, said: str) -> None:
    """The file that it prints is there."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, said + done.stderr
    assert Path(done.stdout.strip()).is_file(), said


# --- files


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "toml")], ids=str)
def test_settings_are_settings(block: Block, tmp_path: Path) -> None:
    (tmp_path / (block.file or "isthmus.toml")).write_text(block.text)
    if block.file == "devices.toml":
        assert set(tomllib.loads(block.text)) <= set(devices.catalog(tmp_path, []))
        return
    assert block.file in ("", "isthmus.toml")
    if "[project]" not in block.text:
        with (tmp_path / "isthmus.toml").open("a") as file:
            file.write('\n[project]\nname = "shop"\n')
    settings.load(tmp_path / "isthmus.toml")


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "yaml")], ids=str)
def test_yaml_is_what_its_readers_take(block: Block) -> None:
    content = yaml.safe_load(block.text)
    if block.file == "feature_store.yaml":
        least = {"project": "shop", "provider": "local", "registry": "registry.pb"}
        read = RepoConfig(**{**least, **content})
        # It takes a class of another's as a name, until somebody asks for it.
        for part in ("online_store", "offline_store"):
            if part in content:
                assert type(getattr(read, part)).__module__.startswith("isthmus.")
        return
    if block.file == "dagster.yaml" and "storage" in content:
        return  # tests/orchestration/graph/test_postgresql.py starts a run with it
    if block.file == "dagster.yaml":
        ours = yaml.safe_load(INSTANCE)
        assert content["concurrency"]["pools"] == ours["concurrency"]["pools"]
        assert content["run_monitoring"] == ours["run_monitoring"]
        return
    assert block.file == "defs/features/defs.yaml"
    assert content["type"] == f"isthmus.dagster.{IsthmusProjectComponent.__name__}"
    model = IsthmusProjectComponent.get_model_cls()
    assert model is not None
    model(**content["attributes"])


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "javascript")], ids=str)
def test_modules_of_a_page_are_modules(block: Block, tmp_path: Path) -> None:
    (tmp_path / "own.mjs").write_text(block.text)
    subprocess.run(["node", "--check", str(tmp_path / "own.mjs")], check=True)
    for names, module in re.findall(r'import \{ (.*?) \} from "\./(.*?)"', block.text):
        package = ROOT / "src" / "isthmus"
        folders = (package / "orchestration" / "web", package / "package" / "clients")
        (source,) = [(folder / module).read_text() for folder in folders if (folder / module).exists()]
        exported = set(re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", source, re.MULTILINE))
        assert set(names.split(", ")) <= exported


GRAMMARS = {"kotlin": tree_sitter_kotlin, "swift": tree_sitter_swift}


@pytest.mark.parametrize(
    "block", [block for page in PAGES for language in GRAMMARS for block in blocks(page, language)], ids=str
)
def test_code_for_phones_is_code(block: Block) -> None:
    parser = Parser(Language(GRAMMARS[block.language].language()))
    assert not parser.parse(block.text.encode()).root_node.has_error
    assert parser.parse(block.text.replace(")", "", 1).encode()).root_node.has_error


@pytest.mark.parametrize("page", PAGES)
def test_no_block_escapes(page: str) -> None:
    languages = {block.language for block in blocks(page)}
    assert languages <= {"python", "sh", "console", "toml", "yaml", "javascript", "bash", "text", *GRAMMARS}
    if "bash" in languages:
        assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text()
    # Code is fenced, so that it says what it is.
    assert not re.search(r"\n\n {4}\S", prose(page))


# --- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that is not there: what asks the network fails.
    offline = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, **offline}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.mark.accept
def test_the_site_asks_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        loaded = re.findall(r'<(?:(?:script|img|iframe)[^>]* src|link[^>]* href)="?([^">\s]+)', page.read_text())
        assert loaded
        assert not [address for address in loaded if address.startswith(("http", "//"))], page


def test_the_reference_has_every_public_name(site: Path) -> None:
    tree = ast.parse((ROOT / "src" / "isthmus" / "__init__.py").read_text())
    names = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    written = (site / "reference.html").read_text()
    for name in ast.literal_eval(names):
        assert f'id="isthmus.{name}"' in written or f"<td><code>{name}</code></td>" in written, name
