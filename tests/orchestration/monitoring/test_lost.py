"""A deployment that loses more of its production quality than it may: the package before it returns."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from isthmus.distill.evaluation.metrics import auc
from isthmus.features import clock
from isthmus.features.errors import ConfigurationError, GateFailed
from isthmus.orchestration.models.release import deploy, history
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.monitoring.bounds import KEEPS, problems, require_bounds
from isthmus.orchestration.monitoring.deploymentloss import describe_loss
from isthmus.orchestration.monitoring.monitor import monitor
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.verification.verify import verify
from isthmus.serving.rollout.releases import current_deployment
from tests.commandline import run
from tests.orchestration.attribution import machines
from tests.orchestration.conftest import once

ASKED = machines.MACHINES * machines.ASKED
GOOD, POOR = "epochs=30, learning_rate=1e-2", "epochs=1, learning_rate=1e-6"
SEED = 10
"""Its weights, untrained, rank most questions the wrong way round."""


def bound(root: Path, most: float) -> Project:
    """The project with a bound on what a deployment may lose of AUC."""
    file = root / "definitions.py"
    text = file.read_text().replace("    Field,\n", "    Field,\n    Gate,\n")
    file.write_text(text.replace("gates=[],", f'gates=[], bounds=[Gate("lost.auc", at_most={most})],'))
    return Project(root)


@pytest.fixture
def replaced(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A project whose package was replaced by one that has learned nothing; both answered the same day."""

    def make(folder: Path) -> None:
        shutil.copytree(once(tmp_path_factory, "machines", machines.made), folder)
        machines.recorded(folder)
        file = folder / "definitions.py"
        file.write_text(file.read_text().replace(GOOD, POOR).replace("seeds=1,", f"seeds=1, seed={SEED},"))
        project = Project(folder)
        for step in (distill, export, verify, deploy):
            step(project)
        machines.ask(project, machines.DAY_SERVED)
        collect(project)

    return Path(shutil.copytree(once(tmp_path_factory, "replaced", make), tmp_path / "machines"))


@pytest.mark.accept
def test_a_deployment_that_loses_more_than_it_may_is_undone(replaced: Path) -> None:
    project = bound(replaced, 0.05)
    deployed = current_deployment(project.deployment_file)
    assert deployed is not None
    assert deployed.probation is not None
    before = deployed.probation.before
    result = monitor(project)
    newest, former = result.packages
    (loss,) = newest.lost
    assert former.lost == ()
    # The package before it answered the same questions, of this day and of another.
    assert (newest.package, loss.former, former.package) == (deployed.digest, before.digest, before.digest)
    assert 0.9 * ASKED < loss.rows == newest.rows <= ASKED
    assert loss.value is not None
    assert loss.least is not None
    assert 0.05 < loss.least < loss.value
    restored = current_deployment(project.deployment_file)
    assert restored is not None
    assert (restored.digest, restored.probation) == (before.digest, None)
    assert restored.undone is not None
    assert "of auc against" in restored.undone.why
    assert result.undone == restored.undone.why
    assert history(project)[0]["why"] == restored.undone.why
    assert problems(result)[KEEPS] == [result.undone]
    with pytest.raises(GateFailed, match="was undone"):
        require_bounds(result, replaced)
    again = monitor(project)
    assert again.undone == "", "it is done"
    assert [each.package for each in again.packages] == [before.digest, deployed.digest], "what is deployed comes first"
    (loss,) = again.packages[0].lost
    assert (loss.former, describe_loss(loss)[:11]) == ("", "no rollback")


def test_what_the_package_before_says_is_what_it_said(replaced: Path) -> None:
    """The day was answered by both: what is lost is the difference of what was measured of each."""
    project = bound(replaced, 0.9)
    result = monitor(project)
    (loss,) = result.packages[0].lost
    assert (loss.beyond, result.undone) == (False, "")
    asked, now = machines.questions_of(replaced, machines.DAY_SERVED), clock.moment(project.now())
    known = np.array([row["known_at"] <= now for row in asked])
    labels = np.array([row["failed"] for row in asked])[known]
    rows = RecordedAnswers(project.offline).read(ds.field("package") == loss.former).sort_by("at")
    said = np.array(rows["outputs"].to_pylist()[-ASKED:])[:, 0][known]
    ours = result.packages[0].measures["auc"].value
    assert loss.value == pytest.approx(auc(labels, said) - ours, abs=1e-12)


def test_who_deploys_it_again_means_it(replaced: Path) -> None:
    project = bound(replaced, 0.05)
    again = deploy(project).deployment
    result = monitor(project)
    assert [(loss.rows, loss.value) for loss in result.packages[0].lost] == [(0, None)]
    assert result.undone == ""
    assert current_deployment(project.deployment_file) == again


def test_without_a_way_back_it_says_why(replaced: Path) -> None:
    project = bound(replaced, 0.05)
    deployed = current_deployment(project.deployment_file)
    assert deployed is not None
    assert deployed.probation is not None
    shutil.rmtree(deployed.probation.before.package)
    result = monitor(project)
    assert result.packages[0].lost == ()
    assert any("the loss against the previous package is not known" in why for why in result.packages[0].unknown)
    assert current_deployment(project.deployment_file) == deployed
    shown = run("answers", "monitor", "failure", cwd=replaced)
    assert "is not known" in shown.stdout


@pytest.mark.parametrize("wrong", ['Gate("lost.ece", at_most=0.1)', 'Gate("lost.auc", at_least=0.1)',
                                   'Gate("lost.auc", at_most=-0.1)'])  # fmt: skip
def test_a_bound_that_means_nothing_is_refused(replaced: Path, wrong: str) -> None:
    bound(replaced, 0.05)
    file = replaced / "definitions.py"
    file.write_text(file.read_text().replace('Gate("lost.auc", at_most=0.05)', wrong))
    with pytest.raises(ConfigurationError, match=r"lost\."):
        monitor(Project(replaced))
