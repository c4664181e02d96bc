from collections.abc import Callable, Iterator
from functools import partial

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.chromium import launch
from tests.end_to_end.phones import opened
from tests.serving.conftest import redis_url

__all__ = ["redis_url"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A real browser."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def phone(browser: Browser) -> Callable[[str], Page]:
    """Opens an address with the viewport of a phone, and waits until its page has opened its package or has not."""
    return partial(opened, browser)
