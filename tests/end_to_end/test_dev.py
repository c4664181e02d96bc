"""`isthmus dev` as a user meets it: the page in a real browser, one button, a green check, one Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import Error as PlaywrightError

from tests import processes
from tests.orchestration import shop

pytestmark = pytest.mark.accept


ISTHMUS = str(Path(sys.executable).with_name("isthmus"))


@pytest.fixture
def page(browser: Browser) -> Page:
    """As large as a screen."""
    return browser.new_page(viewport={"width": 1500, "height": 950})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Dev:
    """A running `isthmus dev`: the folder of its project, the ports of page and API."""

    root: Path
    ui: int
    api: int


def _project(folder: Path) -> Dev:
    """A project to develop, with ports of its own."""
    project = shop.write(folder / "shop", rows=6000)
    ui, api = _free_port(), _free_port()
    settings = project.root / "isthmus.toml"
    trained = settings.read_text().replace("epochs = 2", "epochs = 12")  # until the student passes its gate
    # Other tests run beside this one, and take their turns on the processor.
    patient = "[profiles.serving]\nlatency_objective_ms = 1000\n"
    settings.write_text(f"{trained}\n{patient}\n[server]\nport = {api}\n\n[dev]\nport = {ui}\n")
    return Dev(project.root, ui, api)


def _started(dev: Dev, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("w") as file:
        return subprocess.Popen([ISTHMUS, "dev", "--project", str(dev.root)], stderr=file)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One for all tests, in their order. It has to end by one Ctrl-C, with everything that it has started."""
    folder = tmp_path_factory.mktemp("dev")
    dev = _project(folder)
    log = folder / "dev.log"
    with _started(dev, log) as process:
        try:
            _await(process, lambda: "press Ctrl-C to stop both" in log.read_text(), 120)
            yield dev
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert "Traceback" not in log.read_text()


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_materialize_all_in_the_browser_deploys_the_student(dev: Dev, page: Page, tmp_path: Path) -> None:
    page.goto(f"http://127.0.0.1:{dev.ui}/asset-groups")
    page.get_by_role("button", name="Materialize all").click(timeout=60_000)
    expect(page.get_by_text("Launched run")).to_be_visible(timeout=60_000)
    page.goto(f"http://127.0.0.1:{dev.ui}/runs")
    expect(page.get_by_text(re.compile("^(Success|Failure)$")).first).to_be_visible(timeout=480_000)
    expect(page.get_by_text("Success", exact=True).first).to_be_visible()
    page.goto(f"http://127.0.0.1:{dev.ui}/assets/late_order/package?view=checks")
    expect(page.get_by_text("verdict").first).to_be_visible(timeout=60_000)
    expect(page.get_by_text("Passed").first).to_be_visible(timeout=60_000)
    page.get_by_text("[Show Markdown]").first.click()
    plot = page.get_by_role("img", name="values that differ")
    expect(plot).to_be_visible()
    svg = b64decode((plot.get_attribute("src") or "").partition(",")[2]).decode()
    (width,) = re.findall(r'<svg[^>]* width="(\d+)"', svg)
    assert plot.evaluate("image => image.naturalWidth") == int(width), "it is drawn"
    page.screenshot(path=tmp_path / "check.png")
    with urllib.request.urlopen(f"http://127.0.0.1:{dev.api}/models") as answer:
        assert [model["model"] for model in json.load(answer)["models"]] == ["late_order"]
    page.goto(f"http://127.0.0.1:{dev.api}/status")
    expect(page.get_by_role("heading", name="The project")).to_be_visible()
    expect(page.get_by_text("up to date").first).to_be_visible()


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_month_is_backfilled_from_the_page_in_one_run(dev: Dev, page: Page) -> None:
    with (dev.root / "isthmus.toml").open("a") as settings:
        settings.write("\n[orchestration]\ndays_from = 2023-12-25\n")
    page.goto(f"http://127.0.0.1:{dev.ui}/asset-groups")
    page.get_by_role("button", name="Reload definitions").click(timeout=60_000)
    group = f"http://127.0.0.1:{dev.ui}/locations/isthmus.orchestration.definitions/asset-groups/build/lineage"
    days = page.get_by_placeholder("2023-12-25")
    everything = page.get_by_role("button", name="Materialize all")

    def shown() -> None:
        page.goto(group)
        expect(everything).to_be_visible(timeout=30_000)

    _until(shown, 300)
    everything.click()
    days.fill("[2024-01-02...2024-02-01]")
    days.press("Tab")
    expect(page.get_by_text("31 partitions")).to_be_visible()
    page.get_by_role("button", name="Launch backfill").click()
    expect(page.get_by_text("31 partitions")).to_be_hidden(timeout=60_000)
    page.goto(f"http://127.0.0.1:{dev.ui}/runs")
    page.get_by_text("Show runs within backfills").click(timeout=60_000)
    expect(page.get_by_text("Backfill:")).to_have_count(1, timeout=120_000)
    deadline = time.monotonic() + 480
    while (ended := _backfills(dev.root)) and not ended[0].is_finished:
        assert time.monotonic() < deadline, "not done in time"
        time.sleep(0.5)
    assert [run.status for run in ended] == [dg.DagsterRunStatus.SUCCESS]


ATTACK = """async ([address, query]) => {
    const target = address + '/graphql?query=' + encodeURIComponent(query);
    const socket = new WebSocket(address.replace('http', 'ws') + '/graphql', 'graphql-ws');
    const opened = new Promise(done => { socket.onopen = () => done(true); socket.onerror = () => done(false); });
    await fetch(target, {method: 'POST', mode: 'no-cors', body: 'x'}).catch(() => null);
    await new Promise(done => { const image = new Image(); image.onerror = image.onload = done; image.src = target; });
    return await opened;
}"""
START = """mutation { launchRun(executionParams: {selector: {
  repositoryLocationName: "isthmus.orchestration.definitions", repositoryName: "__repository__",
  jobName: "__ASSET_JOB", assetSelection: [{path: ["contract"]}]}, runConfigData: "{}"}) { __typename } }"""


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_run_is_followed_live_and_a_page_of_another_site_starts_none(dev: Dev, page: Page) -> None:
    address, frames = f"http://127.0.0.1:{dev.ui}", list[str]()

    def runs() -> int:
        answer = httpx.post(f"{address}/graphql", json={"query": "{ runsOrError { ... on Runs { results { id } } } }"})
        return len(answer.json()["data"]["runsOrError"]["results"])

    page.on("websocket", lambda socket: socket.on("framereceived", lambda data: frames.append(str(data))))
    page.goto(f"{address}/assets/contract")
    page.get_by_role("button", name="Materialize").first.click(timeout=60_000)
    expect(page.get_by_text("Launched run")).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="View").first.click()
    expect(page.get_by_text("RUN_SUCCESS").first).to_be_visible(timeout=120_000)
    assert any("RunSuccessEvent" in frame for frame in frames), "the log came by the WebSocket"
    before = runs()
    page.route("http://evil.example/**", lambda route: route.fulfill(body="<html></html>", content_type="text/html"))
    page.goto("http://evil.example/")
    assert page.evaluate(ATTACK, [address, START]) is False
    assert (
        httpx.post(f"{address}/graphql", params={"query": START}, headers={"Host": "evil.example"}).status_code == 403
    )
    assert runs() == before


@pytest.mark.slowest
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_a_killed_dev_leaves_no_process_and_the_next_starts(tmp_path: Path) -> None:
    dev = _project(tmp_path)
    log = tmp_path / "dev.log"
    try:
        for kill in range(int(os.environ.get("TEST_KILLS", "2"))):
            process = _started(dev, log)
            _await(process, lambda: "press Ctrl-C to stop both" in log.read_text(), 180)
            _until(lambda: _launch(dev), 60)
            _await(process, lambda: bool(_steps(dev.root)), 120)
            time.sleep(kill / 2)  # in the middle of another step each time
            process.kill()
            process.wait()
            assert not processes.orphans(dev.root, 30)
        process = _started(dev, log)
        _await(process, lambda: "press Ctrl-C to stop both" in log.read_text(), 180)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not processes.orphans(dev.root, 15)
    finally:
        processes.end(dev.root)


LAUNCH = """mutation { launchRun(executionParams: {mode: "default", selector: {
    repositoryLocationName: "isthmus.orchestration.definitions", repositoryName: "__repository__",
    pipelineName: "__ASSET_JOB"}}) { __typename } }"""


def _launch(dev: Dev) -> None:
    """A run of everything, as the button in the browser launches it; refused until the code server is ready."""
    answer = httpx.post(f"http://127.0.0.1:{dev.ui}/graphql", json={"query": LAUNCH}, timeout=30)
    assert "LaunchRunSuccess" in answer.text, answer.text


def _steps(root: Path) -> list[psutil.Process]:
    """The processes of the run's steps."""
    step = "isthmus.orchestration.graph.child"
    return [process for process in processes.running_for(root) if step in process.cmdline()]


def _backfills(root: Path) -> list[dg.DagsterRun]:
    """The runs that there were for backfills."""
    with dg.DagsterInstance.from_config(str(root / ".isthmus" / "dagster")) as instance:
        return [run for run in instance.get_runs() if "dagster/backfill" in run.tags]


def _until(tried: Callable[[], None], seconds: float) -> None:
    """Again and again: new definitions are shown when the page has them."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            tried()
        except (PlaywrightError, AssertionError):
            if time.monotonic() > deadline:
                raise
        else:
            return


def _await(process: "subprocess.Popen[bytes]", happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, "isthmus dev ended by itself"
        assert time.monotonic() < deadline, "not ready in time"
        time.sleep(0.2)
