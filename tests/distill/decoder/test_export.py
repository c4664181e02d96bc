"""The package of a causal language model."""

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from isthmus.distill.decoder.reference import GOLDEN_TOKENS
from isthmus.distill.decoder.weights import quantize_blocks
from isthmus.distill.export.causal import DecodingReport, export
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.features.errors import ConfigurationError, GateFailed, PackageError
from isthmus.orchestration.runtimes.programs import ProgramRuntime
from isthmus.orchestration.runtimes.web import WebRuntime
from isthmus.package import replay
from isthmus.package.generation.tokenizer import Tokenizer
from isthmus.package.inspect import inspect
from isthmus.package.manifest import open_package, read_package
from isthmus.package.prompts import generation_of, open_tokenizer, read_prompts
from tests.distill.decoder.support import PROMPTS, SETTINGS, greedy_naively, origin, packaged, tiny
from tests.distill.packages import resum
from tests.tokenizing import trained

FILES = [f"model.{precision}.{form}" for precision in ("fp32", "int8", "int4") for form in ("onnx", "ort")]


def test_a_package_says_what_it_needs_to_generate(package: Path, report: DecodingReport) -> None:
    manifest = read_package(package)
    assert [variant.file for variant in manifest.variants] == FILES
    assert [(tensor.name, tensor.element, tensor.shape) for tensor in manifest.tensors] == [
        ("tokens", "int64", (1, "tokens")), ("past", "float", (1, "past", 4, 2, 16)),
    ]  # fmt: skip
    assert [(tensor.name, tensor.shape) for tensor in manifest.outputs] == [
        ("logits", (1, 640)), ("new", (1, "tokens", 4, 2, 16)),
    ]  # fmt: skip
    generation = generation_of(manifest)
    assert (generation.context, generation.most, generation.end) == (384, 48, (0,))
    assert [(control.text, control.token) for control in generation.control] == [("<|end|>", 0), ("<|be-gin|>", 1)]
    sizes = {file: report.files[file].bytes for file in FILES}
    assert sizes["model.fp32.ort"] > sizes["model.int8.ort"] > sizes["model.int4.ort"]
    assert report.files["model.fp32.ort"].agreement == 1
    assert report.files["model.fp32.ort"].decode > 0


def test_golden_prompts_are_those_of_the_model(package: Path) -> None:
    prompts = read_prompts(open_package(package))
    assert tuple(prompt.text for prompt in prompts) == PROMPTS
    model = tiny()
    for prompt in prompts:
        tokens = list(prompt.answers["model.fp32.ort"])
        assert tokens
        assert greedy_naively(model, prompt.tokens, len(tokens)) == tokens
        # What looks like a control token is text.
        assert not {0, 1} & set(prompt.tokens)


@pytest.mark.accept
def test_a_package_is_verified_and_made_again_to_the_bit(package: Path, tmp_path: Path) -> None:
    inspection = inspect(package)
    inspection.require()
    assert [check.subject for check in inspection.checks][-7:] == [
        "prompts.json",
        *(f"{file}: prompts" for file in FILES),
    ]
    assert packaged(tmp_path).digest == inspection.digest
    web = inspect(package, runtime=WebRuntime())
    web.require()
    assert {*web.worst} == {"model.fp32.ort", "model.int4.ort"}


def _changed(package: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy in which a file has another content, and sums that fit."""
    copy = folder / "changed"
    shutil.copytree(package, copy)
    content = json.loads((copy / name).read_bytes())
    change(content)
    (copy / name).write_bytes(json.dumps(content).encode())
    sums = [f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(copy.iterdir())
            if file.name != "SHA256SUMS"]  # fmt: skip
    (copy / "SHA256SUMS").write_text("".join(sums))
    return copy


def test_another_tokenizer_and_another_text_are_found(package: Path, tmp_path: Path) -> None:
    def merge(file: dict[str, Any]) -> None:
        del file["model"]["merges"][5:]

    with pytest.raises(PackageError, match=r"returns other tokens for 'Return the sum of the values\.' than recorded"):
        inspect(_changed(package, tmp_path / "a", "tokenizer.json", merge)).require()

    def say(prompts: list[dict[str, Any]]) -> None:
        prompts[0]["answers"]["model.int4.ort"][2] += 1

    with pytest.raises(
        PackageError, match=r"model\.int4\.ort: generates token [0-9]+ at place 2 after 'Return the sum"
    ):
        inspect(_changed(package, tmp_path / "b", "prompts.json", say)).require()

    def grow(manifest: dict[str, Any]) -> None:
        manifest["generation"]["end"] = [640]

    with pytest.raises(PackageError, match="names token 640; expected a token below 640"):
        inspect(_changed(package, tmp_path / "c", "manifest.json", grow)).require()


def test_a_prompt_that_fills_the_context_is_found(package: Path, tmp_path: Path) -> None:
    prompts = read_prompts(open_package(package))

    def narrow(manifest: dict[str, Any]) -> None:
        manifest["generation"] |= {"context": max(len(prompt.tokens) for prompt in prompts), "most": 3}

    found = inspect(_changed(package, tmp_path / "a", "manifest.json", narrow)).checks[-1]
    assert (found.subject, found.finding) == ("prompts.json", "a prompt is empty or fills the context of the model")


def test_a_text_that_ends_before_the_recorded_one_is_found(package: Path, tmp_path: Path) -> None:
    (prompt, *_) = read_prompts(open_package(package))

    def end(manifest: dict[str, Any]) -> None:
        manifest["generation"]["end"] = [prompt.answers["model.fp32.ort"][2]]

    def shorten(manifest: dict[str, Any]) -> None:
        manifest["generation"]["most"] = 3

    for number, change in enumerate((end, shorten)):
        damaged = inspect(_changed(package, tmp_path / str(number), "manifest.json", change))
        findings = {check.subject: check.finding for check in damaged.checks}
        assert re.match(r"ends the text at place [123] after 'Return the", findings["model.fp32.ort: prompts"])


@pytest.mark.parametrize(
    ("steps", "problem"),
    [([], "onnxruntime refuses it (["), ([2**62], "onnxruntime refuses it (no answer in 2 seconds)")],
)
def test_a_graph_that_fails_after_golden_cases_is_a_failed_check(
    steps: list[int], problem: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a text longer than in the golden cases, the graph has no number of steps, or too many."""
    monkeypatch.setattr(replay, "SECONDS", 2)
    copy = Path(shutil.copytree(package, tmp_path / "copy"))
    model, value, node = onnx.load(copy / FILES[0]), onnx.helper.make_tensor_value_info, onnx.helper.make_node
    body = onnx.helper.make_graph(
        [node("Identity", ["going"], ["on"]), node("Cos", ["x"], ["y"])], "body",
        [value("turn", onnx.TensorProto.INT64, []), value("going", onnx.TensorProto.BOOL, []),
         value("x", onnx.TensorProto.FLOAT, [])],
        [value("on", onnx.TensorProto.BOOL, []), value("y", onnx.TensorProto.FLOAT, [])],
    )  # fmt: skip
    constants = {"steps": [0] * (GOLDEN_TOKENS + 1) + steps, "zero": np.float32(0)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items())
    (last,) = (node for node in model.graph.node if "logits" in node.output)
    last.output[[*last.output].index("logits")] = "logits_before"
    model.graph.node.extend([
        node("Shape", ["past"], ["length"], start=1, end=2), node("Squeeze", ["length"], ["place"]),
        node("Gather", ["steps", "place"], ["turns"]), node("Loop", ["turns", "", "zero"], ["trouble"], body=body),
        node("Add", ["logits_before", "trouble"], ["logits"]),
    ])  # fmt: skip
    (copy / FILES[0]).write_bytes(model.SerializeToString())
    resum(copy)
    findings = {check.subject: check for check in inspect(copy).checks}
    assert findings[FILES[0]].error is None
    failed = findings[f"{FILES[0]}: prompts"]
    assert failed.error is not None
    assert failed.finding.startswith(problem)


def test_prompts_of_a_file_that_failed_are_not_run(package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "copy"))
    (copy / FILES[-1]).write_bytes(b"none")
    resum(copy)
    checks = {check.subject: check.error for check in inspect(copy).checks}
    assert [subject for subject, error in checks.items() if error] == [FILES[-1]]
    assert f"{FILES[0]}: prompts" in checks
    assert f"{FILES[-1]}: prompts" not in checks


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has 900 tokens; expected at most the model's 640"):
        export(tiny(), trained(size=900), tmp_path, origin=origin(), settings=SETTINGS)
    with pytest.raises(ConfigurationError, match="has no control token 5, which begins or ends the model's texts"):
        export(tiny(eos_token_id=5), trained(), tmp_path, origin=origin(), settings=SETTINGS)
    assert not [*tmp_path.iterdir()]


def test_logits_that_are_no_numbers_are_not_exported(tmp_path: Path) -> None:
    model: Any = tiny()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(PackageError, match="has 640 logits that are NaN or infinite after 0 tokens"):
        export(model, trained(), tmp_path, origin=origin(), settings=SETTINGS)


def test_weights_that_disagree_are_left_out(tmp_path: Path) -> None:
    strict = DecodingSettings(
        prompts=PROMPTS,
        most=48,
        golden_tokens=24,
        precisions=("fp32", "int4"),
        formats=("ort",),
        agreement={"int4": 1.0},
    )
    report = packaged(tmp_path, strict)
    assert [*report.files] == ["model.fp32.ort"]
    assert "of the tokens; expected at least 100.0%" in report.left_out["int4"]
    alone = DecodingSettings(prompts=PROMPTS, precisions=("int4",), formats=("ort",), agreement={"int4": 1.0})
    with pytest.raises(GateFailed, match="no file is close enough to the model"):
        packaged(tmp_path, alone)


def test_settings_say_all_that_is_wrong(tmp_path: Path) -> None:
    wrong = DecodingSettings(
        precisions=("int3",), formats=("onnx", "pte"), agreement={"in8": 0.0}, golden_tokens=0, context=1,  # type: ignore
    )  # fmt: skip
    assert [problem.where for problem in wrong.problems("decoding")] == [
        f"decoding: {name}" for name in ("context", "golden_tokens", "precisions", "agreement", "formats")
    ]
    with pytest.raises(ConfigurationError, match="decoding: prompts: empty; expected at least one prompt, as users"):
        export(tiny(), trained(), tmp_path, origin=origin(), settings=DecodingSettings())


def test_blocks_are_within_half_a_step() -> None:
    weights = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    weights[0, :32] = 0
    whole, scales, zeros = quantize_blocks(weights)
    restored = (whole.reshape(6, 3, 32) - zeros[..., None].astype(np.float32)) * scales[..., None]
    assert (np.abs(restored - weights.reshape(6, 3, 32)) <= scales[..., None] * 0.501).mean() > 0.98
    assert (restored[0, 0] == 0).all()
    assert whole.max() == 15


def test_a_package_opens_its_own_tokenizer(package: Path) -> None:
    tokenizer = open_tokenizer(open_package(package))
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.size == 600


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.slowest
def test_executorch_says_the_same_token_by_token(tmp_path: Path) -> None:
    settings = DecodingSettings(
        prompts=PROMPTS, most=48, golden_tokens=24, precisions=("fp32",), formats=("ort",), executorch=True
    )
    report = packaged(tmp_path, settings)
    assert report.left_out == {}
    assert report.files["model.fp32.pte"].agreement == 1
    assert report.files["model.fp32.pte"].worst < 1e-4
    for prompt in read_prompts(open_package(report.path)):
        assert prompt.answers["model.fp32.pte"] == prompt.answers["model.fp32.ort"]
    inspect(report.path).require()
    asked = inspect(report.path, runtime=ProgramRuntime("pte"))
    asked.require()
    assert {*asked.worst} == {"model.fp32.pte"}
    assert packaged(tmp_path, settings).digest == report.digest
