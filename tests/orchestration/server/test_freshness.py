"""The objectives for the ages of views: declared in isthmus.toml, checked against the views, part of no contract."""

import json
from pathlib import Path

import pytest

from isthmus import ConfigurationError
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.fleet.files import files
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import settings
from tests.orchestration.shop import Open, Shop

REDIS = "redis://127.0.0.1:6379"
UNKNOWN = (
    "server.freshness_objective_hours.customer_order: is not a view; expected one of customer_facts, customer_orders, "
    "shelf_demand"
)


def declare(shop: Shop, **hours: float) -> None:
    """Replaces the objectives at the end of the file."""
    file = shop.root / "isthmus.toml"
    text = file.read_text().partition("[server.freshness_objective_hours]\n")[0]
    lines = [f"{name} = {value}\n" for name, value in hours.items()]
    file.write_text(f"{text}[server.freshness_objective_hours]\n{''.join(lines)}")


def refusal(caught: pytest.ExceptionInfo[ConfigurationError]) -> list[str]:
    assert caught.value.where.endswith("isthmus.toml")
    return [str(problem) for problem in caught.value.problems]


def test_a_name_that_is_no_view_is_refused_by_whoever_knows_the_views(shop: Shop, project: Open) -> None:
    declare(shop, customer_order=2, shelf_demand=0.5)
    with pytest.raises(ConfigurationError) as caught:
        apply(project(shop))
    assert refusal(caught) == [UNKNOWN]
    assert not project(shop).contract_file.exists()
    # Nothing is applied yet: who knows what views there will be?
    assert settings(project(shop), REDIS).freshness_objective_seconds == {"customer_order": 7200, "shelf_demand": 1800}

    declare(shop, customer_orders=2)
    applied = apply(project(shop))
    declare(shop)
    assert apply(project(shop)).contract == applied.contract

    declare(shop, customer_orders=2, shelf_demand=0.5)
    expected = {"customer_orders": 7200, "shelf_demand": 1800}
    assert settings(project(shop), REDIS).freshness_objective_seconds == expected
    assert settings(project(shop), REDIS, private=True).freshness_objective_seconds == {}
    written = files(project(shop))["base/serving/deployment.yaml"].decode()
    assert json.dumps(expected, separators=(",", ":")) in written.replace(".0", "").replace('\\"', '"')

    declare(shop, customer_order=2)
    for serve in (lambda opened: settings(opened, REDIS), files):
        with pytest.raises(ConfigurationError) as caught:
            serve(project(shop))
        assert refusal(caught) == [UNKNOWN]


def test_a_damaged_contract_is_for_the_server_to_report(shop: Shop, project: Open) -> None:
    declare(shop, customer_orders=2)
    project(shop).contract_file.parent.mkdir(parents=True, exist_ok=True)
    project(shop).contract_file.write_text("{")
    assert settings(project(shop), REDIS).freshness_objective_seconds == {"customer_orders": 7200}


def test_a_project_has_no_objectives_unless_it_declares_them(tmp_path: Path) -> None:
    (tmp_path / "isthmus.toml").write_text('[project]\nname = "shop"\n')
    assert settings(Project(tmp_path), REDIS).freshness_objective_seconds == {}
