"""Check that a package's tokenizer and model files reproduce its golden prompts."""

from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from isthmus.features.errors import IsthmusError, PackageError
from isthmus.package.checksums import damage_error, require_unique_keys
from isthmus.package.generation.decoder import PART, Array, Decoder
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation, GoldenPrompt
from isthmus.package.generation.tokenizer import Tokenizer
from isthmus.package.manifest import Manifest, Package, Variant
from isthmus.package.replay import run_limits

if TYPE_CHECKING:
    import onnxruntime


def generation_of(manifest: Manifest) -> Generation:
    if manifest.generation is None:
        raise PackageError(f"package {manifest.name}", "does not generate text", expected="a causal language model")
    return manifest.generation


def read_prompts(package: Package) -> list[GoldenPrompt]:
    generation = generation_of(package.manifest)
    name, context = generation.prompts, generation.context
    file, data = package.files.folder / name, package.files.read(name)
    try:
        prompts = msgspec.json.decode(data, type=list[GoldenPrompt])
        require_unique_keys(file, data)
    except (ValueError, RecursionError) as error:
        raise damage_error(file, str(error), "golden prompts") from error
    files = {variant.file for variant in package.manifest.variants}
    if not prompts or any(set(prompt.answers) - files for prompt in prompts):
        raise damage_error(file, "no prompt, or answers of a missing file", "prompts for the files of the manifest")
    if any(not 0 < len(prompt.tokens) < context for prompt in prompts):
        raise damage_error(file, "a prompt is empty or fills the context of the model", f"1 to {context - 1:,} tokens")
    return prompts


def open_tokenizer(package: Package) -> Tokenizer:
    """Open the tokenizer of a package, to generate text. Check it with the prompts and tokens recorded in the package.

    Raises PackageError if the tokenizer is damaged, returns other tokens, or has more tokens than the model. Raises
    DependencyError if the extra `generate` is not installed.
    """
    generation = generation_of(package.manifest)
    where = f"package {package.manifest.name}: {generation.tokenizer}"
    tokenizer = Tokenizer(package.files.read(generation.tokenizer), generation, where)
    logits = next(output for output in package.manifest.outputs if output.name == LOGITS)
    known = logits.shape[-1]
    if not isinstance(known, int) or tokenizer.size > known:
        raise PackageError(where, f"has {tokenizer.size:,} tokens", expected=f"at most {known}, as the model")
    for prompt in read_prompts(package):
        try:
            tokens = tokenizer.encode(generation.parts(prompt.text, prompt.features))
        except IsthmusError as error:
            raise PackageError(where, f"refuses a golden prompt ({error})", remedy="export the model again") from error
        if tuple(tokens) != prompt.tokens:
            raise PackageError(where, f"returns other tokens for {prompt.text!r:.60} than recorded",
                               expected=f"{prompt.tokens[:8]} …", remedy="export the model again")  # fmt: skip
    return tokenizer


def decoder_of(manifest: Manifest, variant: Variant) -> Decoder:
    past = next(tensor for tensor in manifest.tensors if tensor.name == PAST)
    shape = tuple(size for size in past.shape[2:] if isinstance(size, int))
    part = min(PART, variant.most.get(TOKENS, PART))
    return Decoder(f"package {manifest.name}: {variant.file}", generation_of(manifest), variant.sha256, shape, part)


def generate_greedy(
    package: Package, variant: Variant, session: "onnxruntime.InferenceSession", prompts: list[GoldenPrompt]
) -> list[list[int]]:
    """Generate text after each recorded prompt, to compare it with the recorded text; return token ids per prompt.

    Each step takes the most likely token. A text ends after as many tokens as were recorded for the model file
    `variant`, or earlier at an end token. `session` has that file open in ONNX Runtime. Raises PackageError if the file
    fails, or takes more than two minutes for all prompts together.
    """
    decoder, names = decoder_of(package.manifest, variant), [LOGITS, NEW]
    with run_limits(package.manifest, variant) as options:

        def run(feeds: dict[str, Array]) -> dict[str, Array]:
            return dict(zip(names, session.run(names, feeds, options), strict=True))

        limits = [len(prompt.answers.get(variant.file, ())) for prompt in prompts]
        return [
            [read.token for read in decoder.greedy(run, prompt.tokens, limit)]
            for prompt, limit in zip(prompts, limits, strict=True)
        ]


def require_generated(
    package: Package, variant: Variant, session: "onnxruntime.InferenceSession", prompts: list[GoldenPrompt]
) -> int:
    count = 0
    for prompt, tokens in zip(prompts, generate_greedy(package, variant, session, prompts), strict=True):
        recorded = prompt.answers.get(variant.file, ())
        for place, (expected, token) in enumerate(zip_longest(recorded, tokens)):
            if token != expected:
                action = "ends the text" if token is None else f"generates token {token}"
                raise PackageError(
                    f"package {package.manifest.name}: {variant.file}",
                    f"{action} at place {place} after {prompt.text!r:.60}",
                    expected=f"{expected}, as recorded", remedy="export the model again with this release",
                )  # fmt: skip
        count += len(recorded)
    return count
