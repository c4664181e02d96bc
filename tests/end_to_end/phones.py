"""A phone: Chromium with the viewport of one."""

import shutil
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, Playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def chromium(playwright: Playwright) -> Browser:
    """The Chromium on PATH, else the one Playwright installed."""
    return playwright.chromium.launch(executable_path=_found(playwright), args=_QUIET)


def of_profile(playwright: Playwright, folder: Path) -> BrowserContext:
    """The same with the profile in a folder, as the browser of a person has one."""
    return playwright.chromium.launch_persistent_context(folder, executable_path=_found(playwright), args=_QUIET)


def _found(playwright: Playwright) -> str | None:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and not Path(playwright.chromium.executable_path).exists():
        raise RuntimeError("no Chromium: install the package chromium")
    return found


def opened(browser: Browser, address: str) -> Page:
    """A page that has opened its package, or has not and says why."""
    page = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=2)
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    return page
