"""Which steps may run beside each other, and which of those that wait goes first: what Dagster is told of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, DAGSTER_PIPES_MESSAGES_ENV_VAR, encode_env_var

from isthmus.dagster import build_definitions
from isthmus.orchestration.graph.instance import dagster_home
from isthmus.orchestration.graph.resource import CHILD
from isthmus.orchestration.project import Project
from tests import processes
from tests.orchestration.shop import Shop

SERVE, ENGINE, TRAIN = ("serve", "2"), ("engine", "1"), ("train", "0")
STEPS = {
    "apply": ENGINE,
    "build": ENGINE,
    "materialize": SERVE,
    "maintain": SERVE,
    "check_tables": ENGINE,
    "check_drift": ENGINE,
    "late_order_training_set": ENGINE,
    "late_order_check_examples": ENGINE,
    "late_order_distill": TRAIN,
    "late_order_check_student": TRAIN,
    "late_order_export": TRAIN,
    "late_order_verify": SERVE,
    "late_order_deploy": SERVE,
}


def test_every_step_has_its_pool_and_what_is_served_goes_first(shop: Shop) -> None:
    definitions = build_definitions(shop.root)
    job = dg.define_asset_job("all", dg.AssetSelection.all())
    made = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("all")
    ops = {node.name: node.definition for node in made.nodes}
    assert {
        name: (op.pool, op.tags["dagster/priority"]) for name, op in ops.items() if isinstance(op, dg.OpDefinition)
    } == STEPS


def test_parts_of_a_training_are_ops_of_their_own(shop: Shop) -> None:
    shop.replace("[profiles.training]\n", "[profiles.training]\nparallel = 3\n", "isthmus.toml")
    (divided,) = [
        asset for asset in build_definitions(shop.root).assets or ()
        if isinstance(asset, dg.AssetsDefinition) and isinstance(asset.node_def, dg.GraphDefinition)
    ]  # fmt: skip
    ops = {node.name: node.definition for node in divided.node_def.nodes}  # type: ignore[attr-defined]
    assert {name: (op.pool, op.tags["isthmus/step"]) for name, op in ops.items()} == {
        **{f"late_order_distill_part_{n}": ("train", "distill-part") for n in range(3)},
        "late_order_distill_report": ("train", "distill"),
    }
    kinds = ("teacher", "teacher_outputs", "student", "control")
    assert divided.keys == {dg.AssetKey(["late_order", kind]) for kind in kinds}
    home = dagster_home(Project(shop.root))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
    assert limits == {"engine": 1, "train": 3, "serve": 1}


def test_an_instance_of_ours_has_the_limits_of_the_project(shop: Shop) -> None:
    with shop.toml.open("a") as file:
        file.write("\n[orchestration.pools]\nengine = 3\n")
    home = dagster_home(Project(shop.root))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
        settings = instance.get_concurrency_config().pool_config
    assert limits == {"engine": 3, "train": 1, "serve": 1}
    assert settings.pool_granularity is not None
    assert (settings.pool_granularity.value, settings.default_pool_limit) == ("op", 1)
    told = yaml.safe_load((home / "dagster.yaml").read_text())
    assert told["run_monitoring"]["enabled"]


RUN = """
import os, signal, sys
import dagster as dg

@dg.op(pool="engine")
def build():
    os.kill(os.getpid(), signal.SIGKILL)

@dg.job(executor_def=dg.in_process_executor)
def everything():
    build()

with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    everything.execute_in_process(instance=instance)
"""


@pytest.mark.accept
def test_a_killed_run_has_failed_and_gives_back_its_place_in_a_pool(shop: Shop) -> None:
    project = Project(shop.root)
    home = str(dagster_home(project))
    killed = subprocess.run([sys.executable, "-c", RUN, home], capture_output=True)
    assert killed.returncode == -signal.SIGKILL

    @dg.op(pool="engine")
    def build() -> None:
        # This run lives, whoever starts beside it.
        dagster_home(project)

    @dg.job(executor_def=dg.in_process_executor)
    def everything() -> None:
        build()

    with dg.DagsterInstance.from_config(home) as instance:
        assert instance.event_log_storage.get_concurrency_info("engine").active_slot_count == 1
        dagster_home(project)
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.FAILURE
        assert everything.execute_in_process(instance=instance).success
        assert instance.event_log_storage.get_concurrency_info("engine").active_slot_count == 0


STARTED = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Dagster does in the background
how, *command = sys.argv[1:]
child = subprocess.Popen([*command, str(os.getpid())])
if how == "at once":
    os.kill(os.getpid(), signal.SIGKILL)
child.wait()
"""


@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_step_ends_with_the_run_that_has_started_it(tmp_path: Path, how: str) -> None:
    """The next run, which gets its place, must not run beside it."""
    began = tmp_path / "began"
    os.mkfifo(began)
    (tmp_path / "isthmus.toml").write_text('[project]\nname = "endless"\n')
    (tmp_path / "definitions.py").write_text(f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(600)\n")
    extras = {"root": str(tmp_path), "asked": {"step": "apply", "nodes": ["contract"]}, "keys": {}}
    context = {"run_id": "a", "job_name": "b", "retry_number": 0, "extras": extras}
    environment = {
        DAGSTER_PIPES_CONTEXT_ENV_VAR: encode_env_var({"data": context}),
        DAGSTER_PIPES_MESSAGES_ENV_VAR: encode_env_var({"stdio": "stderr"}),
    }
    run = subprocess.Popen(
        [sys.executable, "-c", STARTED, how, sys.executable, *CHILD], cwd=tmp_path, env={**os.environ, **environment},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        if how == "later":
            began.read_bytes()
            run.kill()
        run.wait()
        assert not processes.orphans(tmp_path, 10)
    finally:
        processes.end(tmp_path)
