"""The public modules: what users import, and nothing else in the documentation and the examples."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections import Counter
from importlib import import_module

import pytest

from isthmus.moved import PUBLIC
from tests.repository.pages import PAGES, ROOT

MODULES = (
    "isthmus", "isthmus.dagster", "isthmus.evaluation", "isthmus.feast", "isthmus.inference", "isthmus.losses",
    "isthmus.project", "isthmus.tasks", "isthmus.teachers", "isthmus.training",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_the_names_are_sorted_and_documented(name: str) -> None:
    module = import_module(name)
    assert module.__doc__
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", MODULES[1:])
def test_type_checkers_see_the_same_names(name: str) -> None:
    module = import_module(name)
    tree = ast.parse(inspect.getsource(module))
    block, hidden = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(hidden.test) == "not TYPE_CHECKING", "a misspelled name would pass"
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == module.__all__


def test_importing_them_loads_no_third_party_library() -> None:
    script = f"""
import sys
before = set(sys.modules)
import {", ".join(MODULES)}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(roots - sys.stdlib_module_names - {{"isthmus"}}))
"""
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


def _imports(code: str) -> list[str]:
    tree = ast.parse(textwrap.dedent(code))
    froms = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return froms + [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]


def _sources() -> list[tuple[str, str]]:
    examples = [path for path in (ROOT / "examples").rglob("*.py") if ".isthmus" not in path.parts]
    found = [(str(path.relative_to(ROOT)), path.read_text()) for path in examples]
    fence = re.compile(r"^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return found + [(str(page), block) for page in PAGES for block in fence.findall((ROOT / page).read_text())]


def test_documentation_and_examples_import_public_modules_alone() -> None:
    found = [(where, name) for where, code in _sources() for name in _imports(code) if name.startswith("isthmus")]
    assert len(found) > 30
    assert [(where, name) for where, name in found if name not in MODULES] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_private_path_that_moved_names_the_public_module(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"Import from {PUBLIC[name]} instead"):
        import_module(name)
    assert PUBLIC[name] in MODULES


@pytest.mark.parametrize(
    ("package", "public", "name"),
    [
        ("isthmus.distill.losses", "isthmus.losses", "soft_targets"),
        ("isthmus.distill.teachers", "isthmus.teachers", "NetworkTeacher"),
        ("isthmus.distill.outputs", "isthmus.teachers", "OutputCache"),
    ],
)
def test_a_private_package_names_the_public_module_of_its_former_names(package: str, public: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"{package}.{name} was private .* Import it from {public} instead"):
        exec(f"from {package} import {name}")  # noqa: S102 - as users write it
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {package} import nothing")  # noqa: S102


@pytest.mark.parametrize("name", MODULES[1:])
def test_the_reference_lists_the_names(name: str) -> None:
    (row,) = [line for line in (ROOT / "docs" / "reference.md").read_text().splitlines() if f"| `{name}` |" in line]
    assert re.findall(r"`(\w+)`", row.split("|")[-2]) == import_module(name).__all__


def test_a_project_opens_by_the_text_of_its_path() -> None:
    folder = ROOT / "examples" / "flights"
    assert import_module("isthmus.project").Project(str(folder)).root == folder.resolve()


def test_few_public_classes_share_a_name() -> None:
    trees = [ast.parse(file.read_text()) for file in (ROOT / "src").rglob("*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    shared = {name for name, count in Counter(names).items() if count > 1 and not name.startswith("_")}
    assert shared <= {"ModelInput", "Step", "Store", "TrainingRows", "Work"}, "give each its own name"
