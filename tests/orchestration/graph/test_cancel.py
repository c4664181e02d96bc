"""A run of Dagster that is canceled while a student learns, and the next one."""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import dagster as dg
import pytest

from isthmus.orchestration.graph.resource import lines
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.set import training_set
from tests.orchestration.shop import Shop

WORKER = """
import signal, sys
from pathlib import Path

import dagster as dg
from dagster._utils.interrupts import setup_interrupt_handlers

from isthmus.dagster import build_definitions

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it, in the background
setup_interrupt_handlers()
root, home, run = sys.argv[1:]
roles = ("teacher", "teacher_outputs", "student", "control")
made = dg.AssetSelection.assets(*(dg.AssetKey(["late_order", role]) for role in roles))
student = dg.define_asset_job("student", made.without_checks())
job = dg.Definitions.merge(build_definitions(root), dg.Definitions(jobs=[student])).resolve_job_def("student")
with dg.DagsterInstance.local_temp(home) as instance:
    job.execute_in_process(instance=instance, run_id=run, raise_on_error=False)
"""
"""A run in a process of its own, which takes signals as Dagster's run workers do."""


class Run:
    """A run of the student, in its worker."""

    def __init__(self, shop: Shop, home: Path) -> None:
        self.home, self.id = home, str(uuid.uuid4())
        command = [sys.executable, "-c", WORKER, str(shop.root), str(home), self.id]
        self.worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self, message: str) -> None:
        """Until its log has a message."""
        with dg.DagsterInstance.local_temp(str(self.home)) as instance:
            while not any(message in entry.user_message for entry in instance.all_logs(self.id)):
                assert self.worker.poll() is None, f"it ended and never said: {message}"
                time.sleep(0.2)

    def cancel(self) -> None:
        """As Dagster does it: the run is noted, and its worker is told."""
        with dg.DagsterInstance.local_temp(str(self.home)) as instance:
            run = instance.get_run_by_id(self.id)
            assert run is not None
            instance.report_run_canceling(run)
        self.worker.terminate()

    def ended(self) -> dg.DagsterRunStatus:
        """How, once it has."""
        assert self.worker.wait(90) == 0
        with dg.DagsterInstance.local_temp(str(self.home)) as instance:
            run = instance.get_run_by_id(self.id)
        assert run is not None
        return run.status


@pytest.mark.accept
@pytest.mark.slowest
def test_a_canceled_run_leaves_a_checkpoint_and_the_next_one_goes_on_from_it(built: Shop, tmp_path: Path) -> None:
    built.replace("epochs = 2", "epochs = 150", "isthmus.toml")
    training_set(Project(built.root))
    (tmp_path / "home").mkdir()
    canceled = Run(built, tmp_path / "home")
    canceled.wait("student-0, epoch")
    canceled.cancel()
    # Nothing kills the process of a step: were it still there after a minute, the run would have failed instead.
    assert canceled.ended() is dg.DagsterRunStatus.CANCELED
    (record,) = built.state.rglob("checkpoint-*/record.json")
    step = json.loads(record.read_bytes())["standing"]["step"]
    again = Run(built, tmp_path / "home")
    again.wait(f"student-0, goes on after step {step} of ")
    again.worker.terminate()
    again.ended()


def test_what_a_step_says_just_before_it_ends_is_read(tmp_path: Path) -> None:
    """The last lines come while the reader asks whether there is more to come, and one of them in two parts."""
    file = tmp_path / "messages"
    file.write_text('{"first": 1}\n{"sec')
    said = iter([(False, 'ond": 2}\n'), (False, ""), (True, '{"third": 3}\n{"fourth": 4}\n')])

    def ended() -> bool:
        answer, text = next(said)
        with file.open("a") as more:
            more.write(text)
        return answer

    assert [json.loads(line) for line in lines(file, ended)] == [
        {"first": 1},
        {"second": 2},
        {"third": 3},
        {"fourth": 4},
    ]
