"""Golden prompts: whether a package's tokenizer and model files still say what was recorded."""

import time
from typing import TYPE_CHECKING

import msgspec

from isthmus.features.errors import IsthmusError, PackageError
from isthmus.package.checksums import damaged, require_unique_keys
from isthmus.package.generation.decoder import PART, Array, Decoder
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation, GoldenPrompt
from isthmus.package.generation.tokenizer import Tokenizer
from isthmus.package.manifest import Manifest, Package, Variant

if TYPE_CHECKING:
    import onnxruntime

SECONDS = 120
"""Limit for answering all golden prompts."""


def generation_of(manifest: Manifest) -> Generation:
    """How a package generates text; a PackageError if it does not."""
    if manifest.generation is None:
        raise PackageError(f"package {manifest.name}", "generates no text", expected="a causal language model")
    return manifest.generation


def read_prompts(package: Package) -> list[GoldenPrompt]:
    """The golden prompts; a PackageError if they are damaged."""
    name = generation_of(package.manifest).prompts
    file, data = package.files.folder / name, package.files.read(name)
    try:
        prompts = msgspec.json.decode(data, type=list[GoldenPrompt])
        require_unique_keys(file, data)
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error), "golden prompts") from error
    files = {variant.file for variant in package.manifest.variants}
    if not prompts or any(set(prompt.answers) - files for prompt in prompts):
        raise damaged(
            file, "no prompt, or answers of a file that is not there", "prompts for the files of the manifest"
        )
    return prompts


def open_tokenizer(package: Package) -> Tokenizer:
    """The tokenizer of a package, which gives the tokens of the golden prompts.

    Raises:
        DependencyError: the extra `generate` is not installed.
        PackageError: it is damaged, gives other tokens, or more than the model has.
    """
    generation = generation_of(package.manifest)
    where = f"package {package.manifest.name}: {generation.tokenizer}"
    tokenizer = Tokenizer(package.files.read(generation.tokenizer), generation, where)
    logits = next(output for output in package.manifest.outputs if output.name == LOGITS)
    known = logits.shape[-1]
    if not isinstance(known, int) or tokenizer.size > known:
        raise PackageError(where, f"has {tokenizer.size:,} tokens", expected=f"at most {known}, those of the model")
    for prompt in read_prompts(package):
        try:
            tokens = tokenizer.encode(generation.parts(prompt.text, prompt.features))
        except IsthmusError as error:
            raise PackageError(where, f"refuses a golden prompt ({error})", remedy="export the model again") from error
        if tuple(tokens) != prompt.tokens:
            raise PackageError(where, f"gives other tokens of {prompt.text!r:.60} than those that are recorded",
                               expected=f"{prompt.tokens[:8]} …", remedy="export the model again")  # fmt: skip
    return tokenizer


def decoder_of(manifest: Manifest, variant: Variant) -> Decoder:
    """What continues texts with a model file."""
    past = next(tensor for tensor in manifest.tensors if tensor.name == PAST)
    shape = tuple(size for size in past.shape[2:] if isinstance(size, int))
    part = min(PART, variant.most.get(TOKENS, PART))
    return Decoder(f"package {manifest.name}: {variant.file}", generation_of(manifest), variant.sha256, shape, part)


def require_generated(
    package: Package, variant: Variant, session: "onnxruntime.InferenceSession", prompts: list[GoldenPrompt]
) -> int:
    """How many greedy tokens of the golden prompts a model file repeats.

    Raises:
        PackageError: it says another token, or takes too long.
    """
    decoder, names = decoder_of(package.manifest, variant), [LOGITS, NEW]
    end, count = time.monotonic() + SECONDS, 0

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        if time.monotonic() > end:
            raise PackageError(decoder.where, f"no answer in {SECONDS} seconds", expected="the golden prompts")
        return dict(zip(names, session.run(names, feeds), strict=True))

    for prompt in prompts:
        recorded = prompt.answers.get(variant.file, ())
        said = (read.token for read in decoder.greedy(run, prompt.tokens, len(recorded)) if recorded)
        for place, (expected, token) in enumerate(zip(recorded, said, strict=False)):
            if token != expected:
                raise PackageError(
                    decoder.where, f"says token {token} at place {place} behind {prompt.text!r:.60}",
                    expected=f"{expected}, as recorded", remedy="export the model again, with this release of it",
                )  # fmt: skip
        count += len(recorded)
    return count
