import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import isthmus.serving
from tests.chromium import launch
from tests.serving.support import CONTRACT, Server, serving

WEB = Path(isthmus.serving.__file__).parent / "web"


def test_the_page_and_all_it_loads_come_from_this_server(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    for asset in ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png"):
        answer = server.http.get(f"/docs/assets/{asset}")
        assert answer.content == gzip.decompress((WEB / f"{asset}.gz").read_bytes())
        assert answer.headers["content-type"].split(";")[0] == {"css": "text/css", "js": "text/javascript"}.get(
            asset.rpartition(".")[2], "image/png"
        )
        plain = server.http.get(f"/docs/assets/{asset}", headers={"accept-encoding": "identity"})
        assert (plain.content, "content-encoding" in plain.headers) == (answer.content, False)
        assert plain.headers["content-type"] == answer.headers["content-type"]
    assert server.http.get("/docs/assets/package.json").status_code == 404


@pytest.mark.accept
def test_the_files_of_the_page_are_those_of_the_locked_release(tmp_path: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(WEB / name, tmp_path)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    release = tmp_path / "node_modules/swagger-ui-dist"
    stored = {path.name: path.read_bytes() for path in WEB.iterdir() if not path.name.startswith("package")}
    assert len(stored) == 6
    for name, content in stored.items():
        packed = name.endswith(".gz")
        assert (gzip.decompress(content) if packed else content) == (release / name.removesuffix(".gz")).read_bytes()


@pytest.mark.browser
def test_a_browser_shows_every_operation(server: Server) -> None:
    requested: list[str] = []
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page()
        own = str(server.http.base_url)
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{own.rstrip('/')}/docs")
        for path in ("/get-online-features", "/predict", "/models", "/healthz", "/readyz", "/metrics"):
            page.locator(f'[data-path="{path}"]').wait_for(timeout=20_000)
        locked = json.loads((WEB / "package.json").read_text())["dependencies"]["swagger-ui-dist"]
        assert page.evaluate("versions.swaggerUI.version") == locked
        page.locator("#operations-health-isUp").click()
        page.get_by_text("Try it out").click()
        page.get_by_text("Execute", exact=True).click()
        page.locator(".live-responses-table").get_by_text('"status": "up"').wait_for(timeout=10_000)
        browser.close()
    assert {url.split(":")[0] for url in requested if not url.startswith(own)} <= {"data"}


@pytest.mark.accept
@pytest.mark.browser
def test_a_browser_is_asked_for_the_key(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url) as guarded, sync_playwright() as playwright:
        key = guarded.grant(owner="read:late")["owner"].removeprefix("Bearer ")
        browser = launch(playwright)
        page = browser.new_page()
        page.goto(f"{str(guarded.http.base_url).rstrip('/')}/docs")
        page.locator("#operations-health-isReady").click(timeout=20_000)
        page.get_by_text("Try it out").click()
        page.get_by_text("Execute", exact=True).click()
        answer = page.locator(".live-responses-table")
        answer.get_by_text("is missing from the request").wait_for(timeout=10_000)
        page.locator(".btn.authorize").click()
        page.locator(".auth-container input").fill(key)
        page.locator(".auth-container button.authorize").click()
        page.locator(".auth-container").get_by_text("Logout").wait_for(timeout=10_000)
        page.locator(".btn-done").click()
        page.get_by_text("Execute", exact=True).click()
        answer.get_by_text('"status": "ready"').wait_for(timeout=10_000)
        assert page.evaluate("Object.keys(localStorage).concat(Object.keys(sessionStorage))") == []
        browser.close()
