"""Retired contracts are forgotten with their rows: not too early, not for long, and not left behind by a kill."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import redis

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, DependencyError
from isthmus.features.files import write_atomically
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.pipeline import Client
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.apply.switch import forget
from isthmus.orchestration.models.release import rollback
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.serving.deployment.history import DeploymentHistory, Event
from isthmus.serving.rollout.releases import current_deployment
from tests.orchestration.apply.test_switch import CHANGED, LOOKUP, PREDICT, contract_of, deployed
from tests.orchestration.server.served import served
from tests.orchestration.shop import Open, Shop
from tests.serving.support import wait


def long_ago(project: Project) -> None:
    """As if what has happened had happened long ago."""
    generations = project.generations()
    retired = tuple(replace(item, at=0) for item in generations.retired)
    replace(generations, retired=retired).write(project.contract_file)
    if project.deployment_file.exists():
        os.utime(project.deployment_file, (0, 0))


def fields(client: Client) -> set[str]:
    """The names under which rows of views are in Redis."""
    names = client.scan_iter("shop:*", _type="HASH")
    return {cast("bytes", field).decode() for name in names for field in client.hkeys(name)}


@contextmanager
def changed_once(built: Shop, project: Open) -> Iterator[tuple[Project, Client, str]]:
    """A project whose contract is the second, its Redis, and that Redis's URL; the first contract is long retired."""
    built.append("\n[stores]\nkeep_contracts_hours = 0\n", "isthmus.toml")
    built.replace(*CHANGED)
    apply(project(built))
    build(project(built))
    opened = project(built)
    with opened.redis() as url, connect(url) as client:
        materialize(opened)
        long_ago(opened)
        yield opened, client, url


def test_a_contract_stays_for_as_long_as_a_server_may_need_to_learn_of_the_next(
    built: Shop, project: Open, tmp_path: Path
) -> None:
    first = project(built).applied()
    built.append("\n[stores]\nkeep_contracts_hours = 0\n", "isthmus.toml")
    built.replace(*CHANGED)
    apply(project(built))
    build(project(built))
    opened = project(built)
    with opened.redis() as url, connect(url) as client:
        for _ in range(2):
            materialize(opened)
            assert [item.contract for item in opened.generations().retired] == [first]
            assert "shelf_demand" in fields(client)
        write_atomically(opened.deployment_file, b"{}")
        long_ago(opened)
        materialize(opened)
        assert "shelf_demand" in fields(client), "a server may have read the deployment before it was damaged"
        deployed(opened, tmp_path / "package", opened.applied())
        materialize(opened)
        assert "shelf_demand" in fields(client), "a server may still have the model before"
        long_ago(opened)
        materialize(opened)
        assert opened.generations().retired == ()
        assert "shelf_demand" not in fields(client)


def test_what_is_not_dropped_is_dropped_the_next_time(built: Shop, project: Open) -> None:
    with changed_once(built, project) as (opened, client, url):
        store = OnlineStore(client, opened.applied())
        # As if it were killed in the middle: its record is gone, its rows are not.
        client.acl_setuser("default", commands=["-scan"])
        with pytest.raises(DependencyError), translate_errors(url):
            forget(opened, store)
        assert opened.generations().retired == (), "servers know of it"
        client.acl_setuser("default", commands=["+scan"])
        assert "shelf_demand" in fields(client)
        forget(opened, store)
        assert "shelf_demand" not in fields(client)
        assert opened.generations().forgotten == ()


def test_commands_go_on_while_rows_are_dropped(built: Shop, project: Open) -> None:
    with (
        changed_once(built, project) as (opened, client, url),
        # It waits for as long as it takes.
        redis.Redis.from_url(url, protocol=2) as patient,
        ThreadPoolExecutor(1) as thread,
    ):
        second = opened.applied()
        client.client_pause(600_000, all=False)
        try:
            dropping = thread.submit(forget, opened, OnlineStore(patient, second))
            wait(lambda: dropping.done() or bool(opened.generations().forgotten), "the drop", 60)
            # Back to what is being forgotten: its rows are not those of this contract.
            built.replace(*reversed(CHANGED))
            back = apply(project(built))
            assert (back.current, dropping.done()) == (second.hash, False)
            following = project(built).applied().views["shelf_demand"].online_name
            assert following not in {"shelf_demand", second.views["shelf_demand"].online_name}
            # Two at once might drop what is written after the first.
            forget(opened, OnlineStore(client, second))
            assert not dropping.done()
        finally:
            client.client_unpause()
        dropping.result()
        assert "shelf_demand" not in fields(client)
        build(project(built))
        materialize(project(built))
        assert project(built).generations().current == project(built).applied()
        assert following in fields(client)


def test_no_contract_uses_slots_whose_rows_are_being_dropped(built: Shop, project: Open) -> None:
    built.replace(*CHANGED)
    apply(project(built))
    generations = project(built).generations()
    assert generations.next is not None
    replace(generations, next=None, forgotten=(generations.next,)).write(project(built).contract_file)
    apply(project(built))
    again = project(built).generations()
    assert again.next is not None
    assert again.next.hash == generations.next.hash
    assert again.deletable_views() == [generations.next.views["shelf_demand"]]


def test_a_model_is_not_put_back_under_a_contract_that_is_being_forgotten(
    built: Shop, project: Open, tmp_path: Path
) -> None:
    first = project(built).applied()
    with changed_once(built, project) as (opened, _, _), ThreadPoolExecutor(1) as thread:
        deployed(opened, tmp_path / "package", first)
        digest = rollout_of(opened)
        opened.deployment_file.unlink()
        with opened.locked("contract"), opened.locked("retirement"):
            back = thread.submit(rollback, opened, digest)
            wait(lambda: back.done() or waits_for(opened.state / "retirement.lock"), "the rollback", 60)
            generations = opened.generations()
            replace(generations, retired=(), forgotten=(first,)).write(opened.contract_file)
        with pytest.raises(ContractMismatch, match="view shelf_demand"):
            back.result()
        assert not opened.deployment_file.exists()


def rollout_of(project: Project) -> str:
    """Notes what is deployed in the history; returns the digest of its package."""
    deployment = current_deployment(project.deployment_file)
    assert deployment is not None
    DeploymentHistory(project.deployment_file).add(Event(at=1, action="deploy", deployment=deployment))
    return deployment.digest


def changed_since(opened: Project, shop: Shop, project: Open, package: Path) -> tuple[Contract, str]:
    """Deploys a package under the contract in force, then builds for another: that contract, and the other's hash."""
    first = opened.applied()
    deployed(opened, package, first)
    shop.append("\n[stores]\nkeep_contracts_hours = 0\n", "isthmus.toml")
    shop.replace(*CHANGED)
    second = apply(project(shop)).contract
    build(project(shop))
    return first, second


def waits_for(file: Path) -> bool:
    """Whether somebody waits for the lock on a file."""
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and line.split()[-3].endswith(f":{file.stat().st_ino}") for line in locks)


@pytest.mark.accept
def test_contracts_are_forgotten_when_their_time_is_over_and_no_model_needs_them(
    built: Shop, project: Open, tmp_path: Path
) -> None:
    opened = project(built)
    first, second = changed_since(opened, built, project, tmp_path / "package")
    with opened.redis() as url, connect(url) as client:
        materialize(project(built))
        long_ago(opened)
        materialize(project(built))
        slot = project(built).applied().views["shelf_demand"].online_name
        assert slot != "shelf_demand"
        assert {"shelf_demand", slot} <= fields(client)
        assert [item.contract for item in project(built).generations().retired] == [first], "the model needs it"
        with served(project(built), model=True) as http:
            answer = http.post("/predict", json=PREDICT)
            assert (answer.status_code, answer.headers["isthmus-contract"]) == (200, first.hash)
            assert contract_of(http) == second
            opened.deployment_file.unlink()
            wait(lambda: not http.get("/models").json()["models"], "the model to be gone")
            materialize(project(built))
            assert (slot in fields(client), "shelf_demand" in fields(client)) == (True, False)
            assert project(built).generations().retired == ()
            deployed(opened, tmp_path / "again", first)
            wait(lambda: http.get("/models").json()["models"], "the model")
            refused = http.post("/predict", json=PREDICT)
            assert (refused.status_code, refused.json()["error"]) == (409, "ContractMismatch")
            assert "view shelf_demand" in refused.json()["found"]
            assert http.post("/get-online-features", json=LOOKUP).status_code == 200


def test_a_package_that_cannot_be_read_for_now_keeps_the_contract_of_its_model(
    built: Shop, project: Open, tmp_path: Path
) -> None:
    opened = project(built)
    first, _ = changed_since(opened, built, project, tmp_path / "package")
    (tmp_path / "package").rename(tmp_path / "away")
    materialize(project(built))
    long_ago(opened)
    materialize(project(built))
    assert [item.contract for item in project(built).generations().retired] == [first]
    opened.deployment_file.unlink()
    materialize(project(built))
    assert project(built).generations().retired == ()
