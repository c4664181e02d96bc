import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browser() -> Iterator[Browser]:
    """The Chromium on PATH, else the one Playwright installed."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    with sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.fail("no Chromium: install the package chromium")
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=found, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def phone(browser: Browser) -> Callable[[str], Page]:
    """Opens an address with the viewport of a phone, and waits until its page has opened its package or has not."""

    def opened(address: str) -> Page:
        page = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=2)
        page.goto(address)
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        return page

    return opened
