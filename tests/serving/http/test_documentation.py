import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.serving.support import CONTRACT, Server, serving


def test_the_page_and_all_it_loads_come_from_this_server(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    for asset in ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png"):
        assert server.http.get(f"/docs/assets/{asset}").status_code == 200


@pytest.mark.browser
def test_a_browser_shows_every_operation(server: Server) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "install the package chromium"
    requested: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        own = str(server.http.base_url)
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{own.rstrip('/')}/docs")
        for path in ("/get-online-features", "/predict", "/models", "/healthz", "/readyz", "/metrics"):
            page.locator(f'[data-path="{path}"]').wait_for(timeout=20_000)
        page.locator("#operations-default-isUp").click()
        page.get_by_text("Try it out").click()
        page.get_by_text("Execute", exact=True).click()
        page.locator(".live-responses-table").get_by_text('"status": "up"').wait_for(timeout=10_000)
        browser.close()
    assert {url.split(",")[0] for url in requested if not url.startswith(own)} <= {"data:image/svg+xml"}


@pytest.mark.browser
def test_a_browser_is_asked_for_the_key(tmp_path: Path, redis_url: str) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "install the package chromium"
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url) as guarded, sync_playwright() as playwright:
        key = guarded.grant(owner="read:late")["owner"].removeprefix("Bearer ")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{str(guarded.http.base_url).rstrip('/')}/docs")
        page.locator("#operations-default-isReady").click(timeout=20_000)
        page.get_by_text("Try it out").click()
        page.get_by_text("Execute", exact=True).click()
        answer = page.locator(".live-responses-table")
        answer.get_by_text("there is none in the request").wait_for(timeout=10_000)
        page.locator(".btn.authorize").click()
        page.locator(".auth-container input").fill(key)
        page.locator(".auth-container button.authorize").click()
        page.locator(".auth-container").get_by_text("Logout").wait_for(timeout=10_000)
        page.locator(".btn-done").click()
        page.get_by_text("Execute", exact=True).click()
        answer.get_by_text('"status": "ready"').wait_for(timeout=10_000)
        assert page.evaluate("Object.keys(localStorage).concat(Object.keys(sessionStorage))") == []
        browser.close()
