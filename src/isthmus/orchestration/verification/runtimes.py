"""Run a package in every runtime that is available here, and compare the answers with its student's."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from isthmus.distill.export.parity import Parity, ParityRows
from isthmus.distill.types import Index
from isthmus.features.errors import DependencyError, PackageError
from isthmus.features.profiles import ServingProfile
from isthmus.orchestration.runtimes.nodeclient import DeviceReport, ask_device
from isthmus.orchestration.runtimes.products import RUNTIMES
from isthmus.orchestration.runtimes.web import NAME as WEB
from isthmus.orchestration.runtimes.web import NodeFailed, WebRuntime
from isthmus.orchestration.verification.devices import DeviceRows
from isthmus.orchestration.verification.modelinputs import input_values
from isthmus.package.clients import READER
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import CoreFeeds, Head
from isthmus.package.golden import Inputs
from isthmus.package.inputs import feeds
from isthmus.package.inspect import Runtime, ServedRuntime
from isthmus.package.manifest import Package
from isthmus.package.replay import Answers
from isthmus.package.verdict import (
    EXAMPLES,
    ONNX_RUNTIME,
    FeatureVerdict,
    RuntimeVerdict,
    Sample,
    ValueDifference,
    Verdict,
    merged,
)


class ClientRun(NamedTuple):
    answers: DeviceReport | NodeFailed | DependencyError
    milliseconds: float


def ask_client(package: Package, device: DeviceRows) -> ClientRun:
    began = time.perf_counter()
    answers: DeviceReport | NodeFailed | DependencyError
    try:
        answers = ask_device(WebRuntime(install=False).node, package, device.questions)
    except (DependencyError, NodeFailed) as error:
        answers = error
    return ClientRun(answers, 1000 * (time.perf_counter() - began))


def compare_runtimes(
    parity: Parity,
    package: Package,
    device: DeviceRows | None = None,
    client: Callable[[], ClientRun] | None = None,
    *,
    verdict: Verdict,
    all_keys: bool,
) -> None:
    """Run each file of a package in every runtime that is available here, and compare the answers with the student's.

    Adds the results to `verdict`, and a reason for each missing runtime to `verdict.skipped`. `parity` has the
    student's answers. ONNX Runtime gets all rows of `parity`, and other runtimes a sample unless `all_keys` is set.
    Every runtime also gets the rows of `device`, whose stored features come from a snapshot. `client` returns the
    JavaScript client's answers to the rows of `device`. If both are given, these answers are the only ones of
    onnxruntime-web.
    """
    all_rows = parity.sample(parity.rows)
    few = all_rows if all_keys or parity.slow_runtime_rows == parity.rows else parity.sample(parity.slow_runtime_rows)
    device_sample = None
    if device is not None:
        names, at = device.rows.keys.tolist(), device.questions.at
        device_sample = parity.device_rows(device.offline, device.stored, names, at)
        if not len(device_sample[1]):
            verdict.skipped["what a device answers"] = f"a request transform refuses all {len(names):,} rows"
    for name, product in RUNTIMES.items():
        if not any(variant.format in product.formats for variant in package.manifest.variants):
            continue
        began, rows = time.perf_counter(), all_rows if name == ONNX_RUNTIME else few
        try:
            if name == WEB and device is not None and client is not None and device_sample is not None:
                run = client()
                answered, fed = _by_client(parity, package, device, run, *device_sample)
                verdict.device.update(fed)
                spent, sample = run.milliseconds, Sample(len(device.rows), device.of)
            else:
                runtime = WebRuntime(install=False) if name == WEB else product()
                answered = _ask(parity, package, runtime, [rows] if device_sample is None else [rows, device_sample[0]])
                if name == ONNX_RUNTIME:
                    answered |= parity.prompts(package)
                spent, sample = 1000 * (time.perf_counter() - began), Sample(len(rows), len(all_rows))
        except DependencyError as error:
            verdict.skipped[name] = f"{error.where.replace(name, 'it')} {error.found}: {error.remedy}"
            continue
        if not answered:
            verdict.skipped[name] = "it cannot run any file of the package"
            continue
        if sample.rows < sample.of:
            verdict.samples[f"rows in {name}"] = sample
        files = {f"{file} in {name}" if name == WEB else file: part for file, part in answered.items()}
        verdict.files.update(files)
        most = max(part.compared for part in files.values())
        verdict.runtimes[name] = RuntimeVerdict([*files], most, round(spent, 1))


def compare_served(parity: Parity, package: Package, profile: ServingProfile, verdict: Verdict) -> None:
    """Run the file that a server opens on the server's device, and compare its answers with the student's.

    Adds the result to `verdict`. The limits are those of every other file.
    """
    began, runtime = time.perf_counter(), ServedRuntime(profile)
    answered = _ask(parity, package, runtime, [parity.sample(parity.rows)])
    files = {runtime.label(file): part for file, part in answered.items()}
    verdict.files.update(files)
    most = max(part.compared for part in files.values())
    verdict.runtimes[runtime.name] = RuntimeVerdict([*files], most, round(1000 * (time.perf_counter() - began), 1))


def _ask(
    parity: Parity, package: Package, runtime: Runtime, questions: Sequence[ParityRows]
) -> dict[str, FeatureVerdict]:
    answered = {}
    for variant in runtime.files(package.manifest):
        try:
            answered[variant.file] = parity.check(variant, partial(runtime.ask, package, variant), *questions)
        except PackageError as error:
            answered[variant.file] = parity.unanswered_verdict(variant, error.found, *questions)
    return answered


def _by_client(
    parity: Parity, package: Package, device: DeviceRows, client: ClientRun, questions: ParityRows, places: Index
) -> tuple[dict[str, FeatureVerdict], dict[str, FeatureVerdict]]:
    inputs, answers = package.model_inputs, client.answers
    variants = [variant for variant in package.manifest.variants if variant.format in RUNTIMES[WEB].formats]
    if isinstance(answers, DependencyError):
        raise answers
    if isinstance(answers, NodeFailed):
        reason = f"{WEB} refuses it ({answers})"
        return {variant.file: parity.unanswered_verdict(variant, reason, questions) for variant in variants}, {}
    fed = [input_values(inputs, answer.fed) for answer in answers.files.values()]
    compared = {
        name: merged([device.rows.compare(offline, values[name][1], dtype) for values in fed])
        for name, (dtype, offline) in input_values(inputs, feeds(inputs, device.offline)).items()
    }
    files = {}
    for variant in variants:
        outputs = {name: values[places] for name, values in answers.files[variant.file].outputs.items()}
        files[variant.file] = parity.check(variant, partial(_known_outputs, [outputs]), questions, golden=False)
    if answers.core is not None:
        # The client's featurizer and the Python featurizer must give a core the same bits.
        expected = Head.loads(package.files.read(HEAD)).feeds(device.offline)
        compared |= compare_feeds(device.rows.keys, expected, answers.core)
    return files, compared


def compare_feeds(keys: np.ndarray[Any, Any], expected: CoreFeeds, found: CoreFeeds) -> dict[str, FeatureVerdict]:
    sides = {**expected.tensors, "refused": expected.refused}, {**found.tensors, "refused": found.refused}
    compared = {}
    for name, rows in sides[0].items():
        theirs = sides[1][name]
        differs = [_bits(one) != _bits(other) for one, other in zip(rows, theirs, strict=True)]
        places = np.flatnonzero(differs)
        examples = [
            ValueDifference(str(keys[place]), str(rows[place]), str(theirs[place])) for place in places[:EXAMPLES]
        ]
        worst = np.inf if len(places) else 0.0
        compared[f"{name} of {HEAD} in {READER}"] = FeatureVerdict(len(rows), len(places), worst, examples)
    return compared


def _bits(values: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of the values with one canonical NaN, since engines differ in NaN payloads."""
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return values.tobytes()


def _known_outputs(outputs: Sequence[Answers], _cases: Sequence[Inputs]) -> Sequence[Answers]:
    return outputs
