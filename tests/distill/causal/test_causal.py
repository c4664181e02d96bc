"""The task, from its declaration to a student: trained further, and taught."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from isthmus.distill.causal.network import CausalStudent
from isthmus.distill.causal.task import CausalTask
from isthmus.distill.declaration import Search
from isthmus.distill.decoder.weights import in_precision
from isthmus.distill.distillation import DistillationReport, distill
from isthmus.distill.export.export import ExportReport, export
from isthmus.distill.export.ladder import compare_forms
from isthmus.distill.export.parity import Parity
from isthmus.distill.gates import Gate, check_gates
from isthmus.distill.inputs import input_problems
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.distill.language.lora import Lora
from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.onnx.runtime import ask, session
from isthmus.distill.restore import create_task, restore
from isthmus.distill.search.search import search
from isthmus.distill.tasks.answers import graph_answers
from isthmus.distill.tasks.task import Material, TeacherBatch
from isthmus.distill.training.studentrun import TeacherBatches, train_student
from isthmus.distill.training.teacheroutputs import complete_outputs, open_outputs
from isthmus.distill.types import Index
from isthmus.features.definition.spec import FeatureService
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, GateFailed
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Float64, String
from isthmus.orchestration.models.students import _require_gates
from isthmus.orchestration.verification.runtimes import compare_runtimes
from isthmus.package.inputs import ModelInput
from isthmus.package.inspect import OnnxRuntime, inspect
from isthmus.package.manifest import open_package
from isthmus.package.prompts import read_prompts
from isthmus.package.verdict import Verdict
from tests.distill.causal.support import END, HERE, SHAPE, declaration, domain, material, tokenizer, training_set
from tests.distill.decoder.support import greedy_naively
from tests.distill.packages import resum
from tests.serving.support import CONTRACT

TAUGHT: Mapping[str, Any] = {"teacher": f"{HERE}:teacher", "shape": SHAPE, "top_k": 8}
GATES = [Gate("gain", at_least=0.15), Gate("regression", at_most=0.05)]
FURTHER: Mapping[str, Any] = {"epochs": 12, "learning_rate": 3e-3, "gates": GATES}


def task(**changes: Any) -> CausalTask:
    found = create_task(material(**changes))
    assert isinstance(found, CausalTask)
    return found


def trained(folder: Path, of: CausalTask, seed: int = 0, note: Callable[[str], None] = lambda _: None) -> CausalStudent:
    """A student, as the step trains it."""
    declared, cache_folder = of.material.declaration, folder / "cache"
    everything = np.arange(of.material.table.num_rows)
    outputs = open_outputs(of, of.teacher(), everything, cache_folder, lambda *_: None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student, objective = of.student(), of.objective()
    settings = declared.training_settings(of.material.profile, 1000)
    train_student(of, student, objective, outputs, settings, folder / "run", lambda text, _done: note(text))
    assert isinstance(student, CausalStudent)
    return student


def measured(of: CausalTask, student: nn.Module, rows: Index) -> dict[str, float]:
    with torch.no_grad():
        answers = {
            key: value.numpy() for key, value in student.eval()(*of.batch(torch.from_numpy(rows)).inputs).items()
        }
    before = {key: value.numpy() for key, value in of.teacher().ask(of.asked(rows)).items()}
    return of.quality(answers, rows, before)


# --- a base that is trained further


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    """With replay, over two seeds."""
    return whole(tmp_path_factory.mktemp("further"), **FURTHER)


def whole(folder: Path, **changes: Any) -> DistillationReport:
    return distill(
        material(**changes), folder=folder / "models", cache=folder / "cache", runs=folder / "runs",
    )  # fmt: skip


def test_a_base_gains_on_the_domain_and_loses_little_with_replay(further: DistillationReport) -> None:
    report = further.data
    assert (report["task"], report["metric"], report["more"]) == ("causal", "perplexity", False)
    before, after = (report["models"][name]["quality"] for name in ("teacher", "student"))
    assert (before["gain"], before["regression"]) == (0, 0)
    assert after["perplexity"] < 0.5 * before["perplexity"]
    assert after["gain"] == pytest.approx(
        np.mean([run["quality"]["gain"] for run in report["runs"] if run["model"] == "student"])
    )
    for name in ("gain", "regression"):
        low, high = report["models"]["student"]["intervals"][name]
        assert low < after[name] < high
        assert report["measures"][name] == after[name]
    results = check_gates(report, GATES, "writer")
    assert [str(result) for result in results if not result.holds] == []
    # Nothing asks the teacher: the student is its own control, and is trained once.
    assert report["taught"]["value"] == 0


def test_a_base_that_forgets_is_refused(further: DistillationReport, tmp_path: Path) -> None:
    """The same without replay."""
    options = {**FURTHER, "replay": 0, "seeds": 1}
    found = whole(tmp_path, **options).data
    assert found["measures"]["gain"] > 0.5
    assert found["measures"]["regression"] > 10 * max(0.01, further.data["measures"]["regression"])
    with pytest.raises(GateFailed, match=r"student of writer: gate regression failed: [\d.]+ > 0\.05"):
        _require_gates(material(**options).declaration, found)


def test_low_rank_changes_are_added_to_the_weights_of_the_base(tmp_path: Path) -> None:
    options = {
        **FURTHER,
        "learning_rate": 2e-2,
        "seeds": 1,
        "lora": Lora(rank=4, alpha=8, layers=("q_proj", "down_proj")),
    }
    made = whole(tmp_path, **options)
    assert made.data["measures"]["gain"] > 0.3
    before = task(**{**options, "lora": None}).student().state_dict()
    after = restore(material(**options), made.path).student.state_dict()
    assert before.keys() == after.keys()
    changed = {name: after[name] - weights for name, weights in before.items() if not torch.equal(after[name], weights)}
    assert {name.rpartition(".weight")[0].rpartition(".")[2] for name in changed} == {"q_proj", "down_proj"}
    assert {int(torch.linalg.matrix_rank(change, rtol=1e-4)) for change in changed.values()} == {4}


def test_the_folder_holds_the_model_and_its_tokenizer(further: DistillationReport) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert {file.name for file in further.path.iterdir()} == {
        "config.json", "control.safetensors", "report.json", "student.safetensors", "tokenizer.json",
    }  # fmt: skip
    again = restore(material(**FURTHER), further.path)
    student = again.student
    assert isinstance(student, CausalStudent)
    config = LlamaConfig(**json.loads((further.path / "config.json").read_bytes()))
    model = LlamaForCausalLM(config)
    model.load_state_dict(student.model.state_dict())
    words = Tokenizer.from_file(str(further.path / "tokenizer.json"))
    assert words.encode(domain(1, 8)[0]).ids == tokenizer().encode(domain(1, 8)[0]).ids
    run = next(r for r in further.data["runs"] if r["seed"] == further.data["shipped"])
    found = measured(task(), student, again.task.material.parts.test)
    assert found["perplexity"] == pytest.approx(run["quality"]["perplexity"], rel=1e-4)


@pytest.fixture(scope="module")
def exported(further: DistillationReport, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """The package of the student that was trained further."""
    folder = tmp_path_factory.mktemp("packages")
    settings = DecodingSettings(formats=("ort",), agreement={"int8": 0.0, "int4": 0.0})
    return packaged(further, folder, decoding=settings)


def packaged(further: DistillationReport, folder: Path, precision: Any = "fastest", **changes: Any) -> ExportReport:
    of = material(**{**FURTHER, **changes})
    of = replace(of, contract=CONTRACT.hash, declaration=replace(of.declaration, student=FeatureService("late", [])))
    profile = ServingProfile(precision=precision, latency_objective_ms=1000)
    # The student of a test learned under a contract that is none.
    report = json.loads((further.path / "report.json").read_bytes())
    model = folder / "model"
    shutil.copytree(further.path, model)
    (model / "report.json").write_text(json.dumps({**report, "contract": CONTRACT.hash}))
    contract = {"hash": CONTRACT.hash, **CONTRACT.as_dict()}
    return export(of, model, folder, contract=contract, profile=profile, cache=folder / "cache")


@pytest.mark.accept
def test_the_package_of_a_student_says_what_it_says(exported: ExportReport, further: DistillationReport) -> None:
    assert {*exported.quality} == {"model.fp32.ort", "model.int8.ort", "model.int4.ort"}
    assert exported.quality["model.fp32.ort"] == {"agreement": 1}
    assert exported.served.p50_us > 0
    inspect(exported.path).require()
    opened = open_package(exported.path)
    manifest, prompts = opened.manifest, read_prompts(opened)
    assert (manifest.task, manifest.metric, manifest.model) == ("causal", "agreement", further.id)
    assert manifest.generation is not None
    assert (manifest.generation.context, manifest.generation.most) == (64, 32)
    again = restore(material(**FURTHER), further.path)
    student = again.student
    assert isinstance(student, CausalStudent)
    texts = [text for text in training_set()["text"].to_pylist() if text.startswith("def")]
    for prompt in prompts:
        assert any(text.startswith(prompt.text) for text in texts)
        said = [*prompt.answers["model.fp32.ort"]]
        assert greedy_naively(student.model, prompt.tokens, len(said)) == said
    with pytest.raises(ContractMismatch, match="trained under contract cccccccccccc"):
        export(replace(material(**FURTHER), contract=CONTRACT.hash), further.path, exported.path.parent,
               contract={}, profile=ServingProfile(), cache=exported.path.parent)  # fmt: skip


def test_a_package_is_verified_beside_its_student(
    exported: ExportReport, further: DistillationReport, tmp_path: Path
) -> None:
    opened = open_package(exported.path)
    beside = Parity(material(**FURTHER), opened, further.path)
    compared = Verdict("", 0, {})
    compare_runtimes(beside, opened, verdict=compared, all_keys=True)
    files = [f"model.{precision}.ort" for precision in ("fp32", "int8", "int4")]
    web = [f"{file} in onnxruntime-web" for file in files if "int8" not in file]
    assert {*compared.files} == {*files, *(f"{file} behind prompts" for file in files), *web}
    assert {part.differing for part in compared.files.values()} == {0}
    # A prefill and a step, and as many steps behind texts as a verdict compares.
    assert compared.files[files[0]].compared == 2 + 32
    compare_forms(material(**FURTHER), opened, further.path, {"ONNX Runtime": OnnxRuntime}).require()
    # Prompts that the student would go on with otherwise.
    content = read_prompts(opened)
    answers = {file: (*tokens[:-1], tokens[-1] + 1) for file, tokens in content[0].answers.items()}
    other = [msgspec.structs.replace(content[0], answers=answers), *content[1:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus.distill.export.parity.read_prompts", lambda _: other)
        found = beside.prompts(opened)
    assert [part.differing for part in found.values()] == [0, 1, 1]
    broken = Path(shutil.copytree(exported.path, tmp_path / "broken"))
    (broken / files[1]).write_bytes(b"none")
    resum(broken)
    found = beside.prompts(open_package(broken))
    assert [part.differing for part in found.values()] == [0, 1, 0]
    assert "onnxruntime refuses it" in found[f"{files[1]} behind prompts"].examples[0].online


def test_a_package_that_no_browser_runs_is_verified_without_one(further: DistillationReport, tmp_path: Path) -> None:
    settings = DecodingSettings(formats=("ort",), precisions=("int8",), agreement={"int8": 0.0})
    opened = open_package(packaged(further, tmp_path, decoding=settings).path)
    beside = Parity(material(**FURTHER), opened, further.path)
    compared = Verdict("", 0, {})
    compare_runtimes(beside, opened, verdict=compared, all_keys=True)
    assert {*compared.files} == {"model.int8.ort", "model.int8.ort behind prompts"}
    assert {*compared.runtimes} == {"ONNX Runtime"}
    assert compared.limits == ["not compared: onnxruntime-web, because it cannot run any file of the package"]


def test_a_file_to_serve_that_disagrees_ends_an_export(further: DistillationReport, tmp_path: Path) -> None:
    settings = DecodingSettings(formats=("ort",), precisions=("fp32", "int4"), agreement={"int4": 1.0})
    with pytest.raises(GateFailed, match=r"precision: .* agrees with the model on .* of the tokens; .* a file in int4"):
        packaged(further, tmp_path, "int4", decoding=settings)
    assert {*tmp_path.iterdir()} == {tmp_path / "model"}


def test_a_declared_gate_holds_for_each_file(further: DistillationReport, tmp_path: Path) -> None:
    """The files of lower precision are asked, too: what four bits lose is no less lost."""
    shipped = next(run for run in further.data["runs"] if run["seed"] == further.data["shipped"])
    settings = DecodingSettings(formats=("ort",), agreement={"int8": 0.0, "int4": 0.0})
    gates = [GATES[0], Gate("regression", at_most=shipped["quality"]["regression"] + 0.01)]
    found = packaged(further, tmp_path, decoding=settings, gates=gates)
    assert {*found.left_out} == {"int4"}
    assert re.search(r"int4.ort: regression is [\d.]+; expected", found.left_out["int4"])


@pytest.mark.accept
@pytest.mark.parametrize("options", [FURTHER, TAUGHT], ids=["further", "taught"])
def test_figures_of_a_file_are_those_of_all_its_blocks(
    options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a part has few; of one with more, a file in fp32 has those of its student."""
    of = task(**options)
    student, test = of.student().eval(), of.material.parts.test
    everything = np.arange(of.material.table.num_rows)
    teacher, _ = complete_outputs(of, of.teacher(), everything, tmp_path, lambda *_: None)
    runs = {
        precision: partial(ask, session(in_precision(of.network(student), precision), 1))
        for precision in ("fp32", "int4")
    }
    figures = {}
    for precision, run in runs.items():
        answers, said = graph_answers(of, run, test), teacher.float32(test)
        expected = of.quality(answers, test, said) | of.agreement(answers, said)
        names = [*of.measured, *(f"student.{name}" for name in expected)]
        figures[precision] = found = of.figures(run, student, teacher)
        assert found == pytest.approx(
            {name: expected[name.removeprefix("student.")] for name in names}, rel=1e-5, abs=1e-6
        )
    assert figures["int4"] != pytest.approx(figures["fp32"], rel=1e-5)
    monkeypatch.setattr("isthmus.distill.causal.task.BLOCKS", 1)
    assert of.figures(runs["fp32"], student, teacher) == pytest.approx(figures["fp32"], rel=1e-4, abs=1e-3)


@pytest.mark.accept
def test_a_search_tries_shapes_whose_caches_have_other_sizes(tmp_path: Path) -> None:
    declared = material(**TAUGHT, steps=1, evaluate_every=1)
    wanted = replace(declared.declaration, search=Search(shape={"layers": [2]}, trials=1))
    found = search(
        replace(declared, declaration=wanted), folder=tmp_path / "search", cache=tmp_path / "cache",
        runs=tmp_path / "runs", profile=ServingProfile(precision="fp32", latency_objective_ms=1000, memory_mb=512),
    )  # fmt: skip
    assert [(trial["status"], trial["shape"]) for trial in found.data["tried"]] == [("trained", {"layers": 2})]


def test_what_a_graph_reads_token_by_token_is_as_good_as_the_student() -> None:
    of = task()
    student, rows = of.student().eval(), of.material.parts.test[:2]
    opened = session(of.model(student).SerializeToString(), 1)
    found = graph_answers(of, lambda feeds: ask(opened, feeds), rows)
    with torch.no_grad():
        expected = student(*of.batch(torch.from_numpy(rows)).inputs)
    np.testing.assert_allclose(found["losses"], expected["losses"].numpy(), atol=1e-4)
    assert (found["best"] == expected["best"].numpy()).mean() > 0.99


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"student": f"{HERE}:gpt", "teacher": f"{HERE}:teacher"}, "is a GPT2LMHeadModel; expected a LlamaForCausalLM"),
        ({"base": f"{HERE}:words_alone"}, "pre_tokenizer: is WhitespaceSplit; expected ByteLevel"),
        ({"decoding": DecodingSettings(prompts=("a b " * 100,))}, "prompts: 'a b .* has 400 tokens; expected 1 to 63"),
    ],
)
def test_what_no_package_has_is_refused_before_training(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        whole(tmp_path, epochs=1, **changes)
    assert not (tmp_path / "runs").exists()


def test_a_text_of_one_part_is_in_no_other() -> None:
    of, table = task(), training_set()
    plain = material()
    for name in ("train", "validation", "test"):
        rows = getattr(of.material.parts, name)
        words = Tokenizer.from_buffer(of.vocabulary.tokenizer)
        said = "".join(words.decode(of.tokens[row].tolist(), skip_special_tokens=False) for row in rows)
        texts = {text for text in said.split(END) if text}
        assert texts <= {*table["text"].take(getattr(plain.parts, name)).to_pylist()}
    domains = of.material.table[of.material.table.column_names[-1]].to_pylist()
    train = of.material.parts.train
    assert [domains[row] for row in train].count("general") == len(train) / 2


def test_blocks_follow_from_the_seed_of_the_declaration() -> None:
    first, second = task(), task()
    assert first.content() == second.content()
    assert (first.identities() == second.identities()).all()
    assert task(replay=0.25).content() != first.content()


# --- a student that is taught


def test_a_student_learns_from_a_teacher(tmp_path: Path) -> None:
    of = task(
        **TAUGHT, vocabulary="pruned", context=32, prompt=8, epochs=10, learning_rate=2e-2, on_policy=0.1, sequences=0.1
    )
    assert of.vocabulary.kept is not None
    assert of.vocabulary.size < tokenizer().get_vocab_size()
    student = trained(tmp_path, of)
    found = measured(of, student, of.material.parts.test)
    assert found["perplexity"] < 5
    assert found.keys() == {"perplexity", "general_loss"}
    assert json.loads(of.files("")["vocabulary.json"]) == of.vocabulary.kept.tolist()


def test_agreement_is_of_the_tokens_that_count() -> None:
    of, _ = batch_of()
    best, counts = np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 1], [1, 0]], np.float32)
    indexes = np.array([[[1, 9], [9, 2]], [[3, 9], [9, 9]]])
    student = {"best": best, "counts": counts}
    assert of.agreement(student, {"indexes": indexes}) == {"agreement": pytest.approx(2 / 3)}
    assert of.agreement(student, {"logits": np.eye(10)[indexes[..., 0]]}) == {"agreement": pytest.approx(2 / 3)}
    assert task().agreement(student, {"losses": counts}) == {}


def test_a_loss_beyond_all_perplexities_has_an_infinite_one() -> None:
    of, _ = batch_of()
    rows = of.material.parts.test
    losses = {"losses": np.full(of._counts[rows].shape, 800.0, np.float32)}
    assert of.score(losses, rows, {}) == math.inf


def test_a_student_that_is_killed_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    options = {**TAUGHT, "context": 24, "prompt": 8, "steps": 6, "evaluate_every": 2, "checkpoint_steps": 1,
               "on_policy": 0.4, "sequences": 0.3, "batch": 4}  # fmt: skip
    expected = trained(tmp_path / "whole", task(**options)).state_dict()

    def kill(text: str) -> None:
        if "step 4 of" in text:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        trained(tmp_path / "killed", task(**options), note=kill)
    notes: list[str] = []
    found = trained(tmp_path / "killed", task(**options), note=notes.append).state_dict()
    assert any("goes on after step" in note for note in notes)
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())


@cache
def batch_of(**changes: Any) -> tuple[CausalTask, TeacherBatch]:
    of = task(**TAUGHT, **changes)
    everything = np.arange(of.material.table.num_rows)
    rows = of.material.parts.train

    class Outputs:
        def __getitem__(self, places: Index) -> dict[str, Tensor]:
            answers = of.teacher().ask(of.asked(places))
            return {key: torch.from_numpy(a) for key, a in of.form.encode(answers, places, "").items()}

    batches = TeacherBatches(of, everything[rows], Outputs(), torch.device("cpu"), with_teacher=True)  # type: ignore[arg-type]
    return of, batches[torch.arange(4)]


def test_what_the_student_writes_is_judged_by_the_teacher_as_it_comes() -> None:
    of, batch = batch_of(on_policy=1.0)
    student = of.student()
    found = of.sampled(student, batch)
    assert student.training
    tokens, positions, targets = found.inputs
    assert torch.equal(tokens[:, :16], batch.inputs[0][:, :16])
    assert not torch.equal(tokens, batch.inputs[0])
    assert found.labels is not None
    assert (found.labels == IGNORED).all()
    assert (targets[:, :15] == IGNORED).all()
    logits = of._judge.ask((tokens, positions, targets))["logits"]
    expected, indexes = logits.softmax(-1).topk(8)
    torch.testing.assert_close(found.teacher["probabilities"].float(), expected, rtol=1e-2, atol=1e-3)
    assert (found.teacher["indexes"] == indexes).float().mean() > 0.99
    loss, terms = of.objective()(student(*found.inputs), found.teacher, found.labels, 0.5)
    assert terms["texts"] == 0
    assert terms["teacher"] > 0
    loss.backward()


def test_what_the_teacher_writes_is_learned_as_a_text() -> None:
    of, batch = batch_of(sequences=1.0)
    found = of.sampled(of.student(), batch)
    tokens, _, targets = found.inputs
    assert torch.equal(tokens, batch.teacher["sequence"].long())
    assert (targets == IGNORED).all()
    assert found.labels is not None
    learned = found.labels != IGNORED
    assert learned.any()
    assert torch.equal(found.labels[:, :-1][learned[:, :-1]], tokens[:, 1:][learned[:, :-1]])
    _, terms = of.objective()(of.student()(*found.inputs), found.teacher, found.labels, 0.5)
    assert terms["teacher"] == 0


def test_batches_are_drawn_in_their_shares() -> None:
    of, batch = batch_of(on_policy=0.25, sequences=0.5)
    kinds = {"own": 0, "sequences": 0, "texts": 0}
    of._own = lambda *_: kinds.__setitem__("own", kinds["own"] + 1)  # type: ignore[assignment, method-assign]
    of._sequences = lambda *_: kinds.__setitem__("sequences", kinds["sequences"] + 1)  # type: ignore[assignment, method-assign]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds["texts"] = sum(of.sampled(nn.Identity(), batch) is batch for _ in range(400))
    assert kinds["own"] == pytest.approx(100, abs=30)
    assert kinds["sequences"] == pytest.approx(200, abs=40)
    assert kinds["texts"] == pytest.approx(100, abs=30)


@pytest.mark.parametrize("top_k", [None, 8])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_each_divergence_has_a_gradient(top_k: int | None, divergence: str) -> None:
    of, batch = batch_of()
    other = task(**{**TAUGHT, "top_k": top_k, "divergence": divergence})
    answers = other.teacher().ask(batch.inputs)
    kept = {key: torch.from_numpy(a) for key, a in other.form.encode(answers, range(4), "").items()}
    student = of.student()
    loss, terms = other.objective()(student(*batch.inputs), kept, batch.labels, 0.0)
    loss.backward()
    assert terms["teacher"] > 0
    assert all(weights.grad is not None and weights.grad.isfinite().all() for weights in student.parameters())


# --- what is refused


def test_logits_that_are_no_numbers_end_the_run_with_the_step_and_the_cause(tmp_path: Path) -> None:
    of = task(seeds=1, steps=6, evaluate_every=1)
    student = of.student()

    class Sick(CausalStudent):
        calls = 0

        def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
            self.calls += self.training
            outputs = super().forward(tokens, positions, targets)
            return {k: v * torch.nan if k == "logits" and self.calls == 6 else v for k, v in outputs.items()}

    assert isinstance(student, CausalStudent)
    of.student = lambda: Sick(student.model).train()  # type: ignore[method-assign]
    with pytest.raises(
        GateFailed, match=r"writer: step 3 of 6: the student's logits are not finite, and so term texts"
    ):
        trained(tmp_path, of)


def test_a_base_that_is_sick_is_named_before_it_is_trained(tmp_path: Path) -> None:
    with pytest.raises((GateFailed, DataError), match=r"is nan|value is nan"):
        whole(tmp_path, base=f"{HERE}:sick", epochs=1)


def empty(name: str, value: Any) -> pa.Table:
    table = training_set()
    column = table[name].to_pylist()
    column[7] = value
    return table.set_column(table.column_names.index(name), name, pa.array(column, table[name].type))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (empty("text", " \n"), "column text: 1 empty texts, the first in row 7; expected non-empty texts"),
        (empty("text", None), "column text: 1 nulls; expected a value in every row"),
        (empty("domain", 2), "label domain: 1 values such as 2; expected 1 for a text of the domain, 0 for a general"),
        (training_set().drop_columns("text"), "no column text; expected the texts"),
    ],
)
def test_texts_and_labels_that_say_nothing_are_refused(table: pa.Table, said: str) -> None:
    with pytest.raises(DataError, match=said):
        create_task(material(table))


def of_kind(kind: int) -> pa.Table:
    table = training_set()
    return table.filter(pa.compute.equal(table["domain"], kind))


@pytest.mark.parametrize(
    ("kind", "said"), [(0, "train part: no domain texts"), (1, "validation part: no general texts")]
)
def test_a_part_without_texts_of_a_kind_is_refused(kind: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        create_task(material(of_kind(kind), replay=0, gates=GATES))


def test_a_text_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(DataError, match=r"the text of row \d+ has \d+ tokens; expected at most 15 and the end token"):
        task(context=16, prompt=4, cut=False)


@pytest.mark.parametrize(
    ("inputs", "text", "said"),
    [
        ([], None, "text: the student has 0 text inputs; expected an input of type String"),
        (
            [ModelInput("a", String), ModelInput("b", String)],
            None,
            "2 text inputs; expected one of a, b",
        ),
        ([ModelInput("a", String), ModelInput("b", Float64)], "b", "text: 'b'; expected a"),
    ],
)
def test_a_text_that_is_no_input_is_refused(inputs: list[ModelInput], text: str | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        create_task(material(inputs=inputs, text=text))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"replay": 0},
            r'replay: 0; expected more than 0, or a Gate\("regression", at_most=...\) that limits how much',
        ),
        ({"replay": 1.0}, "replay: 1.0; expected at least 0, less than 1"),
        ({"on_policy": 0.5}, "on_policy: 0.5; expected 0: there is no teacher"),
        (
            {**TAUGHT, "on_policy": 0.7, "sequences": 0.4},
            "on_policy: 0.7; expected at most 1 with the 0.4 of sequences",
        ),
        ({**TAUGHT, "base": "a:b"}, "base: 'a:b'; expected either a base or a teacher"),
        ({**TAUGHT, "divergence": "sideways"}, "divergence: 'sideways'; expected"),
        ({**TAUGHT, "gates": GATES}, "gate: 'gain'; expected one of gap_closed, taught, or a model and its figure"),
        ({"prompt": 64}, "prompt: 64; expected at least 1, less than the context of 64"),
        ({"license": "llama2"}, "license: 'llama2'; expected a license that allows distillation and changes"),
        ({"license": "cc-by-nc-nd-4.0"}, "license: 'cc-by-nc-nd-4.0'; expected a license that allows"),
        ({"context": "long"}, "context: 'long'; expected a whole number"),
        ({"base_rate": -1.0}, "base_rate: -1.0; expected more than 0"),
        ({**TAUGHT, "lora": Lora()}, "lora: Lora.*; expected None: a new student has no pretrained weights to keep"),
        ({"lora": Lora(rank=0)}, "lora: rank: 0; expected at least 1"),
        ({"lora": 8}, "lora: 8; expected a Lora or None"),
        ({"shape": SHAPE}, "shape: .*; expected no shape: the student is the base, or the model its function returns"),
        ({"decoding": DecodingSettings(most=0)}, "writer: decoding: most: 0; expected at least 1"),
        (
            {"decoding": DecodingSettings(end=(3,))},
            r"decoding: end: .*; expected \(\): the tokenizer of the model",
        ),
        ({"decoding": DecodingSettings(executorch=True)}, r'executorch: True; expected False, and runtimes=\("onnx'),
        ({"runtimes": ("onnxruntime", "litert")}, 'runtimes: .*; expected "onnxruntime", alone or with "executorch"'),
    ],
)
def test_a_declaration_that_is_wrong_is_refused(changes: dict[str, Any], said: str) -> None:
    assert any(re.search(said, str(problem)) for problem in problems(material(**changes)))


def test_a_template_names_features_of_the_student() -> None:
    template = "{punctuality__flights} {punctuality__fligts} {prompt}"
    late = FeatureService("late", [])
    declared = replace(declaration(decoding=DecodingSettings(template=template)), teacher=late, student=late)
    found = [str(problem) for problem in input_problems(declared, [], CONTRACT) if "template" in problem.where]
    assert len(found) == 1
    assert found[0].startswith(
        "distillation writer: decoding: template: names punctuality__fligts; expected {prompt} or a feature of late: "
    )


def test_layers_that_the_base_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"lora: layers: query; expected some of down_proj, .*v_proj"):
        whole(tmp_path, lora=Lora(layers=("query",)))


def problems(of: Material) -> list[Any]:
    return of.declaration.problems()


def test_a_sound_declaration_has_no_problems_and_a_learning_rate_of_the_base() -> None:
    sound = material(base_rate=5e-3, license="apache-2.0").declaration
    assert sound.problems() == []
    assert sound.training_settings(material().profile, 1000).learning_rate == pytest.approx(5e-4)
    assert [gate.metric for gate in sound.required] == ["gain", "regression"]
    assert [gate.metric for gate in material(**TAUGHT).declaration.required] == ["taught"]
    assert problems(material(replay=0, gates=GATES)) == []
