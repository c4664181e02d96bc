"""What `contract show` and `contract diff` say, and which changes of the definitions a package outlives."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, DataError, GateFailed
from isthmus.features.files import read_pointer
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.apply.diff import apply_diff
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.verify import verify
from isthmus.package.manifest import package_digest
from tests.commandline import run
from tests.orchestration.cli.test_cli import strictly
from tests.orchestration.shop import Open, Shop, files, with_moment

ELSEWHERE = """

@transform(entities=[customer], sources=[orders], schema=[Field("cents", Int64)], ttl=None)
def spent(orders: DataFrame) -> DataFrame:
    return orders.select("customer", "ordered_at", F.col("delivered_at").alias("known_at"), "cents")


spending = FeatureService("spending", features=[spent])
"""
SAME = "keep working as they are"
MAKE = "must be trained again"


@pytest.mark.accept
@pytest.mark.slowest
def test_a_package_outlives_what_it_does_not_read(exported: Shop, project: Open) -> None:
    package = read_pointer(exported.state / "packages" / "late_order.latest")
    verify(project(exported))
    before = deploy(project(exported)).deployment
    exported.append(ELSEWHERE)
    found = apply_diff(project(exported))
    assert found.changes == ["view spent is new", "service spending is new"]
    assert found.stale == {"training set": ["late_order"], "package": [], "deployment": []}
    apply(project(exported))
    build(project(exported), ["spent"])
    materialize(project(exported))
    with pytest.raises(GateFailed, match="its verdict is about contract"):
        deploy(project(exported))
    verdict = verify(project(exported))
    assert (verdict.passed, verdict.package) == (True, package_digest(package))
    measured = package.parents[1] / "serving" / f"{package.name}.json"
    half = measured.read_bytes()
    measured.unlink()
    with pytest.raises(GateFailed, match="boundary card of late_order: the serving half is missing"):
        deploy(project(exported))
    measured.write_bytes(half)
    after = deploy(project(exported)).deployment
    assert (after.digest, after.contract) == (before.digest, before.contract)
    assert after.contract != project(exported).applied().hash
    with pytest.raises(DataError, match="training set of late_order: was written under contract"):
        distill(project(exported))

    shown = run("contract", "diff", str(package), cwd=exported.root).stdout
    assert "view spent is new\nservice spending is new\n" in shown
    assert outcomes(shown) == {"late_order_device": SAME, "late_order_server": SAME, "spending": "are not trained yet"}

    exported.replace("ttl=timedelta(days=3)", "ttl=timedelta(days=2)")
    assert apply_diff(project(exported)).stale == {
        "training set": ["late_order"], "package": ["late_order"], "deployment": ["late_order"],
    }  # fmt: skip
    apply(project(exported))
    build(project(exported))
    materialize(project(exported))
    assert verify(project(exported)).package is None, "it cannot run under this contract"
    with pytest.raises(ContractMismatch, match=r"\(view shelf_demand: ttl was 3 days, is 2 days\)"):
        deploy(project(exported))
    shown = run("contract", "diff", str(package), "applied", cwd=exported.root).stdout
    assert outcomes(shown)["late_order_device"] == outcomes(shown)["late_order_server"] == MAKE


def outcomes(shown: str) -> dict[str, str]:
    """Service to what is said of its models."""
    lines = (re.split(r" {2,}", line.strip()) for line in shown.partition("───")[2].splitlines()[1:])
    return {words[0]: words[1] for words in lines if len(words) > 1}


def test_show_explains_every_declaration(built: Shop, project: Open) -> None:
    before = files(built.root)
    contract = project(built).applied()
    shown = run("contract", "show", cwd=built.root)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout, "no colors off a terminal"
    assert "…" not in shown.stdout
    assert f"project shop, contract {contract.hash[:12]}" in shown.stdout
    for view in contract.views.values():
        part = shown.stdout.partition(f"\nview {view.name}\n")[2].partition("\nview ")[0]
        assert f"hash  {view.hash[:12]}\n" in part
        for field in view.fields:
            place = "on the server only" if field.available == "server" else "on devices, too"
            assert re.search(rf"^ {field.name} +{re.escape(field.dtype.name)} +{place} *$", part, re.M), field
    words = shown.stdout.partition("\nview shelf_demand\n")[2]
    for line in ("keys  store String, product Int32", "ttl  3 days", "delay  1 hour", "sources  orders", "version  1"):
        assert f" {line}\n" in words
    for line in ("features  shelf_demand: sold_1d, distance", "weight Float64\n", "label  late Int64", "source orders"):
        assert line in shown.stdout
    assert all(f"hash  {service.hash[:12]}\n" in shown.stdout for service in contract.services.values())
    document = strictly(run("contract", "show", "--json", cwd=built.root).stdout)
    assert document["hash"] == contract.hash
    assert {name: view["hash"] for name, view in document["views"].items()} == {
        name: view.hash for name, view in contract.views.items()
    }
    assert document["services"]["late_order_device"]["hash"] == contract.services["late_order_device"].hash
    assert files(built.root) == before


def test_show_explains_what_is_computed_at_a_request(shop: Shop, project: Open) -> None:
    with_moment(shop)
    shop.replace('description="What is known when an order is placed"',
                 'expectations=[Expect.between("hour", 0, 23)], defaults={"hour": 12, "store": "s0"}')  # fmt: skip
    shop.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    apply(project(shop))
    contract = project(shop).applied()
    shown = run("contract", "show", cwd=shop.root).stdout
    part = (
        shown.partition("\nrequest transform moment\n")[2]
        .partition("\nrequest transform ")[0]
        .partition("\nservice ")[0]
    )
    for line in ("takes  shelf_demand: sold_1d", "request fields  hour Int64, weight Float64, store String",
                 "of store  else 's0'", "of hour  from 0 to 23, else 12",
                 f"hash  {contract.transforms['moment'].hash[:12]}"):  # fmt: skip
        assert re.search(rf"^ +{re.escape(line)}$", part, re.M), line
    assert re.search(r"^ per_sold +Float64 +on devices, too *$", part, re.M)
    assert "\nrequest source basket\n" in shown
    device = shown.partition("\nservice late_order_device\n")[2].partition("\nservice ")[0]
    computed = "basket: store, product, hour, weight; moment: hour_sin, per_sold, store_code, heavy"
    assert re.search(rf"^ +computed  {computed}$", device, re.M)
    document = strictly(run("contract", "show", "--json", cwd=shop.root).stdout)
    assert document["transforms"]["moment"]["hash"] == contract.transforms["moment"].hash


def test_diff_names_what_changed_and_what_follows(built: Shop, project: Open) -> None:
    same = run("contract", "diff", cwd=built.root)
    assert same.returncode == 0
    assert "nothing has changed" in same.stdout
    assert outcomes(same.stdout) == {"late_order_device": SAME, "late_order_server": SAME}
    built.replace("ttl=timedelta(days=7)", "ttl=timedelta(weeks=4)")
    built.replace('Field("member", Bool),', 'Field("member", Bool, available="device"),')
    built.append(ELSEWHERE)
    lines = [
        "view customer_facts: feature member was on the server only, is on devices, too",
        "view customer_orders: ttl was 7 days, is 28 days",
        "view spent is new",
        "service spending is new",
    ]
    contract = built.state / "contract.json"
    for names in ([], ["applied"], ["applied", "definitions"], [str(contract)], [".", "definitions"]):
        told = run("contract", "diff", *names, cwd=built.root)
        assert (told.returncode, told.stderr) == (0, "")
        assert "\n".join(lines) in told.stdout
        assert outcomes(told.stdout) == {
            "late_order_device": SAME, "late_order_server": MAKE, "spending": "are not trained yet",
        }  # fmt: skip
    document = strictly(run("contract", "diff", "--json", cwd=built.root).stdout)
    assert [change["said"] for change in document["changes"]] == lines
    assert document["changes"][1] == {
        "kind": "view", "name": "customer_orders", "outcome": "changed", "parts": ["ttl was 7 days, is 28 days"],
        "said": lines[1],
    }  # fmt: skip
    assert document["services"]["late_order_server"] == {"outcome": "changed", "because": lines[:2]}
    assert document["services"]["late_order_device"] == {"outcome": "same", "because": []}
    back = strictly(run("contract", "diff", "definitions", "applied", "--json", cwd=built.root).stdout)
    assert back["services"]["spending"]["outcome"] == "gone"
    assert (back["before"]["hash"], back["after"]["hash"]) == (document["after"]["hash"], document["before"]["hash"])


def test_files_and_packages_need_no_project(built: Shop, tmp_path: Path) -> None:
    text = (built.state / "contract.json").read_bytes()
    package = tmp_path / "package"
    package.mkdir()
    # As a package has it: the same content in another layout.
    (package / "contract.json").write_text(json.dumps(json.loads(text), indent=2))
    (tmp_path / "mine.json").write_bytes(text)
    done = run("contract", "diff", "package", "mine.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing has changed" in done.stdout
    elsewhere = run("contract", "show", "--project", str(built.root), "--json", cwd=tmp_path)
    assert strictly(elsewhere.stdout)["hash"] == Contract.loads(text).hash


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["show", "nowhere"],
            2,
            "contract 'nowhere': cannot be read (No such file or directory); expected a contract.j",
        ),
        (["show", "data"], 2, "contract 'data': cannot be read (No such file or directory)"),
        (["show", "definitions.py"], 1, "definitions.py: is not a contract"),
        (["diff", "isthmus.toml", "definitions"], 1, "isthmus.toml: is not a contract"),
        (["show"], 1, "project shop: nothing has been applied. Run `isthmus apply`"),
        (["diff", "."], 1, "project shop: nothing has been applied. Run `isthmus apply`"),
        (["diff", "a", "b", "c"], 2, "command line: Got unexpected extra argument (c)"),
    ],
)
def test_what_is_no_contract_is_named(shop: Shop, arguments: list[str], code: int, said: str) -> None:
    done = run("contract", *arguments, cwd=shop.root)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    document: dict[str, Any] = strictly(run("contract", *arguments, "--json", cwd=shop.root).stdout)
    assert document["error"] in {"RequestError", "ContractMismatch"}


def test_definitions_that_are_wrong_are_named(built: Shop) -> None:
    built.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=-7)")
    done = run("contract", "diff", cwd=built.root)
    assert (done.returncode, done.stdout) == (2, "")
    assert "view customer_orders, ttl" in done.stderr
