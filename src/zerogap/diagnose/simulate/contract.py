"""The contract's own operators on captured rows: what zerogap would have computed from them, by the kernels themselves.

Used to put zerogap's operators into another stack one kind at a time, and to say that a side *is* the contract. Rows of
all sequences stand one after another; attention takes `lengths` for their borders.
"""

from collections.abc import Mapping, Sequence

import torch

from zerogap.errors import ConfigError
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType, Numerics, preset
from zerogap.ops import attention as attention_op
from zerogap.ops import gemm
from zerogap.ops.activation import silu_mul
from zerogap.ops.cpu import logprob as native_logprob
from zerogap.ops.cpu import norm as native_norm
from zerogap.ops.cpu import rope as native_rope
from zerogap.ops.handle import WeightHandle
from zerogap.ops.kv import DenseCodec, FP8Codec
from zerogap.ops.rope import rope_table
from zerogap.ops.sampling import SamplingRows
from zerogap.types import ForwardContext, FP8Blocks, SamplingParams, WeightSpec

PAGE = 16
KINDS = ("linear", "head", "norm", "activation", "residual", "rope", "attention", "logprob", "embedding", "router")


def contract_output(
    kind: str,
    inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, object],
    numerics: str | Numerics = "bf16",
) -> torch.Tensor:
    """Output rows of one operator under the contract.

    Args:
        kind: one of `KINDS`.
        inputs: tensors [R, width] in the node's order (`graph.Node.inputs`); rounded to the storage dtype.
        weights: by checkpoint name; the first `.weight`, and a `.bias` if there is one.
        parameters: norm `eps`; rope `head_dim`, `theta` (or `rope`, a RopeSpec), `positions` or `lengths`,
            `interleaved`; attention `num_heads`, `num_kv_heads`, `head_dim`, `scale`, `lengths`; linear `leaves`;
            logprob `targets`, `temperature`; embedding `ids`.
        numerics: a preset's name, or a contract.

    Returns:
        [R, N]: storage dtype; head, logprob and router FP32.

    Raises:
        ConfigError: another kind, or a parameter that is missing.
    """
    given = tuple(inputs.values()) if isinstance(inputs, Mapping) else tuple(inputs)
    rules = preset(numerics)
    storage = torch.bfloat16 if rules.storage is DType.BF16 else torch.float32
    rows = given if kind == "logprob" else tuple(t.to(storage).contiguous() for t in given)
    computing = {
        "linear": _linear,
        "head": _head,
        "router": _head,
        "norm": _norm,
        "activation": lambda *a: silu_mul(a[0][0], a[0][1]),
        "residual": lambda *a: (a[0][0].float() + a[0][1].float()).to(storage),
        "rope": _rope,
        "attention": _attention,
        "logprob": _logprob,
        "embedding": lambda *a: _required(a[1], ".weight").to(storage)[_ids(a[2])],
    }
    if kind not in computing:
        raise ConfigError("kind", kind, f"choose one of {', '.join(KINDS)}")
    with torch.no_grad():
        return computing[kind](rows, weights, parameters, rules)


def _required(weights: Mapping[str, torch.Tensor], ending: str) -> torch.Tensor:
    found = next((t for name, t in weights.items() if name.endswith(ending)), None)
    if found is None:
        raise ConfigError("weights", list(weights), f"give the operator's {ending[1:]}")
    return found.detach()


def _parameter(parameters: Mapping[str, object], name: str) -> object:
    if parameters.get(name) is None:
        raise ConfigError(f"parameters.{name}", None, "the operator depends on it")
    return parameters[name]


def _handle(kind: str, value: torch.Tensor, storage: torch.dtype, **sizes: object) -> WeightHandle:
    spec = WeightSpec("weight", tuple(value.shape), kind, **sizes)  # type: ignore[arg-type]
    handle = WeightHandle(spec, storage)
    handle.load(value)
    return handle


def _linear(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    weight, x = _required(weights, ".weight"), rows[0]
    leaves = contract_leaves(weights, weight.shape[1], parameters, rules)
    fp8 = FP8Blocks(rules.scale_format, False) if rules.linear is DType.FP8 else None
    handle = _handle("matrix", weight, x.dtype, in_leaves=leaves, fp8=fp8)
    bias = next((t.detach() for name, t in weights.items() if name.endswith(".bias")), None)
    biases = [None if bias is None else _handle("vector", bias, x.dtype)]
    return gemm.linear(x, [handle], biases, _context(torch.arange(len(x)), [len(x)]), gradient="chain")[0]


def _head(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return gemm.head_logits(rows[0], _handle("matrix", _required(weights, ".weight"), rows[0].dtype))


def _norm(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    weight = _required(weights, ".weight").to(rows[0].dtype).contiguous()
    heads = rows[0].shape[1] // len(weight)
    eps = _parameter(parameters, "eps")
    assert isinstance(eps, int | float)
    return native_norm.norm(rows[0], None, weight, float(eps), heads)[1]


def rope_of(parameters: Mapping[str, object]) -> RopeSpec:
    """The rotation's facts: `rope` as it is, or `theta` with the config's `scaling`, if there is any."""
    given = parameters.get("rope")
    if isinstance(given, RopeSpec):
        return given
    theta = _parameter(parameters, "theta")
    assert isinstance(theta, int | float)
    scaling = parameters.get("scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        return RopeSpec.from_hf({"rope_parameters": {**scaling, "rope_theta": theta}})
    return RopeSpec(theta=float(theta))


def positions_of(parameters: Mapping[str, object], count: int) -> torch.Tensor:
    """int32 [R]: `positions`, or each sequence from 0 by `lengths`."""
    given = parameters.get("positions")
    if given is not None:
        return torch.as_tensor(given).to(torch.int32).contiguous()
    lengths = parameters.get("lengths")
    assert lengths is None or isinstance(lengths, list | tuple)
    return torch.cat([torch.arange(int(n), dtype=torch.int32) for n in lengths or [count]])


def _rope(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    head_dim = int(_parameter(parameters, "head_dim"))  # type: ignore[call-overload]
    positions = positions_of(parameters, len(rows[0]))
    table = rope_table(rope_of(parameters), head_dim, int(positions.max()) + 1)
    interleaved = bool(parameters.get("interleaved", False))
    x = rows[0]
    return native_rope.rotate(x, x, table, positions, head_dim, inverse=False, interleaved=interleaved)[0]


def _context(positions: torch.Tensor, lengths: Sequence[int], table: torch.Tensor | None = None) -> ForwardContext:
    sequences = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])
    pages = torch.zeros((len(lengths), 1), dtype=torch.int32) if table is None else table
    return ForwardContext(positions.to(torch.int32), sequences, pages, PAGE)


def _attention(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    q, k, v = rows
    heads, kv_heads, dim = (int(_parameter(parameters, n)) for n in ("num_heads", "num_kv_heads", "head_dim"))  # type: ignore[call-overload]
    given = parameters.get("lengths") or [len(q)]
    assert isinstance(given, list | tuple)
    lengths = [int(n) for n in given]
    scale = parameters.get("scale")
    per_sequence = -(-max(lengths) // PAGE)
    table = torch.arange(per_sequence * len(lengths), dtype=torch.int32).view(len(lengths), per_sequence)
    codec: DenseCodec | FP8Codec = DenseCodec(kv_heads, dim, rules.storage)
    if rules.kv is DType.FP8:
        codec = FP8Codec(kv_heads, dim, rules.kv_scale, rules.scale_format, rules.attention_math)
    kv = codec.allocate(table.numel(), PAGE)
    context = _context(torch.cat([torch.arange(n) for n in lengths]), lengths, table)
    return attention_op.attention(
        q, k, v, kv, context, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        scale=float(scale) if isinstance(scale, int | float) else dim**-0.5, kv_split=rules.kv_split, leaves=1,
    )  # fmt: skip


def _ids(parameters: Mapping[str, object]) -> torch.Tensor:
    return torch.as_tensor(_parameter(parameters, "ids"), dtype=torch.int64).flatten()


def _logprob(rows, weights, parameters, rules: Numerics) -> torch.Tensor:  # type: ignore[no-untyped-def]
    logits = rows[0].to(torch.float32).contiguous()
    targets = torch.as_tensor(_parameter(parameters, "targets"), dtype=torch.int64).flatten()
    temperature = parameters.get("temperature")
    drawn = SamplingParams(temperature=float(temperature) if isinstance(temperature, int | float) else 1.0)
    sampling = SamplingRows.of([drawn] * len(logits))
    leaf_size = rules.vocab_leaf_size(logits.shape[1])
    out, _, _ = native_logprob.logprob(logits, targets.clamp_min(0), sampling.tensors, leaf_size, None, None)
    return torch.where(targets < 0, float("nan"), out.logp)[:, None]


def contract_leaves(
    weights: Mapping[str, torch.Tensor], reduced: int, parameters: Mapping[str, object], rules: Numerics
) -> int:
    """Leaves of a linear layer's sum: `parameters["leaves"]`, or the rule of down_proj and o_proj; 1 elsewhere."""
    given, heads = parameters.get("leaves"), parameters.get("num_heads")
    if isinstance(given, int):
        return given
    if any("down_proj" in name for name in weights):
        return rules.axis_leaves(reduced)
    if any("o_proj" in name for name in weights) and isinstance(heads, int):
        return rules.head_leaves(heads, reduced)
    return 1
