"""Takes the pictures of docs/screenshots: the pages of packages that are made, at a phone's viewport.

    python -m tests.end_to_end.screenshots examples/flights examples/docsearch examples/effects

A page that refuses its package, or computes another golden case than it must, is no picture: it is said, and the
process returns 1.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page, sync_playwright

from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.site import site
from tests.chromium import launch
from tests.end_to_end.files import served
from tests.end_to_end.phones import opened

PICTURES = Path(__file__).parents[2] / "docs" / "screenshots"
QUESTION = "eigenvalues of a symmetric matrix"


def use(page: Page) -> None:
    """Does what a user would: asks, predicts, or looks at the image that is there."""
    if (question := page.get_by_label("Question")).count():
        question.fill(QUESTION)
        page.locator("#found li").first.wait_for()
    elif (predict := page.get_by_role("button", name="Predict")).count():
        page.locator("#example").select_option("1")
        predict.click()
        page.locator("#answer[data-value]").wait_for()
    else:
        page.get_by_text("ms for a frame").wait_for()


def main() -> int:
    """Returns 1 if a page refused its package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projects", nargs="+", type=Path, help="folders of projects with a package")
    parser.add_argument("--out", type=Path, default=PICTURES, help="where the pictures go")
    told = parser.parse_args()
    refused = 0
    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        browser = launch(playwright)
        for root in told.projects:
            name = root.resolve().name
            with served(site(Project(root), None, Path(folder) / name)) as address:
                page = opened(browser, address)
                if (bad := page.locator("#checks li.bad")).count():
                    refused += 1
                    sys.stderr.write(f"{root}: {'; '.join(bad.all_inner_texts())}\n")
                    continue
                use(page)
                page.screenshot(path=told.out / f"{name}.png")
        browser.close()
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
