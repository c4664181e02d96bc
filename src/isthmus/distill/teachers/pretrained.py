"""Models of transformers as teachers, from a folder or the hub: safetensors, and no code but that of transformers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.features.errors import ConfigurationError, DependencyError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_OF_LAYERS = re.compile(r"(hidden|attentions)(?:\.(\d+))?")


class PretrainedTeacher(NetworkTeacher):
    """A model of transformers.

    Keys, beside the names of the model's own outputs:

    * "logits";
    * "hidden": (rows, layers + 1, positions, width), the embeddings first; "hidden.3" only the output of layer 3;
    * "attentions": (rows, layers, heads, positions, positions); "attentions.0" only the first layer's;
    * "embedding": (rows, width), of the last hidden state: the mean over the positions that the attention mask counts,
      or the first position.

    Args:
        model: of transformers. Attentions need one that was loaded with `attn_implementation="eager"`.
        keys: the outputs that are asked for.
        pooling: how an embedding is made, "mean" or "first".
        taps: keys that are the outputs of submodules, with their names.
        labels: what its classes are called; by default as its configuration says.
        version: changes the fingerprint where it cannot see a change by itself.
        name: for messages; by default that of the class.
    """

    module: "PreTrainedModel"

    def __init__(
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
        more = {
            **({"output_hidden_states": True} if hidden else {}),
            **({"output_attentions": True} if attentions else {}),
        }
        given = self._call(batch, return_dict=True, **more)
        found = {key: value for key, value in given.items() if value is not None}
        return {**found, **self._made(found, batch)}

    def _made(self, found: Mapping[str, Any], batch: Any) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for key in self._own:
            match = _OF_LAYERS.fullmatch(key)
            layers = found.get("hidden_states" if match and match[1] == "hidden" else "attentions") if match else None
            if match and layers and match[2] is None:
                made[key] = torch.stack(tuple(layers), 1)
            elif match and layers and int(match[2]) < len(layers):
                made[key] = layers[int(match[2])]
            elif key == "embedding" and (last := self._last(found)) is not None:
                mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
                made[key] = pooled(last, mask if self.pooling == "mean" else None, first=self.pooling == "first")
        return made

    @staticmethod
    def _last(found: Mapping[str, Any]) -> Tensor | None:
        states = found.get("hidden_states")
        last: Tensor | None = found.get("last_hidden_state", states[-1] if states else None)
        return last

    def _identity(self) -> Any:
        return [*super()._identity(), self.pooling if "embedding" in self.keys else None]


def pooled(states: Tensor, mask: Tensor | None, *, first: bool = False) -> Tensor:
    """One vector a row.

    Args:
        states: (rows, positions, width), or feature maps (rows, width, height, width of the map).
        mask: (rows, positions), not 0 where a position counts.
        first: whether to take the first position; else the mean over those that count.
    """
    if states.ndim > 3:
        states = states.flatten(2).transpose(1, 2)
    if first:
        return states[:, 0]
    if mask is None:
        return states.float().mean(1)
    counts = (mask != 0).unsqueeze(-1)
    # Not multiplied by the mask: what is not finite at a position that does not count would stay.
    return states.float().masked_fill(~counts, 0).sum(1) / counts.sum(1).clamp(min=1)


def pretrained(
    source: str | Path,
    keys: Sequence[str] = ("logits",),
    *,
    revision: str | None = None,
    offline: bool = False,
    device: str | torch.device = "cpu",
    pooling: Literal["mean", "first"] = "mean",
    labels: Sequence[str] | None = None,
) -> PretrainedTeacher:
    """A model of transformers from a local folder or the hub.

    Of the hub only its configuration and its safetensors are fetched. The model is of the class that the configuration
    names, one of transformers' own; code beside the weights is never run, pickled weights are never read.

    Args:
        source: a folder, or the name of a repository of the hub.
        keys: the outputs that are asked for.
        revision: of a repository: a commit, a tag or a branch. A commit is always the same.
        offline: take a repository only from the local cache.
        device: where it computes.
        pooling: how an embedding is made.
        labels: what its classes are called; by default as its configuration says.

    Raises:
        ConfigurationError: with all that is wrong with the folder, or weights that are missing from it.
        DependencyError: transformers is not installed, or the hub cannot be reached.
    """
    try:
        import transformers
    except ImportError as error:
        raise DependencyError(
            f"teacher {source}", f"transformers cannot be loaded: {error}", remedy="pip install 'isthmus[text]'",
            passes=False,
        ) from error  # fmt: skip
    folder = Path(source) if Path(source).is_dir() else _fetched(str(source), revision, offline=offline)
    where = f"teacher {source}"
    config = _configuration(folder, where)
    named = config["architectures"][0]
    kind = getattr(transformers, named, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        remote = "auto_map" in config
        found = f"{named!r}, which is {'code beside the weights' if remote else 'no model of transformers'}"
        remedy = "load the model yourself, once you trust its code, and wrap it with NetworkTeacher" if remote else ""
        raise ConfigurationError(where, [Problem("architectures", found, "a class of transformers")], remedy=remedy)
    options: dict[str, Any] = {
        "use_safetensors": True, "trust_remote_code": False, "local_files_only": True, "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are told, and refused below
    }  # fmt: skip
    if any(key.startswith("attentions") for key in keys):
        options["attn_implementation"] = "eager"
    loaded: Any
    try:
        loaded = kind.from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigurationError(where, [Problem(str(folder), str(error).strip(), "a model that loads")]) from error
    model, said = loaded
    absent = sorted(map(str, [*said["missing_keys"], *said["mismatched_keys"]]))
    if absent:
        shown = ", ".join(absent[:5]) + (" …" if len(absent) > 5 else "")
        raise ConfigurationError(
            where,
            [Problem(_WEIGHTS, f"{len(absent)} weights of {named} are missing or of another shape: {shown}", "all")],
            remedy="fine-tune and save the whole model; what is missing would be drawn at random",
        )
    return PretrainedTeacher(model.to(device), keys, pooling=pooling, labels=labels, name=str(source))


def _fetched(name: str, revision: str | None, *, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            snapshot_download(
                name, revision=revision, local_files_only=offline,
                allow_patterns=["config.json", _WEIGHTS, _INDEX, "model-*.safetensors"],
            )
        )  # fmt: skip
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise DependencyError(
            f"teacher {name}",
            f"is no folder, and not to be had from the hub: {str(error).strip().splitlines()[0]}",
            expected="a folder with config.json and model.safetensors, or the name of a repository",
            remedy="check the name and the connection, or give a folder",
        ) from error


def _implementations(config: Any) -> Iterator[tuple[str, str]]:
    """What a configuration and those inside it say of who computes: some of it may be code of the hub."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith("_implementation"):
            yield key, str(value)
        yield from _implementations(value)


def _configuration(folder: Path, where: str) -> dict[str, Any]:
    """What config.json says, of a folder that holds what is read and nothing worse."""
    problems, config = [], {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if not (isinstance(config.get("architectures"), list) and config["architectures"]):
            problems.append(Problem("config.json", "names no class of a model", '"architectures"'))
    except (OSError, ValueError, AttributeError) as error:
        problems.append(Problem("config.json", str(error), "the configuration of a model"))
    problems += [Problem(f"config.json, {key}", repr(name), "an implementation of transformers' own") for key, name in
                 _implementations(config) if "/" in name]  # fmt: skip
    pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
    if (folder / _INDEX).exists():
        try:
            parts = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
            wrong = sorted(str(part) for part in parts if not re.fullmatch(r"[\w.-]+\.safetensors", str(part)))
            problems += [Problem(_INDEX, repr(part), "names of safetensors in this folder") for part in wrong]
            gone = sorted(str(part) for part in parts if part not in wrong and not (folder / str(part)).is_file())
            problems += [Problem(_INDEX, f"{part} is not there", "all its files") for part in gone]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            problems.append(Problem(_INDEX, f"{type(error).__name__}: {error}", "where each weight is"))
    elif not (folder / _WEIGHTS).exists():
        found = f"not there, beside {', '.join(pickled)}: pickled weights run code" if pickled else "not there"
        problems.append(Problem(_WEIGHTS, found, "weights in safetensors"))
    if (folder / "adapter_config.json").exists():
        problems.append(Problem("adapter_config.json", "an adapter", "a whole model: merge the adapter and save it"))
    if problems:
        remedy = "load it once where you trust it, and model.save_pretrained(folder)" if pickled else ""
        raise ConfigurationError(where, problems, remedy=remedy)
    return dict(config)
