"""Attention as it is replayed, not simulated: the contract's kernel and torch's own op over whole sequences."""

import dataclasses

import torch

from zerogap.diagnose.simulate.contract import contract_output
from zerogap.diagnose.simulate.variant import Problem
from zerogap.numerics import DType, preset


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads, the factor of the scores, and the rows of each sequence."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    lengths: tuple[int, ...]


def sizes(problem: Problem) -> Sizes | None:
    """None where the parameters do not say them."""
    dim, heads, kv_heads = (problem.number(n) for n in ("head_dim", "num_heads", "num_kv_heads"))
    if heads is None or len(problem.inputs) != 3:
        return None
    dim = dim or problem.inputs[0].shape[1] // heads
    kv_heads = kv_heads or problem.inputs[1].shape[1] // dim
    scale = problem.number("scale", float(dim) ** -0.5)
    assert scale is not None
    return Sizes(int(heads), int(kv_heads), int(dim), scale, tuple(problem.lengths))


def stored(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in one dtype: under autocast the rotated ones are FP32, and are cast to the output's."""
    same = len({t.dtype for t in problem.inputs}) == 1
    return problem.inputs if same else tuple(t.to(problem.out.dtype) for t in problem.inputs)


def heads_of(
    problem: Problem, found: Sizes, heads: list[int], first: int, length: int, interleaved: bool = False
) -> tuple[torch.Tensor, ...]:
    """q, k, v of one sequence as [heads, T, D] in the stored dtype."""
    group = found.heads // found.kv_heads
    picked = [h % found.kv_heads if interleaved else h // group for h in heads]
    parts = [t[first : first + length].unflatten(1, (-1, found.dim)).transpose(0, 1) for t in stored(problem)]
    return parts[0][heads], parts[1][picked], parts[2][picked]


def by_contract(problem: Problem, found: Sizes, fp8: bool = False, power: bool = False) -> torch.Tensor:
    sizes = {"num_heads": found.heads, "num_kv_heads": found.kv_heads, "head_dim": found.dim, "scale": found.scale}
    numerics = preset("bf16" if problem.storage == "bf16" else "fp32")
    if fp8:
        numerics = preset("bf16", kv=DType.FP8, kv_scale="per_token_head", scale_format="pow2" if power else "fp32")
    return contract_output("attention", stored(problem), {}, {**sizes, "lengths": list(found.lengths)}, numerics)


def sdpa(problem: Problem, found: Sizes) -> torch.Tensor:
    """torch's op, each sequence alone, causal."""
    done, first = [], 0
    for length in found.lengths:
        q, k, v = heads_of(problem, found, list(range(found.heads)), first, length)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast RoPE may widen what the op narrows again
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None].contiguous(), v[None].contiguous(), is_causal=True, scale=found.scale
        )
        done.append(out[0].transpose(0, 1).flatten(1))
        first += length
    return torch.cat(done)


def sdpa_rows(problem: Problem, found: Sizes) -> torch.Tensor:
    """torch's op for every row by itself, with the keys up to its own."""
    done, first = [], 0
    for length in found.lengths:
        q, k, v = heads_of(problem, found, list(range(found.heads)), first, length)
        q, k = q.to(v.dtype), k.to(v.dtype)
        for t in range(length):
            keys, values = k[None, :, : t + 1].contiguous(), v[None, :, : t + 1].contiguous()
            row = torch.nn.functional.scaled_dot_product_attention(
                q[None, :, t : t + 1], keys, values, scale=found.scale
            )
            done.append(row.flatten())
        first += length
    return torch.stack(done)
