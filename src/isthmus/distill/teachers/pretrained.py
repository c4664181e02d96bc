"""Teachers from transformers, from a folder or the hub; loads only safetensors, and never runs code from there."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.features.errors import ConfigurationError, DependencyError, Problem, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
_IMAGES = ("preprocessor_config.json", "processor_config.json")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_OF_LAYERS = re.compile(r"(hidden|attentions)(?:\.(\d+))?")


class PretrainedTeacher(NetworkTeacher):
    """A teacher that is a model of the transformers library.

    Keys, in addition to the names of the model's own outputs:

    * "logits";
    * "hidden": (rows, layers + 1, positions, width), embeddings first; "hidden.3" is the output of layer 3 alone;
    * "attentions": (rows, layers, heads, positions, positions); "attentions.0" is the first layer alone;
    * "embedding": (rows, width), pooled from the last hidden state: the mean over the positions in the attention mask,
      or the first position, depending on `pooling`.

    Attentions need a model that was loaded with `attn_implementation="eager"`. Labels default to the configuration's;
    other arguments are as in `NetworkTeacher`.
    """

    module: "PreTrainedModel"

    def __init__(  # noqa: PLR0913 - options of the model, by name
        self,
        model: "PreTrainedModel",
        keys: Sequence[str] = ("logits",),
        *,
        pooling: Literal["mean", "first"] = "mean",
        taps: Mapping[str, str] | None = None,
        labels: Sequence[str] | None = None,
        version: str = "",
        name: str | None = None,
    ) -> None:
        if pooling not in ("mean", "first"):
            raise ConfigurationError("pooling", [Problem("pooling", repr(pooling), '"mean" or "first"')])
        if labels is None and "logits" in keys and "Classification" in type(model).__name__:
            labels = [str(text) for _, text in sorted((model.config.id2label or {}).items())]
        self.pooling = pooling
        super().__init__(model, keys, taps=taps, labels=labels, version=version, name=name)

    def _outputs(self, batch: Any) -> Mapping[str, Any]:
        hidden = any(key.startswith("hidden") or key == "embedding" for key in self._own)
        attentions = any(key.startswith("attentions") for key in self._own)
        more = {"output_hidden_states": hidden, "output_attentions": attentions}
        result = self._call(batch, return_dict=True, **{option: True for option, wanted in more.items() if wanted})
        outputs = {key: value for key, value in result.items() if value is not None}
        return {**outputs, **self._derived(outputs, batch)}

    def _derived(self, outputs: Mapping[str, Any], batch: Any) -> dict[str, Tensor]:
        derived: dict[str, Tensor] = {}
        for key in self._own:
            match = _OF_LAYERS.fullmatch(key)
            layers = outputs.get("hidden_states" if match and match[1] == "hidden" else "attentions") if match else None
            if match and layers and match[2] is None:
                derived[key] = torch.stack(tuple(layers), 1)
            elif match and layers and int(match[2]) < len(layers):
                derived[key] = layers[int(match[2])]
            elif key == "embedding":
                states = outputs.get("hidden_states")
                last = outputs.get("last_hidden_state", states[-1] if states else None)
                mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
                if last is not None:
                    derived[key] = pooled(last, mask, first=self.pooling == "first")
        return derived

    def _identity(self) -> Any:
        return [*super()._identity(), self.pooling if "embedding" in self.keys else None]


def pooled(states: Tensor, mask: Tensor | None, *, first: bool = False) -> Tensor:
    """Pool hidden states to one vector per row, to use them as an embedding: (rows, width).

    Args:
        states: hidden states (rows, positions, width), or feature maps (rows, channels, height, width).
        mask: (rows, positions), 0 for positions to leave out of the mean, such as padding; None to average over all.
        first: True to return the first position, without the mask, instead of the mean.
    """
    if states.ndim > 3:
        states = states.flatten(2).transpose(1, 2)
    if first:
        return states[:, 0]
    if mask is None:
        return states.float().mean(1)
    counts = (mask != 0).unsqueeze(-1)
    # Fill instead of multiplying by the mask, which would keep NaN and infinity.
    return states.float().masked_fill(~counts, 0).sum(1) / counts.sum(1).clamp(min=1)


def pretrained(  # noqa: PLR0913 - options of the model, by name
    source: str | Path,
    keys: Sequence[str] = ("logits",),
    *,
    revision: str | None = None,
    offline: bool = False,
    device: str | torch.device = "cpu",
    pooling: Literal["mean", "first"] = "mean",
    labels: Sequence[str] | None = None,
) -> PretrainedTeacher:
    """Load a model of the transformers library as a teacher, from a local folder or the Hugging Face hub.

    Downloads only the configuration and safetensors. The model's class is the one that the configuration names, and
    must be part of transformers: code next to the weights is never run, and pickled weights are never read.

    Args:
        source: a folder, or the name of a repository on the hub.
        keys: names of the outputs to use, such as "logits", "hidden.3" or "embedding"; see `PretrainedTeacher`.
        revision: commit, tag or branch of a repository. Only a commit never changes.
        offline: True to use only repositories in the local cache of the hub.
        device: device to compute on.
        pooling: computes the output "embedding" as the mean over all positions that count, or from the first position.
        labels: class names in the order of the logits; by default the class names in a classifier's configuration.

    Raises:
        ConfigurationError: the folder has no model that transformers can load, or weights are missing.
        DependencyError: transformers is not installed, or the repository cannot be downloaded.
    """
    try:
        import transformers
    except ImportError as error:
        found, remedy = f"transformers cannot be loaded: {error}", "pip install 'isthmus[text]'"
        raise DependencyError(f"teacher {source}", found, remedy=remedy, passes=False) from error
    folder = Path(source) if Path(source).is_dir() else model_folder(str(source), revision, offline=offline)
    where = f"teacher {source}"
    config = _configuration(folder, where)
    architecture = config["architectures"][0]
    kind: Any = getattr(transformers, architecture, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        remote = "auto_map" in config
        found = f"{architecture!r}, which is {'code next to the weights' if remote else 'not a transformers model'}"
        remedy = "if you trust its code, load the model yourself and wrap it with NetworkTeacher" if remote else ""
        raise ConfigurationError(where, [Problem("architectures", found, "a class of transformers")], remedy=remedy)
    options: dict[str, Any] = {
        "use_safetensors": True, "trust_remote_code": False, "local_files_only": True, "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # raises below
    }  # fmt: skip
    if any(key.startswith("attentions") for key in keys):
        options["attn_implementation"] = "eager"
    try:
        model, info = kind.from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigurationError(where, [Problem(str(folder), str(error).strip(), "a model that loads")]) from error
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        shown = ", ".join(absent[:5]) + (" …" if len(absent) > 5 else "")
        found = f"{len(absent)} weights of {architecture} are missing or have a different shape: {shown}"
        remedy = "fine-tune and save the whole model; missing weights would be random"
        raise ConfigurationError(where, [Problem(_WEIGHTS, found, "all")], remedy=remedy)
    return PretrainedTeacher(model.to(device), keys, pooling=pooling, labels=labels, name=str(source))


def model_folder(name: str, revision: str | None, *, offline: bool = False) -> Path:
    """Return the folder of a repository on the Hugging Face hub, after downloading what the local cache lacks.

    Downloads the configuration, safetensors and the files of tokenizer and image processor. With `offline`, only looks
    in the cache. Raises a DependencyError if the repository cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["config.json", _WEIGHTS, _INDEX, "model-*.safetensors", *_TOKENIZER, *_IMAGES]
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=offline, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise DependencyError(
            f"teacher {name}",
            f"is not a folder and cannot be downloaded from the hub: {first_line(error)}",
            expected="a folder with config.json and model.safetensors, or the name of a repository",
            remedy="check the name and the connection, or use a folder",
        ) from error


def _implementations(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the implementations that a configuration names at any depth; one may be code from the hub."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith("_implementation"):
            yield key, str(value)
        yield from _implementations(value)


def _configuration(folder: Path, where: str) -> dict[str, Any]:
    problems, config = [], {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if not (isinstance(config.get("architectures"), list) and config["architectures"]):
            problems.append(Problem("config.json", "does not name a model class", '"architectures"'))
    except (OSError, ValueError, AttributeError) as error:
        problems.append(Problem("config.json", str(error), "the configuration of a model"))
    problems += [
        Problem(f"config.json, {key}", repr(name), "an implementation that is part of transformers")
        for key, name in _implementations(config)
        if "/" in name
    ]
    pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
    if (folder / _INDEX).exists():
        try:
            parts = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
            wrong = sorted(str(part) for part in parts if not re.fullmatch(r"[\w.-]+\.safetensors", str(part)))
            problems += [Problem(_INDEX, repr(part), "names of safetensors in this folder") for part in wrong]
            gone = sorted(str(part) for part in parts if part not in wrong and not (folder / str(part)).is_file())
            problems += [Problem(_INDEX, f"{part} is missing", "all files of the index") for part in gone]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            problems.append(Problem(_INDEX, f"{type(error).__name__}: {error}", "the file of each weight"))
    elif not (folder / _WEIGHTS).exists():
        found = f"missing; {', '.join(pickled)} is pickled and would run code" if pickled else "missing"
        problems.append(Problem(_WEIGHTS, found, "weights in safetensors"))
    if (folder / "adapter_config.json").exists():
        problems.append(Problem("adapter_config.json", "an adapter", "a whole model: merge the adapter and save it"))
    if problems:
        remedy = "if you trust it, load it once and call model.save_pretrained(folder)" if pickled else ""
        raise ConfigurationError(where, problems, remedy=remedy)
    return dict(config)
