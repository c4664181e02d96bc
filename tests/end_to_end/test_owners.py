"""The page of a package whose devices have their own customer's rows, beside the API of a real project."""

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from isthmus.features.errors import DataError
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.snapshots.create import snapshot
from isthmus.orchestration.snapshots.site import api_path, site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.package.snapshot.file import read_snapshot, to_online_row
from isthmus.package.snapshot.selection import kept_views
from tests.end_to_end.files import served
from tests.orchestration.shop import Shop, learnable, with_device, with_owner, write
from tests.serving.support import free_port, wait

pytestmark = [pytest.mark.browser, pytest.mark.accept, pytest.mark.timeout(300)]

SERVICE = "late_order_device"
MINE, OTHER = 1_000_003, 2_000_006


def _exported(shop: Shop) -> Project:
    opened = Project(shop.root)
    for step in (apply, build, materialize, snapshot, training_set, distill, export):
        step(opened)
    return opened


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return _exported(learnable(with_owner(with_device(write(tmp_path_factory.mktemp("own") / "shop")))))


@pytest.fixture
def address(project: Project, tmp_path: Path) -> Iterator[tuple[str, str]]:
    with _served(project, tmp_path) as found:
        yield found


@contextmanager
def _served(project: Project, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Of the page, and of the API that whoever serves it passes snapshots on to."""
    port, folder = free_port(), site(project, None, tmp_path / "page")
    assert not (folder / "snapshots").exists()
    assert api_path(folder) == f"/snapshots/{SERVICE}/…"
    api = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log, serving(project, port=port, log=log, private=True):
        wait(lambda: _answers(api), "the server")
        with served(folder, api) as page:
            yield page, api


def _answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/readyz").is_success
    except httpx.TransportError:
        return False


def _orders(project: Project, api: str, customer: int) -> int:
    """The orders of a customer in seven days, from the snapshot of the customer."""
    data = httpx.get(f"{api}/snapshots/{SERVICE}/{customer}", headers={"accept-encoding": "identity"}).content
    view, *_ = views = kept_views(project.applied(), SERVICE)
    (row,) = read_snapshot(data, views).rows[view.name].values()
    return int(RowCodec(view).decode([to_online_row(row, view)]).columns["orders_7d"].data[0])


def _answer(page: Page, customer: int | str, text: str) -> str | None:
    page.get_by_label("customer").fill(str(customer))
    page.get_by_role("button", name="Predict").click()
    answer = page.locator("#answer")
    expect(answer).to_contain_text(text)
    return answer.get_attribute("data-by")


def _stored(page: Page) -> str:
    group = page.locator("#stored-customer_orders")
    group.evaluate("group => { group.open = true; }")
    return group.locator(".stored", has_text="orders 7d").locator("b").inner_text()


def test_a_page_asks_whose_it_is_and_predicts_offline(
    project: Project, address: tuple[str, str], phone: Callable[[str], Page]
) -> None:
    served_at, api = address
    page = phone(served_at)
    line = page.locator("#checks li").last
    page.get_by_label("customer").fill("")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#answer")).to_contain_text("the snapshots of late_order_device are of one customer each")
    assert _answer(page, MINE, "in this browser") == "model"
    assert _stored(page) == str(_orders(project, api, MINE))
    expect(page.locator(f'[data-owner="{MINE}"]')).to_contain_text("61 rows of stored features")
    # Without a connection it goes on with what it has, and has nothing of anybody else.
    page.context.set_offline(True)
    assert _answer(page, MINE, "in this browser") == "model"
    assert _answer(page, OTHER, "there is no connection") is None
    page.context.set_offline(False)
    assert _answer(page, OTHER, "in this browser") == "model"
    assert _stored(page) == str(_orders(project, api, OTHER))
    # Whoever is no customer has no snapshot.
    assert _answer(page, 5, "the snapshot cannot be fetched: 404") is None
    assert line.is_visible()


def test_a_key_of_bytes_is_typed_in_base64(tmp_path: Path, phone: Callable[[str], Page]) -> None:
    shop = learnable(with_owner(with_device(write(tmp_path / "shop"))))
    orders = pq.read_table(shop.orders)
    keys = pa.array([key.to_bytes(8) for key in orders["customer"].to_pylist()])
    pq.write_table(orders.set_column(orders.column_names.index("customer"), "customer", keys), shop.orders)
    shop.replace('join_keys={"customer": Int64}', 'join_keys={"customer": Bytes}')
    shop.replace(
        'customers.select(\n        "customer",',
        'customers.select(\n        F.col("customer").cast("string").cast("binary").alias("customer"),',
    )
    with _served(_exported(shop), tmp_path) as (served_at, _):
        page = phone(served_at)
        assert _answer(page, "A!", "customer: A! is not Base64") is None
        assert _answer(page, b64encode(MINE.to_bytes(8)).decode(), "in this browser") == "model"
        assert int(_stored(page)) > 0


def test_a_page_of_another_owner_than_the_package_is_refused(project: Project, tmp_path: Path) -> None:
    (file,) = (project.snapshots / SERVICE).glob("*.owners")
    whole = file.read_bytes()
    file.write_bytes(whole[:5000])
    try:
        with pytest.raises(DataError, match="isthmus features snapshot"):
            site(project, None, tmp_path / "torn")
    finally:
        file.write_bytes(whole)
    latest = project.snapshots / SERVICE / "latest"
    named = latest.read_bytes()
    latest.unlink()
    with pytest.raises(DataError, match="has no files of owners"):
        site(project, None, tmp_path / "none")
    latest.write_bytes(named)
