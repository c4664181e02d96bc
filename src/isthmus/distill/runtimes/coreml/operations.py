"""What the operations of a Core ML program compute, in torch, after the reference of MIL (`ops` of coremltools)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Arguments = Mapping[str, Any]
"""Of an operation by name: tensors, texts, and lists of tensors."""

TYPES = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32, "bool": torch.bool}


def compute(kind: str, given: Arguments) -> Tensor | tuple[Tensor, ...]:
    """The results of an operation. Raises a NotImplementedError for a kind that is not known."""
    if kind not in OPERATIONS:
        raise NotImplementedError(f"operation {kind} of Core ML has no interpreter")
    return OPERATIONS[kind](given)


def _whole(value: Tensor) -> list[int]:
    return [int(number) for number in value.reshape(-1).tolist()]


def _binary(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    return lambda given: function(given["x"], given["y"])


def _unary(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    return lambda given: function(given["x"])


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _reduced(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    def reduce(given: Arguments) -> Tensor:
        x = given["x"]
        axes = _whole(given["axes"]) if "axes" in given else [*range(x.ndim)]
        return function(x, axes, bool(given.get("keep_dims", False))).to(x.dtype)

    return reduce


def _cast(given: Arguments) -> Tensor:
    if given["dtype"] not in TYPES:
        raise NotImplementedError(f"type {given['dtype']} of Core ML has no interpreter")
    x: Tensor = given["x"]
    return x.to(TYPES[given["dtype"]])


def _slice_by_index(given: Arguments) -> Tensor:
    x: Tensor = given["x"]
    begin, end = _whole(given["begin"]), _whole(given["end"])
    strides = _whole(given["stride"]) if "stride" in given else [1] * x.ndim
    masks = {name: given[name].tolist() if name in given else [False] * x.ndim
             for name in ("begin_mask", "end_mask", "squeeze_mask")}  # fmt: skip
    places: list[int | slice] = []
    for axis, stride in enumerate(strides):
        if stride < 1:
            raise NotImplementedError("a slice backward of Core ML has no interpreter")
        if masks["squeeze_mask"][axis]:
            places.append(begin[axis])
        else:
            first = None if masks["begin_mask"][axis] else begin[axis]
            places.append(slice(first, None if masks["end_mask"][axis] else end[axis], stride))
    return x[tuple(places)]


def _gather(given: Arguments) -> Tensor:
    if int(given.get("batch_dims", 0)):
        raise NotImplementedError("a gather of Core ML with batches has no interpreter")
    x, indices, axis = given["x"], given["indices"].long(), int(given.get("axis", 0)) % given["x"].ndim
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    picked: Tensor = x.index_select(axis, indices.reshape(-1))
    return picked.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_along_axis(given: Arguments) -> Tensor:
    result: Tensor = given["x"].gather(int(given.get("axis", 0)), given["indices"].long())
    return result


def _gather_nd(given: Arguments) -> Tensor:
    if int(given.get("batch_dims", 0)):
        raise NotImplementedError("a gather of Core ML with batches has no interpreter")
    result: Tensor = given["x"][given["indices"].long().unbind(-1)]
    return result


def _reshape(given: Arguments) -> Tensor:
    x: Tensor = given["x"]
    sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(_whole(given["shape"]))]
    return x.reshape(sizes)


def _concat(given: Arguments) -> Tensor:
    if bool(given.get("interleave", False)):
        raise NotImplementedError("an interleaved concat of Core ML has no interpreter")
    return torch.cat([value if value.ndim else value[None] for value in given["values"]], int(given["axis"]))


def _matmul(given: Arguments) -> Tensor:
    x, y = given["x"], given["y"]
    x = x.transpose(-1, -2) if bool(given.get("transpose_x", False)) else x
    y = y.transpose(-1, -2) if bool(given.get("transpose_y", False)) else y
    return torch.matmul(x, y)


def _conv(given: Arguments) -> Tensor:
    x, weight = given["x"], given["weight"]
    count = weight.ndim - 2
    strides, dilations = (_whole(given[name]) if name in given else [1] * count for name in ("strides", "dilations"))
    kind = given.get("pad_type", "valid")
    if kind == "custom":
        pad = _whole(given["pad"])
    elif kind == "valid":
        pad = [0] * 2 * count
    else:
        raise NotImplementedError(f"padding {kind} of Core ML has no interpreter")
    # torch begins with the last axis.
    around = [edge for axis in reversed(range(count)) for edge in pad[2 * axis : 2 * axis + 2]]
    function: Callable[..., Tensor] = (functional.conv1d, functional.conv2d, functional.conv3d)[count - 1]
    padded = functional.pad(x, around)
    groups = int(given.get("groups", 1))
    return function(padded, weight, given.get("bias"), strides, dilation=dilations, groups=groups)


def _layer_norm(given: Arguments) -> Tensor:
    x, axes = given["x"], sorted(axis % given["x"].ndim for axis in _whole(given["axes"]))
    if axes != [*range(axes[0], x.ndim)]:
        raise NotImplementedError("a layer norm of Core ML along other axes than the last has no interpreter")
    epsilon = float(given.get("epsilon", 1e-5))
    return functional.layer_norm(x, x.shape[axes[0] :], given.get("gamma"), given.get("beta"), epsilon)


def _batch_norm(given: Arguments) -> Tensor:
    epsilon = float(given.get("epsilon", 1e-5))
    return functional.batch_norm(
        given["x"], given["mean"], given["variance"], given.get("gamma"), given.get("beta"), eps=epsilon
    )


def _gelu(given: Arguments) -> Tensor:
    modes = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}
    if given.get("mode", "EXACT") not in modes:
        raise NotImplementedError(f"GELU {given['mode']} of Core ML has no interpreter")
    return functional.gelu(given["x"], approximate=modes[given.get("mode", "EXACT")])


def _upsample(given: Arguments) -> Tensor:
    factors = [float(given.get(f"scale_factor_{side}", 1)) for side in ("height", "width")]
    if any(factor != int(factor) for factor in factors):
        raise NotImplementedError("an upsampling of Core ML by a fraction has no interpreter")
    x: Tensor = given["x"]
    return x.repeat_interleave(int(factors[0]), -2).repeat_interleave(int(factors[1]), -1)


def _expand_dims(given: Arguments) -> Tensor:
    x, axes = given["x"], _whole(given["axes"])
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    result: Tensor = x
    return result


def _squeeze(given: Arguments) -> Tensor:
    x: Tensor = given["x"]
    return x.squeeze(tuple(_whole(given["axes"]))) if "axes" in given else x.squeeze()


def _split(given: Arguments) -> tuple[Tensor, ...]:
    x, axis = given["x"], int(given["axis"])
    if "split_sizes" in given:
        return tuple(x.split(_whole(given["split_sizes"]), axis))
    return tuple(x.chunk(int(given["num_splits"]), axis))


_Function = Callable[..., Tensor]

_BINARY: Mapping[str, _Function] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": _divide, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum, "equal": torch.eq, "not_equal": torch.ne,
    "less": torch.lt, "less_equal": torch.le, "greater": torch.gt, "greater_equal": torch.ge,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
}  # fmt: skip
_UNARY: Mapping[str, _Function] = {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "sqrt": torch.sqrt,
    "abs": torch.abs, "erf": torch.erf, "square": torch.square, "floor": torch.floor, "ceil": torch.ceil,
    "silu": functional.silu, "identity": torch.clone, "logical_not": torch.logical_not,
}  # fmt: skip
_REDUCED: Mapping[str, _Function] = {
    "reduce_sum": torch.sum, "reduce_mean": torch.mean, "reduce_max": torch.amax, "reduce_min": torch.amin,
    "reduce_l2_norm": lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep),
}  # fmt: skip

OPERATIONS: Mapping[str, Callable[[Arguments], Tensor | tuple[Tensor, ...]]] = {
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _reduced(function) for name, function in _REDUCED.items()},
    "batch_norm": _batch_norm,
    "cast": _cast,
    "clip": lambda given: given["x"].clamp(float(given["alpha"]), float(given["beta"])),
    "concat": _concat,
    "conv": _conv,
    "expand_dims": _expand_dims,
    "fill_like": lambda given: torch.full_like(given["ref_tensor"], given["value"].item(), dtype=given["value"].dtype),
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "gather_nd": _gather_nd,
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "leaky_relu": lambda given: functional.leaky_relu(given["x"], float(given.get("alpha", 0.01))),
    "linear": lambda given: functional.linear(given["x"], given["weight"], given.get("bias")),
    "log": lambda given: torch.log(given["x"] + float(given.get("epsilon", 1e-45))),
    "matmul": _matmul,
    "pixel_shuffle": lambda given: functional.pixel_shuffle(given["x"], int(given["upscale_factor"])),
    "range_1d": lambda given: torch.arange(*(given[part].item() for part in ("start", "end", "step")),
                                           dtype=given["start"].dtype),
    "reshape": _reshape,
    "rsqrt": lambda given: torch.rsqrt(given["x"] + float(given.get("epsilon", 1e-12))),
    "select": lambda given: torch.where(given["cond"], given["a"], given["b"]),
    "shape": lambda given: torch.tensor(given["x"].shape, dtype=torch.int32),
    "slice_by_index": _slice_by_index,
    "softmax": lambda given: torch.softmax(given["x"], int(given.get("axis", -1))),
    "split": _split,
    "squeeze": _squeeze,
    "stack": lambda given: torch.stack(given["values"], int(given["axis"])),
    "tile": lambda given: given["x"].repeat(_whole(given["reps"])),
    "transpose": lambda given: given["x"].permute(_whole(given["perm"])),
    "upsample_nearest_neighbor": _upsample,
}  # fmt: skip
