"""Dot products in any order: x [M, K] times w [N, K], FP32 [M, N], unrounded.

A sum of chains is computed by zerogap's own product kernel over permuted, padded and cut columns, because a chain of
that kernel is one FP32 rounding per exact product: BF16 pairs run odd element first (the order of `vdpbf16ps`), so a
plain ascending BF16 chain is the same kernel with pairs swapped; lanes are columns gathered lane by lane. What no chain
of FP32 is (multiply-then-add of FP32 operands, narrow accumulators, tensor cores) runs as elementwise code, one step of
K at a time.

Values of the fields:
    order       ascending, descending, lanes of N (halving tree over lanes), pairwise; `library: ...` see `library_dot`
    primitive   dot2 (BF16 pairs, odd first), fma, mul+add, tensor core
    split       1; `N parts, tree`, `N parts, ascending`, `N parts, descending`, `N parts, ring`, `blocks of B`
    accumulate  fp32, fp64, bf16, fp16 (after every product), `bf16 parts` (each part's sum)
"""

import math

import torch

from zerogap.diagnose.simulate.arithmetic import FP32, fma, multiply_add, round_to, tree
from zerogap.ops.cpu import gemm, library

STEP = 16  # products of a tensor core's instruction, BF16


def native(x: torch.Tensor, w: torch.Tensor, leaf_size: int = 0) -> torch.Tensor:
    """The kernel's sum: pairs (BF16) or single elements (FP32), ascending in leaves of `leaf_size`, then the tree."""
    x, w = x.contiguous(), w.contiguous()
    panels = gemm.allocate_panels(w.shape[0], w.shape[1], w.dtype)
    gemm.pack(w, panels)
    return gemm.product([gemm.Segment(x, panels, w.shape[0], leaf_size)], "concatenate", fp32=True)[0]


def cuts(split: str, width: int) -> list[tuple[int, int]]:
    """Borders of the parts of a reduced axis; parts are even but for the last one of blocks."""
    if split == "1":
        return [(0, width)]
    words = split.replace(",", "").split()
    size = int(words[2]) if words[0] == "blocks" else -(-width // int(words[0]))
    size += size % 2
    return [(k, min(k + size, width)) for k in range(0, width, size)]


BLOCKS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)


def odd_blocks(width: int) -> list[str]:
    """Blocks of other multiples of 8, up to a part of the axis, that no usual split has (stream-K)."""
    sizes = sorted({*range(8, 257, 8), *range(256, 1025, 64)} - set(BLOCKS))
    return [f"blocks of {n}" for n in sizes if 2 * n > width // 8 and n < width and width % n]


def splits(width: int) -> list[str]:
    """Every split of an axis once: of names that mean the same borders and order, the first."""
    names = ["1", *(f"blocks of {n}" for n in BLOCKS)]
    names += [f"{n} parts, {join}" for n in (2, 3, 4, 5, 6, 8, 16) for join in ("ascending", "tree")]
    names += [f"{n} parts, {join}" for n in (2, 4, 8) for join in ("descending", "ring")]
    seen: dict[tuple[object, ...], str] = {}
    for name in names:
        borders = cuts(name, width)
        if name != "1" and len(borders) < 2:
            continue
        join = "ascending" if name.startswith("blocks") else name.split()[-1]
        if (len(borders) <= 3 and join == "tree") or len(borders) == 2:
            join = "ascending"
        seen.setdefault((tuple(borders), join), name)
    return list(seen.values())


def joined(parts: list[torch.Tensor], split: str) -> torch.Tensor:
    """The sum of the parts in the order that `split` names."""
    if split.endswith("tree"):
        return tree(parts)
    if split.endswith("ring"):
        return _ring(parts)
    if split.endswith("descending"):
        parts = parts[::-1]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _ring(parts: list[torch.Tensor]) -> torch.Tensor:
    """A ring's reduce-scatter: of n equal runs of columns, run c starts at rank c + 1 and ends at rank c."""
    count = len(parts)
    pieces = [part.chunk(count, dim=-1) for part in parts]
    done = []
    for c in range(len(pieces[0])):
        total = pieces[(c + 1) % count][c]
        for step in range(2, count + 1):
            total = total + pieces[(c + step) % count][c]
        done.append(total)
    return torch.cat(done, -1)


def _ordered(t: torch.Tensor, order: str) -> torch.Tensor:
    """Columns in the order in which a chain, or chain after chain of lanes, visits them."""
    if order == "ascending":
        return t
    if order == "descending":
        return t.flip(-1)
    count = int(order.split()[-1])
    t = torch.nn.functional.pad(t, (0, -t.shape[-1] % (2 * count)))
    return t.unflatten(-1, (-1, count)).transpose(-1, -2)[:, _reversed(count)].flatten(-2)


def _reversed(count: int) -> list[int]:
    """Lanes so that a tree over neighbours adds lane i and lane i + count / 2 first."""
    bits = count.bit_length() - 1
    return [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(count)]


def _swapped(t: torch.Tensor) -> torch.Tensor:
    """Neighbours exchanged, so that pairs with the odd element first are a plain ascending chain."""
    t = torch.nn.functional.pad(t, (0, t.shape[-1] % 2))
    return t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def part_dot(x: torch.Tensor, w: torch.Tensor, order: str, primitive: str, accumulate: str = "fp32") -> torch.Tensor:
    """One part's sum; x and w hold the operands in BF16 or FP32."""
    if order.startswith("library:"):
        return library_dot(x, w)
    if accumulate == "fp64":
        return (x.double() @ w.double().T).to(FP32)
    if primitive == "tensor core":
        return tensor_core(x.to(FP32), w.to(FP32))
    if order == "pairwise":
        return _pairwise(x.to(FP32), w.to(FP32))
    lanes = int(order.split()[-1]) if order.startswith("lanes") else 1
    x, w = _ordered(x, order), _ordered(w, order)
    fused = primitive != "mul+add" and x.dtype != torch.bfloat16  # products of BF16 are exact anyway
    exact = x.dtype == torch.bfloat16 or (fused and library.backend() != "cpu/portable")
    if accumulate not in ("fp32", "bf16 parts") or not exact:
        return _steps(x.to(FP32), w.to(FP32), lanes, fused, accumulate)
    if x.dtype == torch.bfloat16 and primitive != "dot2":
        x, w = _swapped(x), _swapped(w)
    return native(x, w, x.shape[1] // lanes if lanes > 1 else 0)


def dot(
    x: torch.Tensor, w: torch.Tensor, order: str, primitive: str, split: str = "1", accumulate: str = "fp32"
) -> torch.Tensor:
    """FP32 [M, N] by the fields above."""
    if order.startswith("library:") and x.dtype != FP32 and split != "1" and not accumulate.endswith("parts"):
        x, w = x.to(FP32), w.to(FP32)
    parts = [
        part_dot(x[:, begin:end], w[:, begin:end], order, primitive, accumulate)
        for begin, end in cuts(split, x.shape[1])
    ]
    if accumulate in ("bf16 parts", "fp16 parts"):
        narrow = accumulate.split()[0]
        total = round_to(parts[0], narrow)
        for part in parts[1:]:
            total = round_to(total + round_to(part, narrow), narrow)
        return total
    return joined(parts, split)


def library_dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """torch's own product of these operands, FP32."""
    return torch.nn.functional.linear(x, w).to(FP32)


def _steps(x: torch.Tensor, w: torch.Tensor, lanes: int, fused: bool, accumulate: str) -> torch.Tensor:
    """Lane after lane lies in a run of columns (`_ordered`); rounds as `accumulate` says after every product."""
    size = x.shape[1] // lanes
    narrow = accumulate if accumulate in ("bf16", "fp16") else "fp32"
    done = []
    for lane in range(lanes):
        total = torch.zeros(len(x), len(w))
        for k in range(lane * size, (lane + 1) * size):
            total = multiply_add(x[:, k, None], w[None, :, k], total, fused)
            if narrow != "fp32":
                total = round_to(total, narrow)
        done.append(total)
    return tree(done)


def _pairwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A tree over all products, neighbours first; an odd last one passes up."""
    done = []
    for row in x:
        terms = row * w
        while terms.shape[-1] > 1:
            last = terms[:, -1:] if terms.shape[-1] % 2 else terms[:, :0]
            even = terms[:, : terms.shape[-1] // 2 * 2]
            terms = torch.cat([even[:, 0::2] + even[:, 1::2], last], 1)
        done.append(terms[:, 0])
    return torch.stack(done)


# ---------------------------------------------------------------------------------------------------- tensor cores


def _exponent(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.full_like(x, -126.0), torch.frexp(x)[1].to(torch.float64) - 1)


def tensor_core(x: torch.Tensor, w: torch.Tensor, step: int = STEP, fraction: int = 25, kept: int = 23) -> torch.Tensor:
    """Hopper's accumulation (MMA-Sim, arXiv 2511.10909): the products of one instruction and the accumulator are
    aligned to the largest exponent, truncated to `fraction` bits, added exactly, and truncated to `kept` bits.

    BF16 and FP16: 16 products, 25 and 23 bits; E4M3: 32 products, 13 and 13 bits.
    """
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    a, b = x.double(), w.double()
    for k in range(0, x.shape[1], step):
        left, right = a[:, None, k : k + step], b[None, :, k : k + step]
        products = left * right
        exponents = torch.where(products == 0, -252.0, _exponent(left) + _exponent(right))
        top = torch.maximum(exponents.amax(-1), _exponent(total)).clamp_min(-126)
        scale = torch.exp2(fraction - top)
        summed = ((products * scale[..., None]).trunc().sum(-1) + (total * scale).trunc()) / scale
        unit = torch.exp2(kept - torch.where(summed == 0, 0.0, _exponent(summed)))
        total = ((summed * unit).trunc() / unit).to(FP32).double()
    return total.to(FP32)


# ---------------------------------------------------------------------------------------------------- FP8


def fp8_dot(
    x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor], block: int, primitive: str
) -> torch.Tensor:
    """Grid values with their scales (broadcastable to [M or N, K / block]); each block's exact products are summed in
    FP32 (`tensor core`: in the 13 bits of one), then `total = fma(sum, scales, total)`, ascending.

    Source: docs/numerics.md, "FP8"; DeepGEMM's promotion at 128. `block` 0: one block and one pair of scales.
    """
    grid_x, scale_x = x
    grid_w, scale_w = w
    width = grid_x.shape[1]
    block = block or width
    total = torch.zeros(len(grid_x), len(grid_w))
    for i in range(math.ceil(width / block)):
        part = slice(i * block, (i + 1) * block)
        if primitive == "tensor core":
            found = tensor_core(grid_x[:, part], grid_w[:, part], 32, 13, 13)
        else:
            found = native(grid_x[:, part].bfloat16(), grid_w[:, part].bfloat16())
        scales = scale_x[:, min(i, scale_x.shape[1] - 1), None] * scale_w[None, :, min(i, scale_w.shape[1] - 1)]
        total = found * scales if block == width else fma(found, scales, total)
    return total
