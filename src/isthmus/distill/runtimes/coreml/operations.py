"""The operations of a Core ML program in torch, after the MIL reference (`ops` of coremltools)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Arguments = Mapping[str, Any]
"""Arguments of an operation by name: tensors, texts and lists of tensors."""

TYPES = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32, "bool": torch.bool}


def compute(kind: str, inputs: Arguments) -> Tensor | tuple[Tensor, ...]:
    if kind not in OPERATIONS:
        raise NotImplementedError(f"Core ML operation {kind} is not supported by the interpreter")
    return OPERATIONS[kind](inputs)


def _whole(value: Tensor) -> list[int]:
    return [int(number) for number in value.reshape(-1).tolist()]


def _binary(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    return lambda inputs: function(inputs["x"], inputs["y"])


def _unary(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    return lambda inputs: function(inputs["x"])


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _reduced(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    def reduce(inputs: Arguments) -> Tensor:
        x = inputs["x"]
        axes = _whole(inputs["axes"]) if "axes" in inputs else [*range(x.ndim)]
        return function(x, axes, bool(inputs.get("keep_dims", False))).to(x.dtype)

    return reduce


def _cast(inputs: Arguments) -> Tensor:
    if inputs["dtype"] not in TYPES:
        raise NotImplementedError(f"Core ML type {inputs['dtype']} is not supported by the interpreter")
    x: Tensor = inputs["x"]
    return x.to(TYPES[inputs["dtype"]])


def _slice_by_index(inputs: Arguments) -> Tensor:
    x: Tensor = inputs["x"]
    begin, end = _whole(inputs["begin"]), _whole(inputs["end"])
    strides = _whole(inputs["stride"]) if "stride" in inputs else [1] * x.ndim
    masks = {name: inputs[name].tolist() if name in inputs else [False] * x.ndim
             for name in ("begin_mask", "end_mask", "squeeze_mask")}  # fmt: skip
    places: list[int | slice] = []
    for axis, stride in enumerate(strides):
        if stride < 1:
            raise NotImplementedError("a backward slice in Core ML is not supported by the interpreter")
        if masks["squeeze_mask"][axis]:
            places.append(begin[axis])
        else:
            first = None if masks["begin_mask"][axis] else begin[axis]
            places.append(slice(first, None if masks["end_mask"][axis] else end[axis], stride))
    return x[tuple(places)]


def _gather(inputs: Arguments) -> Tensor:
    if int(inputs.get("batch_dims", 0)):
        raise NotImplementedError("a gather with batches in Core ML is not supported by the interpreter")
    x, indices, axis = inputs["x"], inputs["indices"].long(), int(inputs.get("axis", 0)) % inputs["x"].ndim
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    picked: Tensor = x.index_select(axis, indices.reshape(-1))
    return picked.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_along_axis(inputs: Arguments) -> Tensor:
    result: Tensor = inputs["x"].gather(int(inputs.get("axis", 0)), inputs["indices"].long())
    return result


def _gather_nd(inputs: Arguments) -> Tensor:
    if int(inputs.get("batch_dims", 0)):
        raise NotImplementedError("a gather with batches in Core ML is not supported by the interpreter")
    result: Tensor = inputs["x"][inputs["indices"].long().unbind(-1)]
    return result


def _reshape(inputs: Arguments) -> Tensor:
    x: Tensor = inputs["x"]
    sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(_whole(inputs["shape"]))]
    return x.reshape(sizes)


def _concat(inputs: Arguments) -> Tensor:
    if bool(inputs.get("interleave", False)):
        raise NotImplementedError("an interleaved concat in Core ML is not supported by the interpreter")
    return torch.cat([value if value.ndim else value[None] for value in inputs["values"]], int(inputs["axis"]))


def _matmul(inputs: Arguments) -> Tensor:
    x, y = inputs["x"], inputs["y"]
    x = x.transpose(-1, -2) if bool(inputs.get("transpose_x", False)) else x
    y = y.transpose(-1, -2) if bool(inputs.get("transpose_y", False)) else y
    return torch.matmul(x, y)


def _conv(inputs: Arguments) -> Tensor:
    x, weight = inputs["x"], inputs["weight"]
    count = weight.ndim - 2
    strides, dilations = (_whole(inputs[name]) if name in inputs else [1] * count for name in ("strides", "dilations"))
    kind = inputs.get("pad_type", "valid")
    if kind == "custom":
        pad = _whole(inputs["pad"])
    elif kind == "valid":
        pad = [0] * 2 * count
    else:
        raise NotImplementedError(f"padding {kind} in Core ML is not supported by the interpreter")
    # torch lists the padding of the last axis first.
    edges = [edge for axis in reversed(range(count)) for edge in pad[2 * axis : 2 * axis + 2]]
    function: Callable[..., Tensor] = (functional.conv1d, functional.conv2d, functional.conv3d)[count - 1]
    padded = functional.pad(x, edges)
    groups = int(inputs.get("groups", 1))
    return function(padded, weight, inputs.get("bias"), strides, dilation=dilations, groups=groups)


def _layer_norm(inputs: Arguments) -> Tensor:
    x, axes = inputs["x"], sorted(axis % inputs["x"].ndim for axis in _whole(inputs["axes"]))
    if axes != [*range(axes[0], x.ndim)]:
        raise NotImplementedError(
            "a layer norm in Core ML along axes other than the last is not supported by the interpreter"
        )
    epsilon = float(inputs.get("epsilon", 1e-5))
    return functional.layer_norm(x, x.shape[axes[0] :], inputs.get("gamma"), inputs.get("beta"), epsilon)


def _batch_norm(inputs: Arguments) -> Tensor:
    epsilon = float(inputs.get("epsilon", 1e-5))
    return functional.batch_norm(
        inputs["x"],
        inputs["mean"],
        inputs["variance"],
        inputs.get("gamma"),
        inputs.get("beta"),
        eps=epsilon,
    )


def _gelu(inputs: Arguments) -> Tensor:
    modes = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}
    if inputs.get("mode", "EXACT") not in modes:
        raise NotImplementedError(f"GELU {inputs['mode']} in Core ML is not supported by the interpreter")
    return functional.gelu(inputs["x"], approximate=modes[inputs.get("mode", "EXACT")])


def _upsample(inputs: Arguments) -> Tensor:
    factors = [float(inputs.get(f"scale_factor_{side}", 1)) for side in ("height", "width")]
    if any(factor != int(factor) for factor in factors):
        raise NotImplementedError("upsampling by a fraction in Core ML is not supported by the interpreter")
    x: Tensor = inputs["x"]
    return x.repeat_interleave(int(factors[0]), -2).repeat_interleave(int(factors[1]), -1)


def _expand_dims(inputs: Arguments) -> Tensor:
    x, axes = inputs["x"], _whole(inputs["axes"])
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    result: Tensor = x
    return result


def _squeeze(inputs: Arguments) -> Tensor:
    x: Tensor = inputs["x"]
    return x.squeeze(tuple(_whole(inputs["axes"]))) if "axes" in inputs else x.squeeze()


def _split(inputs: Arguments) -> tuple[Tensor, ...]:
    x, axis = inputs["x"], int(inputs["axis"])
    if "split_sizes" in inputs:
        return tuple(x.split(_whole(inputs["split_sizes"]), axis))
    return tuple(x.chunk(int(inputs["num_splits"]), axis))


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
    "clip": lambda inputs: inputs["x"].clamp(float(inputs["alpha"]), float(inputs["beta"])),
    "concat": _concat,
    "conv": _conv,
    "expand_dims": _expand_dims,
    "fill_like": lambda inputs: torch.full_like(inputs["ref_tensor"], inputs["value"].item(),
                                                dtype=inputs["value"].dtype),
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "gather_nd": _gather_nd,
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "leaky_relu": lambda inputs: functional.leaky_relu(inputs["x"], float(inputs.get("alpha", 0.01))),
    "linear": lambda inputs: functional.linear(inputs["x"], inputs["weight"], inputs.get("bias")),
    "log": lambda inputs: torch.log(inputs["x"] + float(inputs.get("epsilon", 1e-45))),
    "matmul": _matmul,
    "pixel_shuffle": lambda inputs: functional.pixel_shuffle(inputs["x"], int(inputs["upscale_factor"])),
    "range_1d": lambda inputs: torch.arange(*(inputs[part].item() for part in ("start", "end", "step")),
                                           dtype=inputs["start"].dtype),
    "reshape": _reshape,
    "rsqrt": lambda inputs: torch.rsqrt(inputs["x"] + float(inputs.get("epsilon", 1e-12))),
    "select": lambda inputs: torch.where(inputs["cond"], inputs["a"], inputs["b"]),
    "shape": lambda inputs: torch.tensor(inputs["x"].shape, dtype=torch.int32),
    "slice_by_index": _slice_by_index,
    "softmax": lambda inputs: torch.softmax(inputs["x"], int(inputs.get("axis", -1))),
    "split": _split,
    "squeeze": _squeeze,
    "stack": lambda inputs: torch.stack(inputs["values"], int(inputs["axis"])),
    "tile": lambda inputs: inputs["x"].repeat(_whole(inputs["reps"])),
    "transpose": lambda inputs: inputs["x"].permute(_whole(inputs["perm"])),
    "upsample_nearest_neighbor": _upsample,
}  # fmt: skip
