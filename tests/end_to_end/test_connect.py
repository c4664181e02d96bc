"""The same project on an Apache Spark Connect server and a Redis Cluster, as beyond one machine."""

from pathlib import Path

import pytest

from isthmus.features.offline.store import OfflineStore
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.data import training_data
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import verify
from tests.orchestration import shop as shops
from tests.servers import redis_cluster
from tests.transforms.connect import connect_server

pytestmark = pytest.mark.accept


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_project_on_spark_connect_and_a_redis_cluster(tmp_path: Path) -> None:
    shop = shops.write(tmp_path / "shop")
    embedded = Project(shop.root)
    apply(embedded)
    build(embedded)
    local = training_set(embedded).table()
    tables = {view: _rows(embedded, view) for view in shops.VIEWS}
    with connect_server(tmp_path / "server.log") as spark_url, redis_cluster(tmp_path / "cluster") as ports:
        redis_url = f"redis+cluster://127.0.0.1:{ports[0]}"
        shop.replace("[project]\n", f'engine = "{spark_url}"\n\n[project]\n', "isthmus.toml")
        shop.append(f'\n[stores]\nonline = "{redis_url}"\n', "isthmus.toml")
        project = Project(shop.root)
        apply(project)
        build(project)
        assert {view: _rows(project, view) for view in shops.VIEWS} == tables
        made = training_set(project)
        assert made.rows_in == made.rows_out == len(local)
        assert made.table().equals(local)
        # The executors write first what was known in January, and then only what has changed since.
        shop.replace(shops.NOW, "2024-01-20T00:00:00Z", "isthmus.toml")
        written = materialize(Project(shop.root))
        assert all(one.written == one.compared > 0 for one in written.values())
        shop.replace("2024-01-20T00:00:00Z", shops.NOW, "isthmus.toml")
        written = materialize(project)
        assert 0 < written["customer_orders"].written <= written["customer_orders"].compared
        assert written["customer_facts"].written == 0
        assert all(one.written == 0 for one in materialize(project).values())
        verdict = verify(project, all_keys=True)
        assert verdict.passed
        with connect(redis_url) as client:
            client.flushall()
        assert all(one.written == one.compared > 0 for one in materialize(project).values())
        spine = local.select([name for name in local.column_names if "__" not in name])
        here, there = (training_data(project, shops.VIEWS, spine, join=join) for join in ("embedded", "engine"))
        assert here.table().equals(there.table())


def _rows(project: Project, view: str) -> list[object]:
    history = OfflineStore(project.offline).history(project.applied().views[view])
    return list(history.table().to_pylist())
