"""Every command that a message names is followed: it is run, and the error is gone."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from isthmus.features import clock
from isthmus.features.files import write_atomically
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout.decision import Decision, decision_file
from isthmus.serving.rollout.releases import undo
from tests.commandline import run
from tests.orchestration.shop import Shop, data_file
from tests.serving.support import wait

NAMED = re.compile("`isthmus ([a-z][^`]*)`")
REMOVED = re.compile(
    r"(/\S+) (?:cannot be read|was written).*(?:[Rr]emove|[Dd]elete) that folder|(?:[Rr]emove|[Dd]elete) (/\S+)"
)
PROGRESS = re.compile(r": +\d+% ")
LOOKUP = "features lookup late_order_server customer=3000009 store=s1 product=3"


def follow(shop: Shop, command: str, before: tuple[str, ...] = ()) -> list[str]:
    """Runs a command; if it fails, runs what its message names, and the command again. Returns the messages."""
    done = run(*shlex.split(command), cwd=shop.root)
    if done.returncode == 0:
        return []
    said = "\n".join(line for line in done.stderr.splitlines() if not PROGRESS.search(line))
    assert said not in before, f"came again: {said}"
    if removed := REMOVED.search(said):
        shutil.rmtree(removed[1] or removed[2])
    named = NAMED.findall(said)
    assert named, said
    messages = [said]
    for step in named:
        messages += follow(shop, step, (*before, said))
    return messages + follow(shop, command, (*before, said))


def edit(shop: Shop) -> None:
    shop.replace("SLOW = 60", "SLOW = 61")


def alter_the_contract(shop: Shop) -> None:
    shop.replace('"ttl": 259200000000', '"ttl": 259200000001', ".isthmus/contract.json")


def damage_the_table(shop: Shop) -> None:
    data_file(shop, "shelf_demand").write_bytes(b"PAR1")


def rewrite_the_table(shop: Shop) -> None:
    table = DeltaTable(shop.state / "offline" / "shelf_demand")
    write_deltalake(table, table.to_pyarrow_table(), mode="overwrite", partition_by=["event_day"])


def damage_the_rows(shop: Shop) -> None:
    with EmbeddedRedis(shop.state / "redis") as server, connect(server.url) as client:
        for key in client.keys("shop:customer:*"):
            if row := client.hget(key, "customer_orders"):
                client.hset(key, "customer_orders", row[:10])


def retype_the_source(shop: Shop) -> None:
    orders = pq.read_table(shop.orders)
    place = orders.schema.get_field_index("cents")
    pq.write_table(orders.set_column(place, "cents", orders["cents"].cast("double")), shop.orders)


def damage_the_registry(shop: Shop) -> None:
    (shop.state / "feast" / "registry.pb").write_bytes(b"nonsense")


def forget_what_was_materialized(shop: Shop) -> None:
    shutil.rmtree(shop.state / "offline" / "_materializations")


@pytest.mark.parametrize(
    ("damage", "command", "messages"),
    [
        (edit, "materialize", ["have changed since the last apply", "built under"]),
        (damage_the_rows, LOOKUP, ["a value of 10 bytes"]),
        *(
            pytest.param(*case, marks=pytest.mark.accept)
            for case in [
                (edit, "build shelf_demand --catch-up", ["have changed since the last apply", "outside the range"]),
                (alter_the_contract, "build", ["its content has hash"]),
                (damage_the_table, "materialize", ["cannot be read"]),
                (rewrite_the_table, "materialize", ["was written by another tool"]),
                (retype_the_source, "build customer_orders --from 2024-02-01", ["has type double and had bigint"]),
                (damage_the_registry, "apply", ["registry in .* is damaged"]),
                (forget_what_was_materialized, "features training-set --as-served", ["nothing was materialized"]),
            ]
        ),
    ],
)
def test_what_a_message_names_mends_it(
    built: Shop, damage: Callable[[Shop], None], command: str, messages: list[str]
) -> None:
    damage(built)
    followed = follow(built, command)
    assert len(followed) == len(messages), followed
    assert all(re.search(message, said) for message, said in zip(messages, followed, strict=True)), followed


@pytest.mark.accept
def test_messages_lead_from_nothing_to_a_deployment_and_back_there(shop: Shop) -> None:
    shop.replace('Gate("lift_kept", at_least=0.95)', "")
    shop.append("\n[profiles.serving]\nlatency_objective_ms = 1000\nprobation_seconds = 0\n", "isthmus.toml")
    steps = [re.findall("`isthmus ((?:features |model )?[a-z-]+)", said)[0] for said in follow(shop, "deploy")]
    assert steps == ["model export", "apply", "distill", "features training-set", "build", "verify", "build"]

    latest = shop.state / "training" / "late_order" / "latest"
    (latest.with_name(latest.read_text()) / "statistics.json").write_bytes(b"{")
    assert "its statistics cannot be read" in follow(shop, "features quality")[0]
    (latest.with_name(latest.read_text()) / "data.parquet").write_bytes(b"PAR1")
    assert "data.parquet cannot be read" in follow(shop, "distill")[0]
    for name in ("training", "models"):
        (shop.state / name / "late_order" / "latest").unlink()
    assert "not found in" in follow(shop, "model export")[0]
    for student in (shop.state / "models" / "late_order").iterdir():
        if student.is_dir():
            shutil.rmtree(student)
    assert "is missing, with the report of the package's student" in follow(shop, "deploy")[0]
    (shop.state / "verdicts" / "late_order.json").write_bytes(b"{")
    assert "is not a verdict" in follow(shop, "deploy")[0]


@pytest.mark.accept
@pytest.mark.slowest
def test_messages_about_candidates_and_the_way_back_lead_there(exported: Shop) -> None:
    exported.append("probation_seconds = 3600\n", "isthmus.toml")
    file = exported.state / "deployment.json"

    def done(*verbs: str) -> None:
        for verb in verbs:
            assert run(*verb.split(), cwd=exported.root).returncode == 0

    def leads(command: str, *sentences: str) -> None:
        followed = follow(exported, command)
        assert len(followed) == len(sentences), followed
        assert all(map(re.search, sentences, followed)), followed

    def in_force() -> Deployment:
        return Deployment.loads(file.read_bytes(), str(file))

    leads("deploy promote", "nothing is deployed", "has no verdict", "has no candidate")
    assert "no deployment before" in run("deploy", "rollback", cwd=exported.root).stderr
    exported.replace("epochs = 2", "epochs = 3", "isthmus.toml")
    done("distill", "model export", "verify")
    leads("deploy rollback", "no deployment before .* for another package")
    first = in_force()

    done("deploy canary 0.5")
    candidate = in_force().candidate
    assert candidate is not None
    given_up = candidate.deployment
    why = Decision(given_up.digest, given_up.deployed_at, clock.now(), "it was slow")
    write_atomically(decision_file(file), why.dumps())
    leads("deploy promote", "was given up: it was slow", "has no candidate")
    second = in_force()
    assert (second.digest, second.probation and second.probation.before.digest) == (given_up.digest, first.digest)

    exported.append("threads = 2\n", "isthmus.toml")
    assert "was measured with threads 1; expected threads 2" in follow(exported, "deploy")[0]
    third = in_force()
    assert undo(file, third, "it failed", at=clock.now())
    assert in_force().runtime_key == second.runtime_key
    said = run("deploy", "rollback", cwd=exported.root).stderr
    assert "the server has gone back by itself" in said
    done(*NAMED.findall(said))
    assert in_force().runtime_key == first.runtime_key


WAITS = """    if (folder := Path(__file__).with_name("wait")).exists():
        folder.rename(folder.with_name("waits"))
        while folder.with_name("waits").exists():
            time.sleep(0.05)
    second = F.unix_seconds("ordered_at")
    day"""
"""Of the second view: the first one is ready to be written by then."""


@pytest.mark.accept
def test_a_build_that_met_the_rows_of_another_is_run_again(shop: Shop) -> None:
    shop.replace('    second = F.unix_seconds("ordered_at")\n    day', WAITS)
    shop.replace(
        "from datetime import timedelta\n", "import time\nfrom datetime import timedelta\nfrom pathlib import Path\n"
    )
    assert follow(shop, "apply") == []
    (shop.root / "wait").mkdir()
    command = [str(Path(sys.executable).with_name("isthmus")), "build"]
    with subprocess.Popen(command, cwd=shop.root, stderr=subprocess.PIPE, text=True) as late:
        wait(lambda: (shop.root / "waits").exists(), "the transform that waits", 60)
        assert follow(shop, "build") == []
        (shop.root / "waits").rmdir()
        said = late.communicate()[1]
    assert "another process wrote to it at the same moment" in said
    assert "try again after the other run ends" in said, "also of a collection"
    assert follow(shop, "build") == []
