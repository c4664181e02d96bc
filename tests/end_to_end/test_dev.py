"""`isthmus dev` as a user meets it: the page in a real browser, one button, a green check, one Ctrl-C."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.orchestration import shop

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


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_materialize_all_in_the_browser_deploys_the_student(tmp_path: Path, page: Page) -> None:
    project = shop.write(tmp_path / "shop", rows=6000)
    ui, api = _free_port(), _free_port()
    settings = project.root / "isthmus.toml"
    trained = settings.read_text().replace("epochs = 2", "epochs = 12")  # until the student passes its gate
    settings.write_text(f"{trained}\n[server]\nport = {api}\n\n[dev]\nport = {ui}\n")
    command = [ISTHMUS, "dev", "--project", str(project.root)]
    with (tmp_path / "dev.log").open("w") as log, subprocess.Popen(command, stderr=log) as dev:
        try:
            _await(dev, lambda: "Ctrl-C ends both" in (tmp_path / "dev.log").read_text(), 120)
            page.goto(f"http://127.0.0.1:{ui}/asset-groups")
            page.get_by_role("button", name="Materialize all").click(timeout=60_000)
            expect(page.get_by_text("Launched run")).to_be_visible(timeout=60_000)
            page.goto(f"http://127.0.0.1:{ui}/runs")
            expect(page.get_by_text(re.compile("^(Success|Failure)$")).first).to_be_visible(timeout=240_000)
            expect(page.get_by_text("Success", exact=True).first).to_be_visible()
            page.goto(f"http://127.0.0.1:{ui}/assets/late_order/package?view=checks")
            expect(page.get_by_text("verdict").first).to_be_visible(timeout=60_000)
            expect(page.get_by_text("Passed").first).to_be_visible(timeout=60_000)
            page.screenshot(path=tmp_path / "check.png")
            with urllib.request.urlopen(f"http://127.0.0.1:{api}/models") as answer:
                assert [model["model"] for model in json.load(answer)["models"]] == ["late_order"]
        finally:
            children = psutil.Process(dev.pid).children(recursive=True)
            dev.send_signal(signal.SIGINT)
        assert dev.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert "Traceback" not in (tmp_path / "dev.log").read_text()


def _await(process: "subprocess.Popen[bytes]", happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, "isthmus dev ended by itself"
        assert time.monotonic() < deadline, "not ready in time"
        time.sleep(0.2)
