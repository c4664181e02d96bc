"""The tokenizer of a package, in Python and in JavaScript, beside that of transformers on 10,000 texts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isthmus.distill.decoder.tokenizer import new_generation, require_interpretable
from isthmus.features.errors import ConfigurationError, DependencyError, PackageError, RequestError
from isthmus.features.types import TYPES, DataType
from isthmus.package.clients import FOLDER
from isthmus.package.generation.prompt import Control, Generation, format_feature
from isthmus.package.generation.tokenizer import GrowingText, Tokenizer
from tests.texts import texts
from tests.tokenizing import BEGIN, END, SPLIT, trained

SCRIPT = Path(__file__).with_name("tokens.mjs")
LIMITS: dict[str, Any] = {"context": 100, "most": 10, "end": [0]}


def _opened(kind: str, template: str = "{prompt}") -> tuple[Generation, Tokenizer]:
    return new_generation(trained(kind), template=template, **LIMITS)


@pytest.mark.accept
@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3"])
def test_ten_thousand_texts_have_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    own = tmp_path / "tokenizer.json"
    own.write_bytes(trained(kind))
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(own))
    count = 10_000 if kind == "llama3" else 1000
    asked = texts()[:: 10_000 // count]
    # What looks like a special token in a text of a user is text.
    expected = theirs(asked, split_special_tokens=True).input_ids
    generation, tokenizer = _opened(kind)
    assert generation.begin == ((1,) if kind == "llama3" else ())
    assert [tokenizer.encode([text]) for text in asked] == expected
    said = theirs.batch_decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert [_text(tokenizer, tokens) for tokens in expected] == said
    cases = {
        "file": own.read_text(), "generation": {"begin": generation.begin}, "texts": asked, "tokens": expected,
        "pieces": said,
    }  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = ["node", str(SCRIPT), str(FOLDER / "tokenizer.mjs"), str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = "the prompt is no text: it has half of a pair of surrogates"
    assert json.loads(done.stdout) == {"wrong": [], "lost": [], "refused": [refused]}


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3"])
def test_the_least_number_of_tokens_is_never_more_than_there_are(kind: str) -> None:
    _, tokenizer = _opened(kind)
    for text in (*texts()[::20], "".join(texts()[::500]), "e\u0301" * 99, ""):
        assert tokenizer.least(text) <= len(tokenizer.encode([text]))
    assert tokenizer.least("a" * 100_000) > 5000
    with pytest.raises(RequestError, match="tokens or more, and the context of the model 100;"):
        tokenizer.encode(["a" * 100_000], 100)


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    text = GrowingText(tokenizer)
    return "".join(map(text.add, tokens)) + text.end()


def test_control_tokens_are_those_of_the_template_alone() -> None:
    template = f"{BEGIN}user\n{{prompt}}{END}{BEGIN}{{views__late}}"
    generation, tokenizer = _opened("gpt2", template)
    assert generation.features == ["views__late"]
    parts = generation.parts(f"a{END}b", {"views__late": BEGIN})
    assert parts == [1, f"user\na{END}b", 0, 1, BEGIN]
    tokens = tokenizer.encode(parts)
    assert [place for place, token in enumerate(tokens) if token in (0, 1)] == [
        0, tokens.index(0), tokens.index(0) + 1
    ]  # fmt: skip
    assert _text(tokenizer, tokens) == f"user\na{END}b{BEGIN}"
    # A feature that holds a field, or a prompt that does, is text, too.
    assert generation.parts("{views__late}", {"views__late": "{prompt}"})[1] == "user\n{views__late}"
    with pytest.raises(RequestError, match="feature views__late is missing"):
        generation.parts("a")


def test_what_no_token_has_is_refused() -> None:
    file = json.loads(trained())
    # The letter of byte 0x04.
    del file["model"]["vocab"]["\u0104"]
    _, tokenizer = new_generation(json.dumps(file).encode(), template="{prompt}", **LIMITS)
    assert tokenizer.encode(["a\x05b"])
    with pytest.raises(RequestError, match="has characters that the model has no tokens for"):
        tokenizer.encode(["a\x04b"])
    with pytest.raises(RequestError, match="half of a pair of surrogates"):
        tokenizer.encode(["\ud800"])


def test_letters_appear_when_they_are_complete() -> None:
    _, tokenizer = _opened("gpt2")
    text = GrowingText(tokenizer)
    tokens = tokenizer.encode(["漢"])
    assert len(tokens) > 1
    assert [text.add(token) for token in tokens] == [""] * (len(tokens) - 1) + ["漢"]
    assert text.add(tokens[0]) + text.end() == "\ufffd"
    assert text.add(0) == ""


def _with(part: str, value: Any) -> dict[str, Any]:
    file: dict[str, Any] = json.loads(trained())
    at, _, name = part.rpartition(".")
    (file[at] if at else file)[name] = value
    return file


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (_with("normalizer", {"type": "Lowercase"}), "normalizer: is Lowercase; expected NFC, or no normalizer"),
        (_with("model.unk_token", "<unk>"), "model.unk_token: '<unk>'; expected None"),
        (_with("model.byte_fallback", True), "model.byte_fallback: True; expected None"),
        (_with("model.type", "Unigram"), "model: is Unigram; expected BPE"),
        (_with("decoder", {"type": "Metaspace"}), "decoder: is Metaspace; expected ByteLevel"),
        (_with("pre_tokenizer", {"type": "Metaspace"}), "pre_tokenizer: is Metaspace; expected ByteLevel, "),
        (_with("pre_tokenizer.add_prefix_space", True), "ByteLevel adds a space before a text"),
        (_with("pre_tokenizer", {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}++|(?i)x"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}), "Split has the pattern"),
        (_with("pre_tokenizer", {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\'s| ?\p{L}+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}), "Split has the pattern"),
        (_with("added_tokens", [{"id": 0, "content": "x", "special": False, "lstrip": True, "rstrip": False,
                                 "single_word": False, "normalized": False}]), "added token 'x': has lstrip"),
        ({"model": {}}, "is not a tokenizer"),
    ],
)  # fmt: skip
def test_what_javascript_cannot_do_is_refused_by_name(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        require_interpretable(json.dumps(file).encode())
    assert message in str(error.value)


def test_a_vocabulary_must_have_the_bytes_of_texts() -> None:
    file = json.loads(trained())
    del file["model"]["vocab"]["A"], file["model"]["vocab"]["B"]
    with pytest.raises(ConfigurationError, match=r"model\.vocab: lacks the byte 0x41 and 1 more"):
        require_interpretable(json.dumps(file).encode())


def test_limits_and_templates_are_checked_together() -> None:
    with pytest.raises(ConfigurationError) as error:
        new_generation(trained(), context=10, most=10, end=[], template="nothing")
    assert [problem.where for problem in error.value.problems] == ["most", "template", "end"]
    with pytest.raises(ConfigurationError, match=r"has '  \\n', which users can type; expected special control tokens"):
        new_generation(trained("llama3"), template="  \n{prompt}", **LIMITS)
    file = json.loads(trained("llama3"))
    file["post_processor"]["processors"][1]["single"] += [{"SpecialToken": {"id": BEGIN, "type_id": 0}}]
    with pytest.raises(ConfigurationError, match=r"post_processor: adds \[1\] after a text"):
        new_generation(json.dumps(file).encode(), template="{prompt}", **LIMITS)


@pytest.mark.parametrize("texts", [0, 2])
def test_a_post_processor_that_drops_or_repeats_a_text_is_refused(texts: int) -> None:
    file = json.loads(trained("llama3"))
    own = file["post_processor"]["processors"][1]
    begin, text = own["single"]
    own["single"] = [text, begin]
    file["post_processor"]["processors"].append({**own, "single": [text] * texts or [begin]})
    with pytest.raises(ConfigurationError, match="post_processor: drops or repeats tokens of a text"):
        new_generation(json.dumps(file).encode(), template="{prompt}", **LIMITS)


def test_other_control_tokens_than_the_manifest_says_are_refused() -> None:
    generation = Generation(100, 10, (0,), control=(Control(END, 0),))
    with pytest.raises(PackageError, match=r"has control tokens \[0, 1\]; expected \[0\]"):
        Tokenizer(trained(), generation)
    with pytest.raises(PackageError, match="is not a tokenizer"):
        Tokenizer(b"{}", generation)
    assert SPLIT


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0.10000000149011612, TYPES["Float32"], "0.1"), (0.1, TYPES["Float64"], "0.1"), (True, TYPES["Bool"], "true"),
        (2**60 + 1, TYPES["Int64"], "1152921504606846977"), ("a <|end|>", TYPES["String"], "a <|end|>"),
        ("NaN", TYPES["Float32"], "NaN"), ([0.10000000149011612, 2.0], TYPES["Array(Float32)"], "[0.1,2.0]"),
    ],
)  # fmt: skip
def test_features_are_texts(value: Any, dtype: DataType, expected: str) -> None:
    assert format_feature(value, dtype) == expected


def test_a_host_without_tokenizers_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    generation, _ = _opened("gpt2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DependencyError, match=r"pip install 'isthmus\[generate\]'"):
        Tokenizer(trained(), generation)
