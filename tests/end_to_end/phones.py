"""A phone: Chromium with the viewport of one."""

from playwright.sync_api import Browser, Page


def opened(browser: Browser, address: str) -> Page:
    """A page that has opened its package, or has not and says why."""
    page = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=2)
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    return page
