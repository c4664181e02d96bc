import copy
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer, ViTConfig, ViTModel

from isthmus.distill.settings import Settings
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.taps import tapped
from isthmus.distill.types import evenly_spaced
from isthmus.features.definition.digestnames import digest_name
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.package.inputs import ModelInput
from isthmus.teachers import (
    EstimatorTeacher,
    FunctionTeacher,
    NetworkTeacher,
    PretrainedTeacher,
    Teacher,
    compatible,
    fingerprint,
    pretrained,
)
from isthmus.transforms.preparation.steps import Log1p

LABELS = ("no", "perhaps", "yes")
BATCH = {
    "input_ids": torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = np.array(["cat", "dog", "eel"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3))


def bert(kind: Any = BertForSequenceClassification, **more: Any) -> Any:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, id2label=dict(enumerate(LABELS)), label2id={x: n for n, x in enumerate(LABELS)},
        **more,
    )  # fmt: skip
    return kind(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    bert().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "teacher"
    copied.mkdir()
    for file in saved.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


@pytest.fixture
def configured(folder: Path) -> Iterator[Callable[..., None]]:
    def change(**more: Any) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **more}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change  # type: ignore[return-value]


def tokenizer(folder: Path, *words: str, **more: Any) -> BertTokenizer:
    folder.mkdir()
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    made: BertTokenizer = BertTokenizer.from_pretrained(folder, **more)
    return made


def problems(error: pytest.ExceptionInfo[ConfigurationError]) -> str:
    return "\n".join(map(str, error.value.problems))


# --- asking


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_are_float32_without_gradient_and_may_be_a_target(dtype: torch.dtype) -> None:
    module = network().to(dtype)
    teacher = NetworkTeacher(module)
    x = torch.randn(5, 3, dtype=dtype)
    answer = teacher.ask(x)["logits"]
    assert (answer.dtype, answer.shape, answer.requires_grad, answer.is_inference()) == (
        torch.float32, (5, 3), False, False
    )  # fmt: skip
    torch.testing.assert_close(answer, module(x).float(), rtol=0, atol=0)
    student = torch.zeros(5, 3, requires_grad=True)
    (student * answer).sum().backward()  # type: ignore[no-untyped-call]  # keeps the answer for the gradient
    assert torch.equal(student.grad, answer)  # type: ignore[arg-type]


def test_autocast_around_it_does_not_reach_the_teacher() -> None:
    teacher, x = NetworkTeacher(network()), torch.randn(64, 3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = teacher.ask(x)["logits"]
    assert torch.equal(inside, teacher.ask(x)["logits"])


def test_a_network_takes_mappings_tuples_and_tensors() -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a + b, a - b

    teacher = NetworkTeacher(Pair(), ["sum", "difference"])
    a, b = torch.ones(2, 1), torch.full((2, 1), 3.0)
    for batch in ((a, b), {"a": a, "b": b}):
        assert {key: value.tolist() for key, value in teacher.ask(batch).items()} == {
            "sum": [[4.0], [4.0]], "difference": [[-2.0], [-2.0]]
        }  # fmt: skip
    with pytest.raises(ConfigurationError, match="2 outputs without names; expected one for each of logits"):
        NetworkTeacher(Pair()).ask((a, b))


def test_what_a_submodule_gives_is_an_output() -> None:
    module = network()
    teacher = NetworkTeacher(module, taps={"hidden": "2"})
    x = torch.randn(4, 3)
    torch.testing.assert_close(teacher.ask(x)["hidden"], module[:3](x))
    assert set(teacher.ask(x)) == {"logits", "hidden"}
    assert not module[2]._forward_hooks
    with pytest.raises(ConfigurationError, match="no submodule has this name"):
        NetworkTeacher(module, taps={"hidden": "9"})


@pytest.mark.parametrize("keys", [(), ("a", "a"), ("../a",), ("_rows",)])
def test_keys_are_names_and_unique(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="keys"):
        FunctionTeacher(len, keys)


def test_the_first_row_that_is_not_finite_is_named() -> None:
    def answer(batch: Tensor) -> dict[str, Tensor]:
        return {"logits": batch, "more": batch[:, :1].log()}

    teacher = FunctionTeacher(answer, ["logits", "more"])
    batch = torch.ones(4, 2)
    batch[3, 1] = torch.nan
    with pytest.raises(DataError, match="output logits: row 3 of the batch is nan"):
        teacher.ask(batch)
    batch[2, 0] = 0
    with pytest.raises(DataError, match="output more: row 70 is -inf"):
        teacher.ask(batch, rows=[50, 60, 70, 80])
    with pytest.raises(DataError, match="row 0 of the batch is inf"):
        FunctionTeacher(lambda x: x.double() * 1e300).ask(torch.ones(1, 1))


@pytest.mark.parametrize("answer", [lambda x: x.mean(), lambda x: x[:1], lambda x: x.mean(0)])
def test_an_output_has_a_row_for_each_of_the_batch(answer: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DataError, match="expected a row for each of the batch's 4"):
        FunctionTeacher(answer).ask(torch.ones(4, 3))


def test_an_output_that_is_not_given_is_named_with_what_is() -> None:
    teacher = FunctionTeacher(lambda x: {"a": x, "b": x}, ["logits"])
    with pytest.raises(ConfigurationError, match="output logits: it gives a, b; expected logits"):
        teacher.ask(torch.ones(1, 1))
    with pytest.raises(ConfigurationError, match="output logits: a str"):
        FunctionTeacher(lambda _: "text").ask(torch.ones(1, 1))


# --- frozen


def test_a_teacher_is_frozen() -> None:
    module = network().train()
    teacher = NetworkTeacher(module)
    parameters = list(teacher.parameters())
    assert len(parameters) == 6
    assert not any(parameter.requires_grad for parameter in parameters)
    assert not any(part.training for part in module.modules())
    assert not isinstance(teacher, nn.Module)  # inside a student it would be trained with it


def _train(module: nn.Sequential) -> None:
    module[3].train()


def _unfreeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(True)


def _step(module: nn.Sequential) -> None:
    weight = dict(module.named_parameters())["4.weight"]
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.1).step()


def _load(module: nn.Sequential) -> None:
    module.load_state_dict(network(5).state_dict())


@pytest.mark.parametrize(
    ("thaw", "found"),
    [
        (_train, "3: is in training mode"),
        (_unfreeze, "0.weight: requires a gradient"),
        (_step, "weights: were changed"),
        (_load, "weights: were changed"),
        (lambda module: module.half(), "weights: were changed"),
    ],
)
def test_a_teacher_that_was_thawed_is_refused_with_the_remedy(thaw: Callable[[nn.Module], Any], found: str) -> None:
    module = network()
    teacher = NetworkTeacher(module)
    teacher.ask(torch.ones(2, 3))
    thaw(module)
    with pytest.raises(ConfigurationError, match=found) as error:
        teacher.ask(torch.ones(2, 3))
    assert error.value.remedy
    with pytest.raises(ConfigurationError, match=found):
        list(teacher.parameters())


def test_a_teacher_that_was_made_again_in_eval_mode_goes_on() -> None:
    module = network()
    teacher = NetworkTeacher(module)
    module.train().eval()
    module.to("cpu")
    teacher.ask(torch.ones(2, 3))


# --- estimators


@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), HistGradientBoostingClassifier(max_iter=3), KNeighborsClassifier(3)],
    ids=lambda estimator: type(estimator).__name__,
)
def test_the_softmax_of_an_estimators_logits_is_its_probabilities(estimator: Any) -> None:
    teacher = EstimatorTeacher(estimator.fit(X, Y), ["logits", "probabilities"])
    answer = teacher.ask(torch.from_numpy(X))
    assert teacher.labels == ("cat", "dog", "eel")
    torch.testing.assert_close(answer["logits"].softmax(-1), answer["probabilities"])
    np.testing.assert_allclose(answer["probabilities"], estimator.predict_proba(X), rtol=1e-6)


def test_an_estimator_gives_what_it_can() -> None:
    machine = LinearSVC().fit(X, Y)
    np.testing.assert_allclose(EstimatorTeacher(machine).ask(X)["logits"], machine.decision_function(X), rtol=1e-6)
    line = LinearRegression().fit(X, X[:, 0] * 2)
    assert EstimatorTeacher(line).keys == ("predictions",)
    np.testing.assert_allclose(EstimatorTeacher(line).ask(X)["predictions"], X[:, 0] * 2, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="output probabilities: it gives logits, predictions"):
        EstimatorTeacher(machine, ["probabilities"])
    several = RandomForestClassifier(2).fit(X, np.stack([Y, Y], 1))
    with pytest.raises(ConfigurationError, match="one per target"):
        EstimatorTeacher(several).ask(X)


@pytest.mark.parametrize(
    "make",
    [
        partial(HistGradientBoostingClassifier, max_iter=3, random_state=0),
        partial(RandomForestClassifier, 3, random_state=0),
        partial(KNeighborsClassifier, 3, algorithm="kd_tree"),
        partial(LogisticRegression, C=0.5),
    ],
    ids=lambda make: make.func.__name__,
)
def test_the_fingerprint_of_an_estimator_is_that_of_its_parameters_and_what_it_learned(make: Any) -> None:
    first = fingerprint(make().fit(X, Y))
    assert first == fingerprint(make().fit(X, Y))
    assert first == fingerprint(copy.deepcopy(make().fit(X, Y)))
    assert first != fingerprint(make().fit(X[:-4], Y[:-4]))
    if make.func is RandomForestClassifier:
        assert first == fingerprint(make(n_jobs=2).fit(X, Y))


# --- fingerprints


class Own(nn.Module):
    """A user's network with settings that are no parameters."""

    def __init__(self, scale: float = 1.0, function: Any = torch.relu) -> None:
        super().__init__()
        self.scale, self.function = scale, function
        self.register_buffer("shift", torch.zeros(3))
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        nn.init.eye_(self.layers[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[0].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layers[0](x) * self.scale + self.shift)  # type: ignore[no-any-return]


class Other(Own):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.accept
def test_the_fingerprint_of_a_network_changes_when_its_answers_may() -> None:
    changed: dict[str, nn.Module] = {
        "setting": Own(2.0),
        "function": Own(function=torch.tanh),
        "code": Other(),
        "weight": Own(),
        "buffer": Own(),
        "sign of a zero": Own(),
        "dtype": Own().double(),
    }
    with torch.no_grad():
        changed["weight"].state_dict()["layers.0.weight"][0, 0] += 1e-6
        changed["buffer"].state_dict()["shift"][2] = 1
        changed["sign of a zero"].state_dict()["layers.0.bias"][0] = -0.0
    found = {name: fingerprint(module) for name, module in {"": Own(), **changed}.items()}
    assert len(set(found.values())) == len(found), found
    same = Own().train().requires_grad_(False)
    assert fingerprint(same) == fingerprint(copy.deepcopy(Own())) == found[""]
    with torch.inference_mode():
        assert fingerprint(Own().eval()) == found[""]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3)),
        (nn.GELU(), nn.GELU("tanh")),
        (nn.MaxPool2d(2), nn.MaxPool2d(3)),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
    ],
)
def test_settings_of_torchs_modules_count(one: nn.Module, other: nn.Module) -> None:
    assert fingerprint(one) == fingerprint(copy.deepcopy(one)) != fingerprint(other)


def test_recurrent_networks_and_transformers_of_torch_have_fingerprints() -> None:
    for make in (
        lambda: nn.LSTM(3, 4),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.MultiheadAttention(8, 2),
    ):
        torch.manual_seed(0)
        one = make()
        assert fingerprint(one) == fingerprint(copy.deepcopy(one)) != fingerprint(make())


def test_a_network_that_is_compiled_or_has_parametrizations_has_a_fingerprint() -> None:
    plain = network()
    assert fingerprint(torch.compile(plain, backend="eager")) == fingerprint(plain)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(fingerprint(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))))
    assert found[0] == found[1] != found[2]
    hooked = [network(), network(), network()]
    for module, factor in zip(hooked, (2, 2, 3), strict=True):
        module.register_forward_hook(partial(_times, factor))
    found = [fingerprint(module) for module in hooked]
    assert fingerprint(plain) != found[0] == found[1] != found[2]


def test_library_functions_and_patterns_are_named() -> None:
    parts = [np.log1p, np.exp, torch.relu, torch.tanh, re.compile("a"), re.compile("b"), json.loads, json.dumps]
    assert len({fingerprint(part) for part in parts}) == len(parts)
    assert fingerprint(re.compile("a")) == fingerprint(copy.deepcopy(parts[4]))


def test_what_is_asked_for_and_the_order_of_classes_count() -> None:
    module = network()
    teachers = [
        NetworkTeacher(module, labels=LABELS),
        NetworkTeacher(module, labels=LABELS).relabelled(LABELS[::-1]),
        NetworkTeacher(module, labels=LABELS, version="2"),
        NetworkTeacher(module, labels=LABELS, taps={"hidden": "2"}),
    ]
    assert len({teacher.fingerprint() for teacher in teachers}) == 4
    assert teachers[1].relabelled(LABELS).fingerprint() != teachers[1].fingerprint()
    renamed = NetworkTeacher(module, labels=("a", "b", "c"), name="another")
    assert renamed.fingerprint() == teachers[0].fingerprint()


def _times(factor: float, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * factor


def _scaled(factor: Any) -> Callable[[Tensor], Tensor]:
    return lambda batch: batch * factor


def _loaded(path: Path, text: str) -> Any:
    path.write_text(text)
    space: dict[str, Any] = {"__name__": "elsewhere", "__file__": str(path)}
    exec(compile(text, str(path), "exec"), space)  # noqa: S102
    return space["answer"]


def test_the_fingerprint_of_a_function_is_that_of_its_code_and_its_closure(tmp_path: Path) -> None:
    assert fingerprint(_scaled(2)) == fingerprint(_scaled(2)) != fingerprint(_scaled(3))
    arrays = [np.ones(3), np.ones(3), np.array([1, 1, 1 + 1e-12])]
    one, same, other = (fingerprint(_scaled(array)) for array in arrays)
    assert one == same != other
    assert fingerprint(_scaled(network())) == fingerprint(_scaled(network())) != fingerprint(_scaled(network(1)))
    plain = _loaded(tmp_path / "a.py", "def answer(x):\n    return x + 1\n")
    noted = _loaded(tmp_path / "b.py", "def answer( x ):\n    '''Says.'''\n    return x+1  # why\n")
    more = _loaded(tmp_path / "c.py", "def answer(x):\n    return x + 2\n")
    assert fingerprint(plain) == fingerprint(noted) != fingerprint(more)
    assert fingerprint(partial(plain, x=1)) != fingerprint(partial(plain, x=2))


def test_what_has_no_fingerprint_is_refused_until_it_has_a_version() -> None:
    def remote(batch: Tensor, line: Iterator[int] = (n for n in range(3))) -> Tensor:
        return batch + next(line)

    with pytest.raises(ConfigurationError, match=r"generator has no state.*Pass a version to the teacher, such as"):
        FunctionTeacher(remote).fingerprint()
    versions = [FunctionTeacher(remote, version=version).fingerprint() for version in ("1", "1", "2")]
    assert versions[0] == versions[1] != versions[2]
    typed = eval("lambda x: x")  # noqa: S307
    with pytest.raises(ConfigurationError, match="cannot be read"):
        FunctionTeacher(typed).fingerprint()
    assert FunctionTeacher(typed, version="1").fingerprint()


def test_a_version_stands_for_the_code_of_a_network_that_cannot_be_read() -> None:
    space: dict[str, Any] = {"nn": nn, "__name__": "prompt"}
    exec("class Typed(nn.Linear):\n    pass", space)  # noqa: S102
    torch.manual_seed(0)
    module = space["Typed"](2, 3)
    with pytest.raises(ConfigurationError, match=r"the code of Typed cannot be read.*Pass a version to the teacher"):
        NetworkTeacher(module).fingerprint()
    found = [NetworkTeacher(module, version=version).fingerprint() for version in ("1", "1", "2")]
    assert found[0] == found[1] != found[2]
    with torch.no_grad():
        module.weight += 1
    assert NetworkTeacher(module, version="1").fingerprint() != found[0]


def test_an_object_that_holds_itself_has_a_fingerprint() -> None:
    ring, other = SimpleNamespace(value=1), SimpleNamespace(value=2)
    ring.me, other.me = ring, other
    assert fingerprint(ring) == fingerprint(copy.deepcopy(ring)) != fingerprint(other)


# --- models of transformers


def test_a_model_from_a_folder_answers_with_what_is_asked_for(folder: Path) -> None:
    keys = ["logits", "hidden", "hidden.1", "attentions", "attentions.0", "embedding"]
    teacher = pretrained(folder, keys)
    answer = teacher.ask(BATCH)
    assert {key: tuple(value.shape) for key, value in answer.items()} == {
        "logits": (2, 3), "hidden": (2, 3, 4, 32), "hidden.1": (2, 4, 32), "attentions": (2, 2, 2, 4, 4),
        "attentions.0": (2, 2, 4, 4), "embedding": (2, 32),
    }  # fmt: skip
    assert torch.equal(answer["hidden"][:, 1], answer["hidden.1"])
    assert torch.equal(answer["attentions"][:, 0], answer["attentions.0"])
    last = answer["hidden"][:, -1]
    torch.testing.assert_close(answer["embedding"], torch.stack([last[0].mean(0), last[1, :3].mean(0)]))
    first = pretrained(folder, ["embedding"], pooling="first")
    torch.testing.assert_close(first.ask(BATCH)["embedding"], last[:, 0])
    assert first.fingerprint() != pretrained(folder, ["embedding"]).fingerprint()
    assert teacher.labels == LABELS
    torch.testing.assert_close(answer["logits"], bert().eval()(**BATCH).logits)
    with pytest.raises(ConfigurationError, match=r"output hidden.7: it gives .*logits"):
        pretrained(folder, ["hidden.7"]).ask(BATCH)


def test_a_base_model_and_one_of_images_have_embeddings() -> None:
    text = PretrainedTeacher(bert(BertModel), ["embedding", "pooler_output"]).ask(BATCH)
    assert {key: tuple(value.shape) for key, value in text.items()} == {
        "embedding": (2, 32), "pooler_output": (2, 32)
    }  # fmt: skip
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8,
                       patch_size=4)  # fmt: skip
    teacher = PretrainedTeacher(ViTModel(config), ["embedding", "hidden.1"])
    answer = teacher.ask({"pixel_values": torch.randn(3, 3, 8, 8)})
    assert {key: tuple(value.shape) for key, value in answer.items()} == {"embedding": (3, 16), "hidden.1": (3, 5, 16)}


def test_the_fingerprint_of_a_model_is_not_that_of_its_folder(folder: Path, saved: Path, configured: Any) -> None:
    first = pretrained(saved).fingerprint()
    assert pretrained(folder).fingerprint() == first
    configured(id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2})
    assert pretrained(folder).fingerprint() == first
    configured(layer_norm_eps=1e-6)
    assert pretrained(folder).fingerprint() != first
    configured(layer_norm_eps=1e-12)
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][1] += 1e-6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert pretrained(folder).fingerprint() != first


def test_what_was_changed_in_a_model_counts() -> None:
    heads = [bert().eval() for _ in range(3)]
    for model, part in zip(heads, (nn.Identity(), nn.ReLU(), nn.ReLU()), strict=True):
        model.classifier = nn.Sequential(part, model.classifier)
    found = [fingerprint(model) for model in (bert(), *heads)]
    assert len(set(found[:3])) == 3
    assert found[2] == found[3]


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _headless(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _resized(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] = torch.zeros(5, 32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _pickle_in_the_index(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "part.bin")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "part.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('was run')")


def _kernel(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text": {"_attn_implementation": "some/kernels"}}))


def _no_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Trainer"]}))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_pickle, "model.safetensors: missing; pytorch_model.bin is pickled and would run code"),
        (_pickle_in_the_index, "'part.bin'; expected names of safetensors in this folder"),
        (_headless, "1 weights of BertForSequenceClassification are missing or have a different shape: classifier"),
        (_resized, "classifier.weight"),
        (_own_code, "'Mine', which is code next to the weights; expected a class of transformers"),
        (_no_model, "'Trainer', which is not a transformers model"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: .*expected the configuration of a model"),
        (_kernel, "config.json, _attn_implementation: 'some/kernels'"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "an adapter"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "model"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "the file of each weight"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_safe_teacher_is_refused_with_the_reason(folder: Path, spoil: Any, found: str) -> None:
    spoil(folder)
    with pytest.raises(ConfigurationError, match=found):
        pretrained(folder)


def test_everything_wrong_with_a_folder_is_said_at_once(folder: Path) -> None:
    _pickle(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError) as error:
        pretrained(folder)
    assert len(error.value.problems) == 2


def test_a_repository_that_is_not_to_be_had_is_said_to_be() -> None:
    with pytest.raises(DependencyError, match="teacher nobody/nothing: is not a folder"):
        pretrained("nobody/nothing", offline=True)
    with pytest.raises(DependencyError, match="is not a folder"):
        pretrained("/no/such/folder", offline=True)


# --- before the first step


def test_classes_in_another_order_are_mapped() -> None:
    module = network()
    teacher = NetworkTeacher(module, labels=LABELS)
    x = torch.randn(4, 3)
    mapped = compatible(teacher, x, {"logits": "rows 3"}, labels=("yes", "no", "perhaps"))
    assert torch.equal(mapped.ask(x)["logits"], teacher.ask(x)["logits"][:, [2, 0, 1]])
    assert mapped.labels == ("yes", "no", "perhaps")
    again = mapped.relabelled(("perhaps", "yes", "no"))
    assert torch.equal(again.ask(x)["logits"], teacher.ask(x)["logits"][:, [1, 2, 0]])
    assert compatible(teacher, x, {"logits": "rows classes"}, labels=LABELS) is teacher


def test_one_logit_for_two_classes_is_not_put_in_another_order() -> None:
    machine = LinearSVC().fit(X, Y == "cat")
    teacher = EstimatorTeacher(machine)
    assert teacher.labels == ("False", "True")
    with pytest.raises(ConfigurationError, match="output logits: no classes; expected 2, as many as labels"):
        compatible(teacher, X[:2], {"logits": "rows"}, labels=("True", "False"))
    with pytest.raises(ConfigurationError, match=r"shape \(2,\); expected \(rows, ..., 2\)"):
        teacher.relabelled(("True", "False")).ask(X[:2])


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    module = network()
    teacher = NetworkTeacher(module, labels=LABELS, name="large")
    student = nn.Sequential(module[0], nn.Linear(8, 4))
    tokenizers = tokenizer(tmp_path / "a"), tokenizer(tmp_path / "b", "the")
    with pytest.raises(ConfigurationError) as error:
        compatible(
            teacher, torch.randn(4, 3), {"logits": "rows 4", "hidden": "rows 8"}, labels=("no", "yes", "maybe", "x"),
            student=student, tokenizers=tokenizers,
        )  # fmt: skip
    said = problems(error)
    for part in (
        "output hidden: it gives logits; expected hidden",
        "output logits: shape (4, 3); expected (rows, 4)",
        "output logits: 3 classes; expected 4, as many as labels",
        "labels: 3 labels without 'maybe', 'x' and with 'perhaps'; expected the student's 4: 'no', 'yes', 'maybe', 'x'",
        "parameter 0.weight of the student: belongs to the teacher (2 shared in total); expected its own copy",
        "vocabulary: 57 words; 'the' is 57 in the student's alone; expected the student's 58",
        "tokens of 'The quick brown fox': ",
    ):
        assert part in said, said
    assert error.value.where == "teacher large"


def test_a_teacher_that_answers_by_chance_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="two answers to the same batch differ"):
        compatible(FunctionTeacher(torch.rand_like), torch.ones(3, 2), {"logits": "rows 2"})


def test_a_teacher_that_is_not_finite_is_refused_with_the_rest() -> None:
    teacher = FunctionTeacher(lambda x: x * math.nan)
    with pytest.raises(ConfigurationError, match=r"(?s)row 0 of the batch is nan.*output hidden"):
        compatible(teacher, torch.ones(3, 2), {"logits": "rows 2", "hidden": "rows 2"})


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"strip_accents": False}, "café"),
        ({"do_lower_case": False}, "quick"),
        ({"tokenize_chinese_chars": False}, "東京都"),
    ],
)
def test_tokenizers_that_differ_on_hard_texts_are_found(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    plain = tokenizer(tmp_path / "a", "東", "京", "都")
    same = tokenizer(tmp_path / "b", "東", "京", "都")
    other = tokenizer(tmp_path / "c", "東", "京", "都", **more)
    teacher: Teacher = NetworkTeacher(network())
    compatible(teacher, torch.ones(2, 3), {}, tokenizers=(plain, same))
    compatible(teacher, torch.ones(2, 3), {}, tokenizers=(plain, same._tokenizer))
    with pytest.raises(ConfigurationError) as error:
        compatible(teacher, torch.ones(2, 3), {}, tokenizers=(plain, other))
    assert text in problems(error)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Settings, "isthmus.distill.settings.Settings"),
        (compatible, "isthmus.distill.teachers.agreement.agreed"),
        (tapped, "isthmus.distill.transfer.taps.tapped"),
        (evenly_spaced, "isthmus.distill.golden.spread"),
        (Log1p, "isthmus.transforms.steps.Log1p"),
        (ModelInput, "isthmus.features.manifest.ModelInput"),
        (Task, "isthmus.distill.task.Task"),
        (NetworkTeacher, "isthmus.distill.teachers.network.NetworkTeacher"),
    ],
)
def test_fingerprints_have_the_names_of_version_0_1(value: Any, name: str) -> None:
    assert digest_name(value.__module__, value.__qualname__) == name


def test_a_vectorizer_is_the_same_wherever_its_words_lie_in_memory() -> None:
    """scikit-learn keeps the address of the stop words, which differs from process to process."""
    first, second = (TfidfVectorizer(stop_words=[*words]).fit(["the rain", "a song"]) for words in (("the",), ("the",)))
    assert first._stop_words_id != second._stop_words_id
    assert fingerprint(first) == fingerprint(second)


def test_a_partial_of_a_module_is_part_of_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a task of one's own: its objective is a loss with other settings."""
    text = """
from functools import partial
from isthmus.losses import soft_targets
soft = partial(soft_targets, {keywords})
class Mine:
    def objective(self):
        return soft
"""
    found = []
    for turn, keywords in enumerate(
        ("temperature=2.0", "temperature=3.0", "temperature=2.0, a=1", "a=1, temperature=2.0")
    ):
        (tmp_path / f"mine_{turn}.py").write_text(text.replace("{keywords}", keywords))
        monkeypatch.syspath_prepend(str(tmp_path))
        found.append(fingerprint(importlib.import_module(f"mine_{turn}").Mine))
    assert len({*found}) == 3
    assert found[2] == found[3]
