"""The papers of a run say what its report says, all of it in text, and nothing else."""

import base64
import json
import math
import re
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from playwright.sync_api import Page, sync_playwright

from isthmus import DataError, GateFailed
from isthmus.distill.gates import GateResult
from isthmus.distill.reports.boundarycard import boundary_card, require_boundary
from isthmus.distill.reports.findings import warnings
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.reports.page import images, page
from isthmus.distill.reports.report import (
    ModelRecord,
    Report,
    SeedMean,
    ServingHalf,
    TrainingHalf,
    TrainingRun,
    WorstSlice,
    read_report,
)
from isthmus.distill.reports.words import duration, measure, money, number, scaled, share
from isthmus.features.document.blocks import Paragraph, TableBlock
from isthmus.features.document.markdown import to_markdown
from tests.chromium import launch
from tests.distill.samplereports import HOSTILE, empty, hostile, report, sparse

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
EVERY = {"full": report, "sparse": sparse, "empty": empty, "hostile": hostile}


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of each table, as a reader sees them."""
    found: list[list[list[str]]] = []
    within = False
    for token in MARKDOWN.parse(markdown):
        if token.type in ("table_open", "table_close"):
            within = token.type == "table_open"
            if within:
                found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and within:
            found[-1][-1].append("".join(child.content for child in token.children or []))
    return found


def lines_of(half: list[list[str]]) -> dict[str, str]:
    return {name: value for name, value in half[1:] if name}


def test_the_boundary_card_has_both_halves() -> None:
    training, serving = map(lines_of, tables(boundary_card(report(), {"cpu": 0.36}, "EUR")))
    assert training == {
        "device": "cpu",
        "precision": "fp32",
        "processes": "1",
        "threads": "2",
        "rows": "228,907",
        "steps": "1,790",
        "seconds": "26.1",
        "device-hours": "0.0073",
        "floating-point operations": "120 GFLOP",
        "peak memory": "812 MB",
        "throttled for serving": "0 s on fewer cores, and 0 s paused",
        "throughput": "52,000 rows/s",
        "cost": "0.00263 EUR at 0.36 EUR per hour of cpu",
    }
    # 0.36 an hour is 0.0001 a second, in which 22 thousand are answered.
    assert serving["cost per 1,000 requests"] == "0.00000455 EUR at 0.36 EUR per hour of cpu, fully used"
    assert serving["p99"] == "83 µs"
    assert serving["throughput"] == "22,000 requests/s"
    assert serving["memory"] == "12.5 MB"
    assert serving["measured on the host"] == "x86_64, 2 cores"
    assert "covers all students and controls together" in boundary_card(report())


def test_without_a_price_the_card_says_so() -> None:
    training, serving = map(lines_of, tables(boundary_card(report(), {"cuda": 2.5})))
    assert training["cost"] == "unknown: no price is declared for cpu"
    assert serving["cost per 1,000 requests"] == "unknown: no price is declared for cpu"


def test_a_card_without_a_half_says_so() -> None:
    card = boundary_card({**report(), "serving": None})
    assert card.endswith("## Serving half\n\nNot measured yet.\n")
    assert len(tables(card)) == 1


def test_a_whole_card_is_let_through() -> None:
    require_boundary(report())


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"serving": None}, "boundary card of late_arrival: the serving half is missing; expected"),
        ({"training": None, "serving": None}, "the training half is missing; the serving half is missing"),
        ({"training": {**report()["training"], "flops": None, "peak_mb": None}}, "the training half lacks flops, peak"),
        (
            {"serving": {"runtime": "onnxruntime"}},
            "the serving half lacks precision, threads, p50_us, p99_us, requests",
        ),
    ],
)
def test_a_card_that_lacks_a_half_is_refused(changed: dict[str, Any], found: str) -> None:
    with pytest.raises(GateFailed, match=found):
        require_boundary({**report(), **changed})


@pytest.mark.parametrize("half", ["training", "serving"])
def test_every_part_of_a_half_is_required(half: str) -> None:
    for name in report()[half]:
        changed = report()
        changed[half][name] = None
        with pytest.raises(GateFailed, match=f"the {half} half lacks {name};"):
            require_boundary(changed)


def shipped(report: dict[str, Any]) -> dict[str, float]:
    """How good the student of the shipped seed is alone."""
    wanted = ("student", report["shipped"])
    found: dict[str, float] = next(run["quality"] for run in report["runs"] if (run["model"], run["seed"]) == wanted)
    return found


def test_the_model_card_is_one_for_the_hub() -> None:
    data: Any = ModelCard(model_card(report())).data
    assert data.pipeline_tag == "tabular-classification"
    assert data.tags == ["knowledge-distillation", "onnx", "tabular"]
    alone = shipped(report())
    assert alone != report()["models"]["student"]["quality"], "which is the mean over the seeds, and is not shipped"
    assert {one.metric_type: one.metric_value for one in data.eval_results} == alone
    assert {one.dataset_name for one in data.eval_results} == {"late_arrival, test part"}


def test_a_task_that_the_hub_has_no_name_for_has_no_pipeline() -> None:
    without = {name: value for name, value in report().items() if name != "pipeline"}
    card = model_card({**without, "task": "search:Search"})
    data: Any = ModelCard(card).data
    assert data.pipeline_tag is None
    assert "pipeline_tag" not in card
    assert {one.task_type for one in data.eval_results} == {"search:Search"}
    named: Any = ModelCard(model_card({**without, "task": "search:Search", "pipeline": "sentence-similarity"})).data
    assert named.pipeline_tag == "sentence-similarity"
    assert {one.task_type for one in named.eval_results} == {"sentence-similarity"}


def test_the_model_card_says_what_the_report_says() -> None:
    card = model_card(report())
    evaluation, slices = tables(card)
    measured = {row[0]: dict(zip(evaluation[0][1:], row[1:], strict=True)) for row in evaluation[1:]}
    assert measured["auc"] == {
        "teacher": "0.7512",
        "reference": "0.7447",
        "student": "0.7471 (0.7460 to 0.7482)",
        "control": "0.7386 (0.7370 to 0.7402)",
    }
    assert measured["agreement with teacher"]["student"] == "0.9300"
    assert measured["p50"] == {"teacher": "2.54 ms", "reference": "2.4 ms", "student": "41 µs", "control": "41.4 µs"}
    assert measured["size"]["student"] == "15.2 kB"
    assert slices[1:] == [
        ["carrier: AA", "5,000", "0.7400", "0.7000", "0.6900"],
        ["distance: over 872 to 1389", "9,120", "0.7600", "0.7450", "0.7410"],
        ["wind_speed: no value", "712", "0.7100", "0.7000", "-"],
    ]
    for sentence in (
        "The student closes 69 % (61 % to 77 %) of the gap between control and teacher in auc.",
        "The teacher improves the student's auc by 0.0085 (0.0081 to 0.0089), compared with training without it.",
        "mean over 3 seeds, with its 95 % interval. The shipped student alone: auc 0.7472, log_loss 0.6119,",
        "Rows: 228,907 train, 48,000 validation, 49,500 test.",
        "* On 7 % of the test rows, student and teacher predict different classes.",
        '* The student loses most against the teacher where carrier is "AA": auc 0.7000 instead of 0.7400, on 5,000',
        "* Latencies were measured on a host (x86_64, 2 cores), not on a device.",
        "* **ece**: expected calibration error: mean distance between probabilities and observed frequencies;",
    ):
        assert sentence in card
    assert "contains 0" not in card


def test_a_student_that_is_no_better_than_chance_is_named() -> None:
    changed = report()
    assert not warnings(read_report(changed))
    changed["measures"] = {"lift_kept": -0.2}
    (sentence,) = warnings(read_report(changed))
    assert sentence.startswith("The student is no better than chance: its auc is 0.7471 after 1,792 steps.")
    assert sentence in model_card(changed)


def test_limits_are_told() -> None:
    changed = report()
    changed["gates"][0].update(found=0.9, holds=False)
    changed["taught"]["low"] = -0.001
    changed.update(seeds=[0], slices=[], serving=None)
    limits = model_card(changed).split("## Limits\n\n")[1].splitlines()
    assert limits == [
        "* Gate lift_kept failed: its value is 0.9000.",
        "* Only one seed was trained, so the variation between seeds is unknown.",
        "* The interval of student - control contains 0: a gain in auc from the teacher is not proven.",
        "* On 7 % of the test rows, student and teacher predict different classes.",
        "* Slices of the test rows have not been measured.",
        "* The test rows begin at 2013-10-31T12:00:00+00:00; quality at other times is unknown.",
        "* The serving cost has not been measured yet.",
    ]
    assert '<span class="bad">failed</span>' in page(changed)
    assert '<span class="good">passed</span>' in page(report())


def test_a_precision_that_was_left_out_is_told_with_its_reason() -> None:
    changed = report()
    why = "model.int8.onnx: row 3, output p: answers 0.2 where the student in torch answers 0.272, 0.072 apart"
    changed["serving"]["left_out"] = {"int8": why}
    assert f"The package has no int8: {why}" in model_card(changed)


MARKS = [
    "&amp;",
    "&#33;",
    "_a_",
    "__a__",
    "*a*",
    "<b>",
    "<!--",
    "![x](y)",
    "[x]: y",
    "---",
    "1. ",
    "- ",
    "# ",
    "~~~",
    "a|b",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(MARKS), st.text(st.sampled_from("\\`*_[]<>|#&~!$-+=1.)( \n\ta:/")), st.text(max_size=5)),
    max_size=6,
).map("".join)


@given(TEXTS)
def test_any_text_stands_in_markdown_as_it_is(value: str) -> None:
    shown = " ".join(value.replace("\0", "�").split())
    tokens = MARKDOWN.parse(to_markdown([Paragraph(value)]))
    assert [token.type for token in tokens] == (["paragraph_open", "inline", "paragraph_close"] if shown else [])
    assert "".join(child.content for token in tokens for child in token.children or []) == shown
    ((_, body),) = tables(to_markdown([TableBlock(["a", "b"], [[value, "1"]], numbers=["b"])]))
    assert body == [shown, "1"]


@pytest.mark.parametrize("name", EVERY)
def test_every_report_has_its_papers(name: str) -> None:
    given_report = json.loads(json.dumps(EVERY[name](), allow_nan=False))
    before = json.dumps(given_report)
    papers = [page(given_report), model_card(given_report), boundary_card(given_report)]
    assert json.dumps(given_report) == before
    assert papers == [page(given_report), model_card(given_report), boundary_card(given_report)]
    for paper in papers:
        assert "nan" not in re.sub(r"[a-z]*nan[a-z]+", "", paper)
        assert "None" not in paper
        assert "<script" not in paper.split("---\n")[-1].replace(r"\<script", "")
    front = yaml.safe_load(papers[1].split("---\n")[1]) if name != "hostile" else None
    assert front is None or front["model-index"][0]["name"] == "late_arrival"


def test_the_front_matter_keeps_any_name() -> None:
    names = [HOSTILE, "---", "ä: b # c", "yes", "1", "\x7f\x80\u2028 \U0001f600", "a\n---\nb"]
    for name in names:
        card = model_card({**report(), "name": name})
        assert yaml.safe_load(re.split(r"^---$", card, maxsplit=2, flags=re.MULTILINE)[1])["model-index"][0] == {
            "name": name,
            "results": [
                {
                    "task": {"type": "tabular-classification"},
                    "dataset": {"name": f"{name}, test part", "type": name},
                    "metrics": [{"type": metric, "value": value} for metric, value in shipped(report()).items()],
                }
            ],
        }


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"format": 2}, "report of a distillation: format 2; expected format 1"),
        ({"models": []}, r"Expected `object`, got `array` - at `\$.models`"),
        ({"training": {"threads": "two"}}, r"at `\$.training.threads`"),
    ],
)
def test_what_is_no_report_is_refused(changed: dict[str, Any], found: str) -> None:
    for paper in (page, model_card, boundary_card, require_boundary):
        with pytest.raises(DataError, match=found):
            paper({**report(), **changed})


def test_what_later_versions_add_is_no_error() -> None:
    assert read_report({**report(), "later": 1}) == read_report(report())


def test_the_documentation_names_every_part_of_a_report() -> None:
    written = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", written.split("## report.json")[1]))
    for part in (Report, ModelRecord, TrainingRun, SeedMean, WorstSlice, TrainingHalf, ServingHalf):
        assert set(part.__struct_fields__) <= named
    assert GateResult.__dataclass_fields__.keys() <= named


def test_numbers_in_words() -> None:
    assert [number(x) for x in (None, math.nan, 0, 1790, 26.14, 228907.4, 1.2e-7)] == [
        "-", "-", "0", "1,790", "26.14", "228,907", "1.2e-07"]  # fmt: skip
    assert [measure(x) for x in (0.7, -0.0085, 31.2345, 1234.5, 0.0, 1.2e-5, 1e300, None)] == [
        "0.7000", "-0.0085", "31.23", "1,234", "0.0000", "0.000012", "1e+300", "-"]  # fmt: skip
    assert [scaled(x, "B") for x in (0, 999, 999.6, 225376, 1.2e11, None)] == [
        "0 B", "999 B", "1 kB", "225 kB", "120 GB", "-"]  # fmt: skip
    assert [duration(x) for x in (0.5, 83, 999.6, 2538.7, 33_000_000, None)] == [
        "0.5 µs", "83 µs", "1 ms", "2.54 ms", "33 s", "-"]  # fmt: skip
    assert [money(x, "EUR") for x in (0, 2.5, 1234.567, 0.000000631313)] == [
        "0.00 EUR", "2.50 EUR", "1,234.57 EUR", "0.000000631 EUR"]  # fmt: skip
    assert money(2.5, "") == "2.50"
    assert [share(x) for x in (0.69, 1.0, 0.1234, None)] == ["69 %", "100 %", "12.3 %", "-"]


def test_the_page_shows_every_number_of_the_plots() -> None:
    found = page(report())
    # Four metrics, and the metric over p50; two curves; a line of dots for each slice.
    assert found.count("<figure>") == 7
    assert found.count("<svg") == 10
    assert found.count("<polyline") == 12
    assert found.count('<polyline class="faint"') == 8
    # A dot per seed and metric.
    assert found.count('<circle class="faint"') == 24
    assert found.count('class="range"') == 3
    assert 'aria-label="teacher 0.7400, control 0.6900, student 0.7000"' in found
    for name in ("auc", "log_loss", "brier", "ece", "agreement", "p99"):
        assert f"<li><b>{name}</b>: " in found, "a measure is explained"


def test_a_long_training_makes_no_long_page() -> None:
    changed = report()
    changed["runs"][0]["history"] = [{"step": n, "loss": 1 / n} for n in range(1, 100_000)]
    found = page(changed)
    assert len(found) < 100_000
    last = re.findall(r'<polyline[^>]*points="[^"]*?([^ "]+)"/>', found)[0]
    assert last == "284.6,155.7"  # of the last step: nine tenths of the way, because the axis has margins


def _listen(view: Page, asked: list[str], said: list[str]) -> None:
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text))


@pytest.mark.browser
@pytest.mark.accept
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_needs_nothing_and_fits_a_phone(tmp_path: Path, scheme: Literal["light", "dark"]) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for name, make in EVERY.items():
            file = tmp_path / f"{name}.html"
            file.write_text(page(make(), {"cpu": 0.05}, "EUR"), encoding="utf-8")
            for width in (390, 1200):
                view = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
                asked: list[str] = []
                said: list[str] = []
                _listen(view, asked, said)
                view.goto(file.as_uri())
                assert asked == [file.as_uri()]
                assert said == []
                assert view.title() == f"Distillation of {make()['name']}"
                assert view.evaluate("document.documentElement.scrollWidth") <= width
                assert view.locator("script").count() == 0
                if name == "full":
                    # The comparison of the four models is there without scrolling, on a phone too.
                    place = view.get_by_text("0.7386", exact=False).first.bounding_box()
                    assert place is not None
                    assert place["x"] + place["width"] <= width
        browser.close()


def test_images_of_a_run_stand_alone_and_are_small() -> None:
    changed = report()
    changed["runs"][0]["history"] = [{"step": n, "loss": 1 / n} for n in range(1, 100_000)]
    changed["models"]["<b>"] = {**changed["models"]["student"]}
    found = images(changed)
    assert set(found) == {"quality", "loss", "latency"}
    assert sum(map(len, found["loss"].values())) < 50_000
    for address in (one for drawings in found.values() for one in drawings.values()):
        kind, _, content = address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawing = ET.fromstring(base64.b64decode(content))  # noqa: S314 - made here
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert drawing.attrib["width"] == "320"
