"""Measure the flights example on a phone: the cost of old features, and of snapshots and predictions in Chromium.

The student is trained twice on the same training set, teacher and seeds: with features as old as a device may have, as
the example declares, and with fresh ones. Both are tested at each age. Then snapshots are made at the declared interval
up to the project's current time. A page in Chromium applies each as a delta, checks it, writes it to the browser's
database, and predicts with lookups. Finally, a snapshot with one row for each of 100,000 owners, besides the rows that
all share, is written and the owners' files are requested.

Needs Chromium. Creates the flights project in a temporary folder, or uses one in which `isthmus demo` has run.
"""

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
from result import Comparison, at_most, options_parser, report

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from tests.chromium import launch
from tests.end_to_end.files import served
from tests.end_to_end.phones import opened
from tests.features.support import make_view
from tests.package.snapshot.support import Content, put_owners

from isthmus.distill.distillation import distill
from isthmus.features.clock import MICROSECOND
from isthmus.features.progress import silent
from isthmus.features.types import Float32, Float64, Int64, String
from isthmus.orchestration.artifacts import DATA, Artifacts
from isthmus.orchestration.demo import demo
from isthmus.orchestration.models import students
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.create import copy, device_service, signer, snapshot, snapshot_folder
from isthmus.orchestration.snapshots.site import site
from isthmus.package.snapshot.owners import encode_owner, open_owners
from isthmus.package.snapshot.store import SnapshotFolder

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
SNAPSHOT_BYTES, SHARE, APPLIED_MS, PREDICTED_MS, COST = 15_000, 0.25, 20, 5, 0.01
PREDICTIONS = 200
OWNERS, SHARED, ASKED = 100_000, 127, 1000
WRITTEN_US, OWNER_BYTES, FILE_MS, DIFFERENCE_MS = 200, 300, 1, 2
"""Targets: time per owner to sign and write, bytes per owner, and time per request for a file and for a delta."""

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
    """Compare the test AUC by age of features, for students trained with aged and with fresh features."""
    artifacts = Artifacts.of(project, None)
    examples = artifacts.current_training_set()
    aged = students._material(artifacts, examples)
    learn = partial(students._learn, project, str(examples.path / DATA), aged.student_inputs)
    results = {}
    for name, material in {"aged": aged, "fresh": replace(aged, device=None, learn=learn)}.items():
        with project.importing():
            made = distill(
                material, folder=folder / name, cache=artifacts.outputs, runs=folder / "runs", progress=progress
            )
        results[name] = {point["seconds"]: point["found"] for point in made.data["ages"]}
    _, device = device_service(project, None)
    comparisons = []
    for seconds, mine in results["aged"].items():
        low, high = mine["low"], mine["high"]
        case = f"AUC of features {seconds / 60:g} minutes old ({low:.4f} to {high:.4f})"
        ours, peer = mine["value"], results["fresh"][seconds]["value"]
        holds = ours > peer if seconds == device.age.total_seconds() else None
        comparisons.append(
            Comparison(case, "AUC", ours, peer, "trained on fresh features", round(ours / peer, 4), None, holds)
        )
    cost = results["aged"][0.0]["value"] - results["aged"][device.age.total_seconds()]["value"]
    return [*comparisons, at_most("AUC loss at the declared age", "AUC", cost, COST)]


def snapshots(project: Project, folder: Path, steps: int) -> list[Comparison]:
    service, device = device_service(project, None)
    every, last = device.every // MICROSECOND, project.now()
    sizes, shares, ways = [], [], []
    place = snapshot_folder(project, service.name)
    shutil.rmtree(place.folder, ignore_errors=True)
    for step in range(steps, -1, -1):
        project.fixed_now = last // every * every - step * every
        before = place.latest_or_none()
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
        browser = launch(playwright)
        shown = opened(browser, address)
        predicted = shown.evaluate(PREDICTED, PREDICTIONS)
        declared_device = shown.evaluate("async () => (await (await fetch('package/manifest.json')).json()).device")
        files = [f"way-{number}" for number in range(len(ways))]
        arguments = {"device": declared_device, "key": signer(project).public_key, "files": files}
        applied = browser.new_context().new_page()
        applied.goto(address + "page.json")
        milliseconds = applied.evaluate(APPLIED, arguments)
        browser.close()
    case = f"{steps} deltas of {device.every}"
    return [
        at_most("largest snapshot", "bytes", max(sizes), SNAPSHOT_BYTES),
        at_most(f"{case}, median", "of a snapshot", statistics.median(shares), SHARE),
        at_most(f"{case}, 90th percentile", "of a snapshot", statistics.quantiles(shares, n=10)[-1], SHARE),
        at_most(f"{case}: checked and stored in Chromium, median", "ms", statistics.median(milliseconds), APPLIED_MS),
        at_most(f"{case}: checked and stored in Chromium, worst", "ms", max(milliseconds), APPLIED_MS),
        at_most("a prediction with lookups on the page, median", "ms", statistics.median(predicted), PREDICTED_MS),
    ]


def owners(folder: Path, count: int) -> list[Comparison]:
    views = [
        make_view({"n": Int64, "x": Float64, "rate": Float32}, {"customer": Int64}, name="own"),
        make_view({f"f{n}": Float64 for n in range(8)}, {"place": String}, name="shared"),
    ]
    own: Content = {(n,): (n, n, {"n": n, "x": n / 3, "rate": n / 7}) for n in range(count)}
    shared: Content = {(f"P{n:03}",): (n, n, {f"f{m}": n / 3 + m for m in range(8)}) for n in range(SHARED)}
    place, key = SnapshotFolder(folder), views[0].keys[0]
    spent = []
    for number in (1, 2):
        began = time.perf_counter()
        latest = put_owners(place, views, [own, shared], key, number)
        spent.append(time.perf_counter() - began)
    keys = [encode_owner(int(n), key) for n in np.linspace(0, count - 1, ASKED)]
    with open_owners(place.owners(latest.earlier[0])) as before:
        had = [file.digest for file in map(before.file, keys) if file is not None]
    began = time.perf_counter()
    files = [place.owner_snapshot(one, latest) for one in keys]
    whole = (time.perf_counter() - began) / ASKED
    began = time.perf_counter()
    ways = [place.owner_snapshot(one, latest, since) for one, since in zip(keys, had, strict=True)]
    difference = (time.perf_counter() - began) / ASKED
    sizes = [len(file[1]) for file in files if file is not None]
    if not all(way is not None and len(way[1]) < size / 4 for way, size in zip(ways, sizes, strict=True)):
        raise RuntimeError("an owner has no delta, or one that is not small")
    stored = place.owners(latest.snapshot).stat().st_size
    case = f"{count:,} owners, {SHARED} shared rows"
    return [
        at_most(f"{case}: packed, signed and written", "µs per owner", 1e6 * min(spent) / count, WRITTEN_US),
        at_most(f"{case}: on the server", "bytes per owner", stored / count, OWNER_BYTES),
        at_most(f"{case}: a file of {max(sizes):,} bytes", "ms", 1e3 * whole, FILE_MS),
        at_most(f"{case}: a delta", "ms", 1e3 * difference, DIFFERENCE_MS),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_parser(__doc__, "few snapshots")
    parser.add_argument("--project", type=Path, help="flights project after `isthmus demo`")
    options = parser.parse_args(arguments)
    began = time.perf_counter()

    def progress(text: str, done: float) -> None:
        sys.stderr.write(f"{time.perf_counter() - began:6.1f} s {done:4.0%} {text}\n")

    with TemporaryDirectory(prefix="isthmus-device-") as name:
        folder = Path(name)
        root = options.project or shutil.copytree(FLIGHTS, folder / "flights")
        project = Project(root)
        if options.project is None:
            demo(project, progress=progress)
        comparisons = snapshots(project, folder, 12 if options.quick else 144)
        comparisons = [*ages(Project(root), folder, silent if options.json else progress), *comparisons]
        comparisons += owners(folder / "owners", OWNERS // 10 if options.quick else OWNERS)
    return report("device", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
