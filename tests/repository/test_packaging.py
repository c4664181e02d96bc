"""What is built from the repository, and what a serving host needs of it."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from isthmus.distill.declaration import RUNTIMES
from tests.repository.pages import blocks

ROOT = Path(__file__).parents[2]
EXAMPLES = "isthmus/orchestration/examples/"
PACKAGES = ("features", "package", "transforms", "distill", "serving", "orchestration")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.slowest)])
def test_the_installation_works_as_written(tmp_path: Path, installer: str) -> None:
    """Run the installation that the README and the tutorial print, then the tests of a new project."""
    pages = ("README.md", "docs/tutorial.md")
    (printed,) = {
        block.text.partition("isthmus init")[0]
        for page in pages
        for block in blocks(page, "sh")
        if "python3 -m venv" in block.text
    }
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "isthmus")], check=True)
    # uv installs the same in less time, except where only pip is told of an index.
    uv = f'pip() {{ "{Path(sys.executable).with_name("uv")}" pip "$@" || command pip "$@"; }}\n'
    steps = f"{printed}isthmus init shop\ncd shop\npython -m pytest -q -W error\nisthmus --version"
    steps = uv + steps if installer == "uv" else steps
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{steps}"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**bare, "UV_NATIVE_TLS": "1", "UV_FIND_LINKS": bare.get("PIP_FIND_LINKS", "")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_five_folders_are_relative_links_into_the_package() -> None:
    for name in PACKAGES:
        assert (ROOT / name).readlink() == Path("src") / "isthmus" / name


def test_the_wheel_holds_every_module_once_under_one_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    assert names
    assert len(names) == len(set(names))
    assert all(name.startswith("isthmus/") for name in names)
    modules = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
    assert modules == {name for name in names if not name.startswith(EXAMPLES)}


@pytest.mark.parametrize(
    "name",
    [
        "isthmus/serving/grafana/isthmus.json",
        "isthmus/serving/prometheus/alerts.yaml",
        "isthmus/orchestration/planning/devices.toml",
    ],
)
def test_the_wheel_holds_the_dashboard_the_alerts_and_the_catalogue(built: Path, name: str) -> None:
    (wheel,) = built.glob("*.whl")
    assert zipfile.ZipFile(wheel).read(name) == (ROOT / "src" / name).read_bytes()


def test_the_wheel_holds_what_runs_in_a_browser(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = [*(ROOT / "src" / "isthmus" / "orchestration" / "web").iterdir()]
    assert len(files) > 5
    for file in files:
        assert zipfile.ZipFile(wheel).read(f"isthmus/orchestration/web/{file.name}") == file.read_bytes()


def test_the_wheel_holds_the_examples_and_nothing_that_was_made_in_them(built: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."]
    listed = subprocess.run(command, cwd=ROOT / "examples", capture_output=True, text=True, check=True).stdout
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if name.startswith(EXAMPLES)}
    assert held == {EXAMPLES + file: (ROOT / "examples" / file).read_bytes() for file in listed.splitlines()}


def test_the_sdist_holds_every_module_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        modules = [name for name in archive.getnames() if name.endswith("/values/rows.py") and "/test" not in name]
    assert len(modules) == 1


@pytest.mark.accept
def test_the_wheel_imports_from_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    imports = "; ".join(f"import isthmus.{name}" for name in PACKAGES)
    flat = f"import importlib.util as u; assert not any(u.find_spec(n) for n in {PACKAGES!r})"
    # The examples come with it.
    begin = "from pathlib import Path; from isthmus.orchestration.scaffold import init; init(Path('new'), 'flights')"
    command = [python, "-W", "error", "-c", f"import isthmus; {imports}; {flat}; {begin}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    definitions = (ROOT / "examples" / "flights" / "definitions.py").read_bytes()
    assert (tmp_path / "new" / "definitions.py").read_bytes() == definitions


def test_the_base_install_asks_for_no_trainer_engine_or_orchestrator(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(name).decode().splitlines()
    base = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert base
    for heavy in ("torch", "pyspark", "pysail", "dagster", "feast", "scikit-learn"):
        assert not any(line.startswith(f"Requires-Dist: {heavy}") for line in base)


def test_the_constraints_pin_every_package_of_this_environment() -> None:
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--all", "--exclude", "pip", "--exclude-editable"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    # What is installed without its dependencies has pins of its own.
    own_pins = [f"src/isthmus/distill/{name}.txt" for name in RUNTIMES[1:]]
    files = [ROOT / name for name in ("constraints.txt", "tests/seaweedfs.txt", *own_pins)]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    # torch for CUDA brings libraries that it pins itself.
    own = [name for name in (canonicalize_name(line.split("==")[0]) for line in frozen.splitlines())
           if not name.startswith(("cuda-", "nvidia-", "triton"))]  # fmt: skip
    assert set(own) <= set(pinned)
    # `make test` installs the pins alone: they are all that pyproject.toml asks for, in versions that it accepts.
    extras = [{"extra": name} for name in ("", "all", "dev")]
    declared = [
        each for each in map(Requirement, requires("isthmus") or [])
        if each.name != "isthmus" and (each.marker is None or any(map(each.marker.evaluate, extras)))
    ]  # fmt: skip
    assert len(declared) > 50
    wrong = [each for each in declared if not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0"))]
    assert list(map(str, wrong)) == []
