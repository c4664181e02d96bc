"""The flights on a phone: what the age of stored features costs, and what a snapshot and a prediction take in Chromium.

The student is trained twice in one run, from the same training set, teacher and seeds: from features as old as a device
may have them, as the example declares, and from fresh ones. Both are tested at each age. Then snapshots are made at the
steps of the declared interval up to the project's moment; a page, opened in Chromium, takes one after the other as
differences, each with its checks and its write to the browser's database, and predicts with lookups.

Needs Chromium. It makes the flights' project in a folder of its own, or takes one that `isthmus demo` has made.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import sync_playwright
from result import Comparison, at_most, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.end_to_end.files import served
from tests.end_to_end.phones import chromium, opened

from isthmus.distill.distillation import distill
from isthmus.features.clock import MICROSECOND
from isthmus.features.progress import silent
from isthmus.orchestration.artifacts import DATA, Artifacts
from isthmus.orchestration.demo import demo
from isthmus.orchestration.device.site import site
from isthmus.orchestration.device.snapshot import copy, declared, shelf, signer, snapshot
from isthmus.orchestration.models import models
from isthmus.orchestration.project import Project

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
SNAPSHOT_BYTES, SHARE, APPLIED_MS, PREDICTED_MS, COST = 15_000, 0.25, 20, 5, 0.01
PREDICTIONS = 200

APPLIED = """async ({ device, key, files }) => {
  const { Snapshots } = await import("./snapshot.mjs");
  const bytes = await Promise.all(files.map(async (file) => new Uint8Array(await (await fetch(file)).arrayBuffer())));
  const now = () => BigInt(2) ** BigInt(62);
  const snapshots = await Snapshots.open({ device, url: "none", key, now });
  await snapshots.accept(bytes.shift());
  const taken = [];
  for (const difference of bytes) {
    const began = performance.now();
    if (!(await snapshots.accept(difference))) throw new Error("nothing new");
    taken.push(performance.now() - began);
  }
  return taken;
}"""
PREDICTED = """async (count) => {
  const [form, answer] = [document.querySelector("#form"), document.querySelector("#answer")];
  const taken = [];
  for (let n = 0; n < count; n++) {
    answer.textContent = "";
    form.requestSubmit();
    while (!answer.textContent) await new Promise((done) => setTimeout(done));
    taken.push(Number(/in ([0-9.]+) ms/.exec(answer.textContent)[1]));
  }
  return taken;
}"""


def ages(project: Project, folder: Path, progress: Any) -> list[Comparison]:
    """Test AUC by the age of features, of a student trained for age beside one trained with fresh features."""
    artifacts = Artifacts.of(project, None)
    examples = artifacts.current_training_set()
    aged = models._material(artifacts, examples)
    learn = partial(models._learn, project, str(examples.path / DATA), aged.student_inputs)
    found = {}
    for name, material in {"aged": aged, "fresh": replace(aged, device=None, learn=learn)}.items():
        with project.importing():
            made = distill(
                material, folder=folder / name, cache=artifacts.outputs, runs=folder / "runs", progress=progress
            )
        found[name] = {point["seconds"]: point["found"] for point in made.data["ages"]}
    _, device = declared(project, None)
    comparisons = []
    for seconds, mine in found["aged"].items():
        low, high = mine["low"], mine["high"]
        case = f"AUC of features {seconds / 60:g} minutes old ({low:.4f} to {high:.4f})"
        ours, peer = mine["value"], found["fresh"][seconds]["value"]
        holds = ours > peer if seconds == device.age.total_seconds() else None
        comparisons.append(Comparison(case, "AUC", ours, peer, "trained fresh", round(ours / peer, 4), None, holds))
    cost = found["aged"][0.0]["value"] - found["aged"][device.age.total_seconds()]["value"]
    return [*comparisons, at_most("AUC that the declared age costs", "AUC", cost, COST)]


def snapshots(project: Project, folder: Path, steps: int) -> list[Comparison]:
    """Bytes of snapshots and differences, and their milliseconds in Chromium."""
    service, device = declared(project, None)
    every, last = device.every // MICROSECOND, project.now()
    sizes, shares, ways = [], [], []
    place = shelf(project, service.name)
    shutil.rmtree(place.folder, ignore_errors=True)
    for step in range(steps, -1, -1):
        project.fixed_now = last // every * every - step * every
        before = place.before()
        written = snapshot(project)
        sizes.append(written.bytes)
        latest = copy(project, None, folder / "host")
        if before is None:
            ways.append(place.snapshot(latest.snapshot))
        else:
            ways.append(place.delta(before.snapshot, latest))
            shares.append(len(ways[-1]) / written.bytes)
    page = site(project, None, folder / "page")
    for number, data in enumerate(ways):
        (page / f"way-{number}").write_bytes(data)
    with sync_playwright() as playwright, served(page) as address:
        browser = chromium(playwright)
        shown = opened(browser, address)
        predicted = shown.evaluate(PREDICTED, PREDICTIONS)
        kept = shown.evaluate("async () => (await (await fetch('package/manifest.json')).json()).device")
        files = [f"way-{number}" for number in range(len(ways))]
        asked = {"device": kept, "key": signer(project).public_key, "files": files}
        applied = browser.new_context().new_page()
        applied.goto(address + "page.json")
        taken = applied.evaluate(APPLIED, asked)
        browser.close()
    case = f"{steps} differences of {device.every}"
    return [
        at_most("a snapshot, largest", "bytes", max(sizes), SNAPSHOT_BYTES),
        at_most(f"{case}, median", "of a snapshot", statistics.median(shares), SHARE),
        at_most(f"{case}, nine of ten", "of a snapshot", statistics.quantiles(shares, n=10)[-1], SHARE),
        at_most(f"{case}: checked and stored in Chromium, median", "ms", statistics.median(taken), APPLIED_MS),
        at_most(f"{case}: checked and stored in Chromium, worst", "ms", max(taken), APPLIED_MS),
        at_most("a prediction with lookups on the page, median", "ms", statistics.median(predicted), PREDICTED_MS),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--quick", action="store_true", help="few snapshots")
    parser.add_argument("--project", type=Path, help="the flights, as `isthmus demo` has left them")
    asked = parser.parse_args(arguments)
    began = time.perf_counter()

    def progress(text: str, done: float) -> None:
        sys.stderr.write(f"{time.perf_counter() - began:6.1f} s {done:4.0%} {text}\n")

    with TemporaryDirectory(prefix="isthmus-device-") as name:
        folder = Path(name)
        root = asked.project or shutil.copytree(FLIGHTS, folder / "flights")
        project = Project(root)
        if asked.project is None:
            demo(project, progress=progress)
        found = snapshots(project, folder, 12 if asked.quick else 144)
        found = [*ages(Project(root), folder, silent if asked.json else progress), *found]
    return report("device", found, as_json=asked.json, quick=asked.quick)


if __name__ == "__main__":
    sys.exit(main())
