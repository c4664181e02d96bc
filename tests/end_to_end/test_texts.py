"""The page of a package that generates text, in a real browser: token by token, what torch says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from isthmus.orchestration.snapshots.site import write_files, write_note
from isthmus.package.generation.tokenizer import GrowingText
from isthmus.package.manifest import open_package, read_package
from isthmus.package.prompts import generation_of, open_tokenizer
from tests.distill.decoder.support import SETTINGS, greedy_naively, packaged, tiny
from tests.end_to_end.files import served

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package, folder = packaged(tmp_path_factory.mktemp("packages"), SETTINGS).path, tmp_path_factory.mktemp("site")
    manifest = read_package(package)
    write_files(folder, package, manifest, None)
    write_note(folder, {"contract": manifest.contract, "precision": "fp32"})
    return folder


@pytest.mark.accept
def test_a_page_says_what_torch_says(written: Path, phone: Callable[[str], Page]) -> None:
    opened = open_package(written / "package")
    tokenizer, generation, model = open_tokenizer(opened), generation_of(opened.manifest), tiny()
    with served(written) as address:
        page = phone(address)
        expect(page.locator("#checks li.good")).to_have_count(5)
        for prompt in ("Parse the header.", "x <|end|> 漢"):
            page.get_by_label("Prompt", exact=True).fill(prompt)
            page.get_by_role("button", name="Write").click()
            text = page.locator("#text")
            expect(text).to_have_attribute("data-done", "yes")
            said, written_text = GrowingText(tokenizer), ""
            for token in greedy_naively(model, tokenizer.encode(generation.parts(prompt)), generation.most):
                written_text += said.add(token)
            assert text.text_content() == written_text + said.end()
            expect(page.locator("#spent")).to_contain_text("tokens/s")


def test_a_reader_stops_a_text(written: Path, phone: Callable[[str], Page]) -> None:
    with served(written) as address:
        page = phone(address)
        expect(page.locator("#form")).to_be_visible()
        # Between two tokens, the page hears.
        page.evaluate("document.querySelector('#form').requestSubmit(); document.querySelector('[name=stop]').click()")
        text = page.locator("#text")
        expect(text).to_have_attribute("data-done", "yes")
        assert len(text.text_content() or "") < 8


def test_a_page_refuses_another_text_than_is_recorded(written: Path, browser: Browser) -> None:
    def other(route: Any) -> None:
        content = json.loads((written / "package" / "prompts.json").read_bytes())
        content[0]["tokens"][0] += 1
        route.fulfill(body=json.dumps(content))

    with served(written) as address:
        page = browser.new_page()
        page.route("**/prompts.json", other)
        page.goto(address)
        expect(page.locator("#checks li.bad")).to_contain_text("prompts.json: SHA-256")
