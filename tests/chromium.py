"""The Chromium that tests drive: the one on PATH, else the one that `make browser` installs, else Playwright's."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Playwright, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_INSTALLED = Path(sys.prefix) / "browser" / "chromium"
_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def executable(playwright: Playwright) -> str:
    """Return the path of the browser, or raise with the command that installs one."""
    places = (*map(shutil.which, _NAMES), str(_INSTALLED), playwright.chromium.executable_path)
    found = next((place for place in places if place and Path(place).exists()), None)
    if found is None:
        raise FileNotFoundError("There is no Chromium. Run `make browser`, or install the package chromium.")
    return found


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=executable(playwright), args=_QUIET)


def launch_persistent(playwright: Playwright, profile: Path) -> BrowserContext:
    """Launch with a profile folder, so that storage survives a restart of the browser."""
    return playwright.chromium.launch_persistent_context(profile, executable_path=executable(playwright), args=_QUIET)


if __name__ == "__main__":
    with sync_playwright() as running:
        executable(running)
