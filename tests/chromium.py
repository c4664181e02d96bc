"""The Chromium that tests drive: the one that `make browser` links or installs, else Playwright's."""

import sys
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Playwright, sync_playwright

_INSTALLED = Path(sys.prefix) / "browser" / "chromium"
# Without a language, Chromium makes "en-US@posix" of LANG=C.UTF-8, and Dagster's page stays empty.
_QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--accept-lang=en-US",
]  # fmt: skip


def executable(playwright: Playwright) -> str:
    """Return the path of the browser, or raise with the command that installs one."""
    for place in (_INSTALLED, Path(playwright.chromium.executable_path)):
        if place.exists():
            return str(place)
    raise FileNotFoundError("There is no Chromium. Run `make browser`.")


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=executable(playwright), args=_QUIET)


def launch_persistent(playwright: Playwright, profile: Path) -> BrowserContext:
    """Launch with a profile folder, so that storage survives a restart of the browser."""
    return playwright.chromium.launch_persistent_context(profile, executable_path=executable(playwright), args=_QUIET)


if __name__ == "__main__":
    with sync_playwright() as running:
        executable(running)
