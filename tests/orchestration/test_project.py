import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from isthmus import ConfigurationError
from isthmus.features import clock
from isthmus.orchestration.project import Definitions, Project
from tests.orchestration.shop import NOW, Shop


def definitions(shop: Shop) -> Definitions:
    return Project(shop.root).definitions


def code(shop: Shop) -> dict[str, str]:
    """View to the digest of its code."""
    return {name: view.code for name, view in definitions(shop).contract.views.items()}


def problems(shop: Shop) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        definitions(shop)
    assert caught.value.exit_code == 2
    assert caught.value.where == str(shop.definitions)
    return [str(problem) for problem in caught.value.problems]


def test_what_a_module_declares(shop: Shop) -> None:
    found = definitions(shop)
    assert list(found.views) == ["customer_orders", "shelf_demand", "customer_facts"]
    assert list(found.spines) == ["placed"]
    assert list(found.services) == ["late_order_device", "late_order_server"]
    assert list(found.distillations) == ["late_order"]
    assert [column.name for column in found.contract.views["shelf_demand"].keys] == ["store", "product"]


def test_the_clock_stands_where_the_settings_say(shop: Shop) -> None:
    assert Project(shop.root).now() == clock.micros(datetime.fromisoformat(NOW))
    shop.replace(f"now = {NOW}\n", "", "isthmus.toml")
    project = Project(shop.root)
    assert project.fixed_now is None
    assert abs(project.now() - clock.micros(datetime.now(UTC))) < 5_000_000


def test_the_nearest_file_upwards_is_the_project(shop: Shop, tmp_path: Path) -> None:
    deep = shop.root / "data" / "deep"
    deep.mkdir()
    assert Project.find(deep).root == shop.root
    with pytest.raises(ConfigurationError) as caught:
        Project.find(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: isthmus.toml: not found in this folder or its parents; expected a project folder. "
        "Change to the project's folder, or pass it with --project"
    )


def test_missing_definitions(shop: Shop) -> None:
    shop.definitions.unlink()
    assert problems(shop) == ["definitions: the file does not exist; expected a Python module"]


LAST = 'raise ValueError("no luck")\n'


def last_line(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LAST, "ValueError: no luck"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("from isthmus import Float128\n", "ImportError: cannot import name 'Float128' from 'isthmus'"),
        ("undefined\n", "NameError: name 'undefined' is not defined"),
        ("transfrom\n", "NameError: name 'transfrom' is not defined (did you mean transform?)"),
        ("from isthmus import Expct\n", "ImportError: cannot import name 'Expct' from 'isthmus'"),
        ("Gate.at_leest\n", "AttributeError: type object 'Gate' has no attribute 'at_leest' (did you mean at_least?)"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_definitions_that_fail(shop: Shop, text: str, found: str) -> None:
    shop.append(text)
    (problem,) = problems(shop)
    assert problem.startswith(f"line {last_line(shop.definitions)}: fails with {found}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "transform(entites=[customer], sources=[orders], schema=[], ttl=None)",
            "transform takes no argument 'entites' (did you mean entities?); expected one of delay, entities,",
        ),
        (
            "FeatureService('s', feature=[customer_orders])",
            "FeatureService takes no argument 'feature' (did you mean features?); expected one of description,",
        ),
        (
            "import isthmus\nisthmus.Settings(epoch=3)",
            "Settings takes no argument 'epoch' (did you mean epochs?); expected one of",
        ),
        ("Tabular(hiden=(16,))", "Tabular takes no argument 'hiden' (did you mean hidden?); expected one of"),
        ("Distillation('d', teachr=on_server)", "Distillation takes no argument 'teachr' (did you mean teacher?)"),
        # A name that a function of ours has, too.
        (
            "def split(texts):\n    return texts\n\n\nsplit(text=1)",
            "split takes no argument 'text' (did you mean texts?); expected texts",
        ),
    ],
)
def test_a_misspelled_argument_is_named_with_the_nearest(shop: Shop, text: str, found: str) -> None:
    shop.append(f"{text}\n")
    (problem,) = problems(shop)
    assert problem.startswith(f"line {last_line(shop.definitions)}: {found}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "transform(sources=[orders], schema=[])",
            (
                "transform is called without 'entities' and 'ttl'; expected entities, schema, sources, ttl at least. "
                "Write ttl=timedelta(days=30), for example, or ttl=None for values that never expire"
            ),
        ),
        ("Source(path='orders.csv')", "Source is called without 'name'; expected name at least"),
        ("Field('total')", "Field is called without 'dtype'; expected dtype, name at least"),
    ],
)
def test_a_missing_argument_is_named_with_all_that_are_needed(shop: Shop, text: str, found: str) -> None:
    shop.append(f"{text}\n")
    assert problems(shop) == [f"line {last_line(shop.definitions)}: {found}"]


@pytest.mark.parametrize("text", [LAST, "def f(:\n"])
def test_a_helper_that_fails_is_the_place(shop_with_helper: Shop, text: str) -> None:
    shop_with_helper.append(text, "helpers.py")
    (problem,) = problems(shop_with_helper)
    assert problem.startswith(f"helpers.py, line {last_line(shop_with_helper.root / 'helpers.py')}: fails with ")


def test_a_failed_import_leaves_nothing_behind(shop_with_helper: Shop) -> None:
    path, modules = list(sys.path), set(sys.modules)
    shop_with_helper.append(LAST)
    problems(shop_with_helper)
    assert sys.path == path
    assert not {"helpers", "definitions"} & (set(sys.modules) - modules)


def test_all_problems_of_the_definitions_at_once(shop: Shop) -> None:
    shop.replace('Field("sold_1d", Int64, "device")', 'Field("sold_1d", int, "phone")')
    shop.replace('join_keys={"customer": Int64}', 'join_keys={"customer": Float64}')
    shop.replace("delay=timedelta(hours=1)", "delay=timedelta(hours=-1)")
    shop.replace("teacher_rounds=8", "teacher_rounds=0")
    shop.replace("seeds=1", "seeds=1, split=(0.5, 0.5, 0.5)")
    shop.append("second = FeatureService('on demand', features=[customer_orders, customer_orders])\n")
    found = "\n".join(problems(shop))
    for text in (
        "distillation late_order: teacher_rounds: 0; expected at least 1",
        "distillation late_order: split: (0.5, 0.5, 0.5); expected three shares",
        "entity customer, join key customer: type Float64; expected one of Bool, Bytes, Int32, Int64",
        "view shelf_demand, field 'sold_1d': type <class 'int'>; expected one of Bool, Bytes, Float32",
        "view shelf_demand, field 'sold_1d': available='phone'; expected 'server' or 'device'",
        "view shelf_demand, delay: -1 day, 23:00:00; expected zero or a positive time",
        "service 'on demand': 'on demand' is not a usable name; expected letters, digits and _",
        "customer_orders__orders_7d appears twice; expected each feature once",
    ):
        assert text in found


def test_a_part_that_must_be_a_list_is_named(shop: Shop) -> None:
    shop.append("phone = FeatureService('phone', features=shelf_demand)")
    (problem,) = problems(shop)
    assert problem.startswith(
        "service phone, features: FeatureView 'shelf_demand'; expected a list, each item a FeatureView"
    )
    assert problem.endswith(": features=[shelf_demand]")


def test_two_functions_with_one_name(shop: Shop) -> None:
    text = shop.definitions.read_text()
    begin = text.index("@transform(\n    entities=[shelf]")
    shop.append("\n\n" + text[begin : text.index("@transform(\n    entities=[customer],\n    sources=[customers]")])
    lines = [n for n, line in enumerate(shop.definitions.read_text().splitlines(), 1) if "def shelf_demand" in line]
    assert (
        f"line {lines[1]}: 'shelf_demand': is already declared in line {lines[0]}; expected unique names"
        in problems(shop)
    )


def test_two_views_with_one_name(shop: Shop) -> None:
    shop.append("import dataclasses\nsecond = dataclasses.replace(shelf_demand, ttl=None)\n")
    line = shop.definitions.read_text().partition("@transform(\n    entities=[shelf]")[0].count("\n") + 1
    place = f"view 'shelf_demand' (definitions.py:{line})"
    assert problems(shop) == [f"{place}: a second view has this name; expected one name each"]


def test_a_student_that_uses_what_only_the_server_has(shop: Shop) -> None:
    shop.replace(
        'features=[shelf_demand, basket], description="What', 'features=[customer_orders, basket], description="What'
    )
    assert problems(shop) == [
        (
            "distillation late_order, student: uses customer_orders__orders_7d, customer_orders__mean_amount_7d, "
            'customer_orders__late_rate_7d; expected fields that devices have: add available="device" to the Field of '
            "customer_orders.orders_7d, customer_orders.mean_amount_7d, customer_orders.late_rate_7d, or remove them "
            "from service late_order_device"
        )
    ]


def test_a_spine_without_the_request_fields_of_its_models_is_refused(shop: Shop) -> None:
    shop.replace("request=basket, label", "label")
    (problem,) = problems(shop)
    assert problem == (
        "distillation late_order, spine placed: has no column hour, weight, which its models read from the request; "
        "expected @spine(..., request=basket), and these columns in the result of the spine function"
    )


def test_what_asks_for_a_session_before_there_is_one_is_told_how_not_to(shop: Shop) -> None:
    shop.append('\nabove = F.udf(lambda x: x > 3, "boolean")\n')
    (problem,) = problems(shop)
    assert "SESSION" in problem
    assert "udf(function, DoubleType())" in problem


def test_a_model_reads_neither_bytes_nor_arrays_of_any_size(shop: Shop) -> None:
    shop.replace('customer_facts[["member", "born"]]', 'customer_facts[["member", "trips", "token"]]')
    assert problems(shop) == [
        f"distillation late_order, teacher: reads customer_facts__{name}; expected numbers, times and Strings, "
        "and for a Tabular or a Text Array(Float32) with a declared size"
        for name in ("trips, of type Array(Float64)", "token, of type Bytes")
    ]


def test_the_code_of_a_view_is_its_meaning_not_its_looks(shop: Shop) -> None:
    before = code(shop)
    shop.replace(
        '    second = F.unix_seconds("ordered_at")\n    day = Window',
        '    # What a day is.\n\n    second = F.unix_seconds(\n        "ordered_at",\n    )\n    day = Window',
    )
    shop.replace('"""How much of a product a store sold in a day, and how far its customers live."""', '"""Demand."""')
    shop.append("unrelated = 7\n")
    assert code(shop) == before
    shop.replace("rangeBetween(1 - 86400, 0)", "rangeBetween(1 - 86401, 0)")
    after = code(shop)
    assert {name for name in before if before[name] != after[name]} == {"shelf_demand"}


def test_a_constant_counts(shop: Shop) -> None:
    before = code(shop)
    shop.replace("SLOW = 60", "SLOW = 61")
    after = code(shop)
    assert {name for name in before if before[name] != after[name]} == {"shelf_demand"}


def test_a_helper_counts_but_not_its_comments(shop_with_helper: Shop) -> None:
    before = code(shop_with_helper)
    shop_with_helper.replace("    # Far customers are somebody else's.\n", "", "helpers.py")
    assert code(shop_with_helper) == before
    shop_with_helper.replace("distance < SLOW", "distance <= SLOW", "helpers.py")
    edited = code(shop_with_helper)
    shop_with_helper.replace("SLOW = 60", "SLOW = 90", "helpers.py")
    widened = code(shop_with_helper)
    assert len({before["shelf_demand"], edited["shelf_demand"], widened["shelf_demand"]}) == 3
    assert before["customer_orders"] == edited["customer_orders"] == widened["customer_orders"]


def test_one_name_in_two_modules_is_two_constants(shop_with_helper: Shop) -> None:
    shop_with_helper.replace('F.count("*").over(day)', '(F.count("*").over(day) + SLOW)')
    before = code(shop_with_helper)
    shop_with_helper.replace("SLOW = 60", "SLOW = 90", "helpers.py")
    edited = code(shop_with_helper)
    shop_with_helper.replace("SLOW = 60", "SLOW = 90")
    assert len({before["shelf_demand"], edited["shelf_demand"], code(shop_with_helper)["shelf_demand"]}) == 3


def test_a_class_of_the_users_counts(shop: Shop) -> None:
    shop.replace("SLOW = 60\n", "@dataclass\nclass Limits:\n    slow: int = 60\n\n\nLIMITS = Limits()\n")
    shop.replace(
        "from datetime import",
        "from __future__ import annotations\n\nfrom dataclasses import dataclass\nfrom datetime import",
    )
    shop.replace('F.col("distance") < SLOW', 'F.col("distance") < LIMITS.slow')
    before = code(shop)
    shop.replace("slow: int = 60", "slow: int = 61")
    after = code(shop)
    assert {name for name in before if before[name] != after[name]} == {"shelf_demand"}


def test_an_edit_within_the_same_second_is_seen(shop_with_helper: Shop) -> None:
    """Python's bytecode cache would not see it: same size, same second."""
    seen = []
    for limit in range(60, 66):
        seen.append(code(shop_with_helper)["shelf_demand"])
        shop_with_helper.replace(f"SLOW = {limit}", f"SLOW = {limit + 1}", "helpers.py")
    assert len(set(seen)) == 6
    assert not list(shop_with_helper.root.rglob("*.pyc"))


@pytest.mark.accept
def test_the_contract_is_the_same_in_every_process(shop_with_helper: Shop) -> None:
    here = definitions(shop_with_helper).contract.hash
    script = "import sys; from pathlib import Path; from isthmus.orchestration.project import Project; "
    script += "print(Project(Path(sys.argv[1])).definitions.contract.hash)"
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script, shop_with_helper.root], env={"PYTHONHASHSEED": seed}, cwd="/", text=True,
            capture_output=True, check=True,
        )  # fmt: skip
        assert run.stdout.strip() == here


def test_two_projects_in_one_process_do_not_mix(shop_with_helper: Shop, tmp_path: Path) -> None:
    from tests.orchestration.shop import write_with_helper

    other = write_with_helper(tmp_path / "other")
    other.replace("SLOW = 60", "SLOW = 61", "helpers.py")
    first, second = definitions(shop_with_helper), definitions(other)
    assert first.contract.views["shelf_demand"].code != second.contract.views["shelf_demand"].code
    assert first.contract.hash == definitions(shop_with_helper).contract.hash
