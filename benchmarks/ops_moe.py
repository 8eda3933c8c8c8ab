"""A routed layer against transformers' own at the widths of Qwen3-30B-A3B and Moonlight: 1, 64 and 1,024 tokens, BF16.

Both layers hold the same random weights. The tokens are ones for which both routers choose the same experts (Qwen3's in
transformers rounds its logits to BF16, and so makes ties), so both sides do the same work; outputs, input gradients and
weight gradients are compared before anything is timed, and the run is refused where they are far apart. Each row is
measured against the expert implementation of transformers that was the fastest in trials of that row, and names it.
Not tried: those that need a GPU; `batched_mm` where it would copy more weights than the layer has; `eager` backward,
for which autograd makes a gradient of all experts for each expert (minutes at these widths).

Forward is the engine's: a recorded program. One token is eight calls with other tokens, so that experts come from
memory. Backward makes the gradients of the input and of all weights: ours are added to FP32 bins that are open, as
those of all packs of an update, and touch the chosen experts alone; transformers' are new BF16 tensors of all experts.
`fp8_over_bf16` is a second run, our FP8 (forward and gradients) against our BF16 on the same tokens. A ratio is the
median over rounds. To save memory, masters (which take no part) and bins are shared, a bin by every 16th expert: 16 of
them exceed the caches. About 6 GB of memory. `--record` writes the result file.
"""

import dataclasses
import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import transformers
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks import record
from zerogap.models.blocks import make_weights
from zerogap.models.spec import ModelSpec
from zerogap.models.tensors import EXPERT_PARTS
from zerogap.numerics import preset
from zerogap.ops.cpu import gemm, library
from zerogap.ops.cpu import moe as kernels
from zerogap.ops.moe import MoEWeights, moe
from zerogap.types import ForwardContext

BF16 = torch.bfloat16
PREFIX = "model.layers.0.mlp."
TOKENS = {1: 8, 64: 1, 1024: 1}  # tokens of a call: calls with other tokens that are timed together
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")  # the first is the default
LIMIT = 0.03  # of a relative difference: several roundings to BF16 on either side
SMALL = {"num_hidden_layers": 1, "vocab_size": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
CONFIGS = {
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        head_dim=128,
        **SMALL,
    ),
    "Moonlight": DeepseekV3Config(
        hidden_size=2048,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=0,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        num_mtp_layers=0,
        **SMALL,
    ),
}
BINS = 16  # of a projection's experts
PASSES = ("forward", "forward + backward")
Call = Callable[[], object]


# ------------------------------------------------------------------------------------------------ the two layers


def peer_layer(config: PretrainedConfig) -> torch.nn.Module:
    """transformers' layer with random BF16 weights; a router's bias stays FP32, as it does in a loaded model."""
    kind = {"qwen3_moe": Qwen3MoeSparseMoeBlock, "deepseek_v3": DeepseekV3MoE}[config.model_type]
    config._experts_implementation = IMPLEMENTATIONS[0]
    with torch.device("meta"):
        block = kind(config).to(BF16)
    block.to_empty(device="cpu")
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5)
    if config.model_type == "deepseek_v3":
        block.gate.e_score_correction_bias = torch.randn(config.n_routed_experts) * 0.05
    return block


class Layer:
    """Our layer: weights, all trained, under one contract."""

    def __init__(self, config: PretrainedConfig, numerics: str, source: Callable[[str], torch.Tensor]) -> None:
        """`source`: a tensor by its checkpoint name, without the prefix."""
        spec = ModelSpec.from_hf(config.to_dict())
        assert spec.moe is not None
        specs = {n: s for n, s in spec.weight_specs(preset(numerics)).items() if n.startswith(PREFIX)}
        weights, stacks = make_weights(specs, preset(numerics))
        self.handles = {name.removeprefix(PREFIX): handle for name, handle in weights.items()}
        masters: dict[tuple[int, ...], torch.Tensor] = {}
        for name, handle in self.handles.items():
            handle.load(source(name))
            shape = handle.spec.shape
            if handle.spec.kind != "buffer":  # trained, as `set_trainable` makes it, over a master that nothing reads
                masters[shape] = masters[shape] if shape in masters else torch.zeros(shape)
                handle.master, handle.published = masters[shape], None
                handle.anchor.requires_grad_()
        self.routing = spec.moe.routing
        gate, up, down = (stacks[f"{PREFIX}experts.{part}"] for part in EXPERT_PARTS)
        shared = None
        if spec.moe.shared_size:
            s_gate, s_up, s_down = (self.handles[f"shared_experts.{part}.weight"] for part in EXPERT_PARTS)
            shared = (s_gate, s_up, s_down)
        bias = self.handles.get("gate.e_score_correction_bias")
        self.weights = MoEWeights(self.handles["gate.weight"], bias, gate, up, down, shared)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        none = torch.zeros(0, dtype=torch.int32)
        packs = torch.tensor([0, len(x)], dtype=torch.int32)
        return moe(x, self.weights, self.routing, ForwardContext(none, none, none, 16, pack_starts=packs), 0)

    def open_bins(self, other: "Layer | None" = None) -> None:
        """Make ready for backward passes; with the bins of `other`, where it is given."""
        bins: dict[tuple[str, int], torch.Tensor | None] = {}
        for name, handle in self.handles.items():
            if not handle.trainable:
                continue
            handle.enable_input_grad()
            stack, index, _ = handle.spec.stack or (name, 0, 1)
            key = (stack, index % BINS)
            if key not in bins and other is None:
                handle.open_grad()
            handle.grad = bins.setdefault(key, handle.grad if other is None else other.handles[name].grad)


def by_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' weights or gradients by checkpoint name, as views."""
    both, down = tensors.pop("experts.gate_up_proj"), tensors.pop("experts.down_proj")
    for expert in range(len(down)):
        for part, value in zip(EXPERT_PARTS, (*both[expert].chunk(2), down[expert]), strict=True):
            tensors[f"experts.{expert}.{part}.weight"] = value
    return tensors


def common_tokens(block: torch.nn.Module, layer: Layer, count: int) -> torch.Tensor:
    """[count, H] random tokens for which both routers choose the same experts."""
    hidden, experts = layer.weights.router.spec.shape[1], layer.routing.num_experts
    x = torch.randn(2 * count, hidden).to(BF16)
    segment = gemm.Segment(x, layer.weights.router.panels, experts)
    (logits,) = gemm.product([segment], "concatenate", fp32=True)
    bias = None if layer.weights.bias is None else layer.weights.bias.rows
    ours, _, _ = kernels.route(logits, bias, layer.routing)
    with torch.no_grad():
        theirs = block.gate(x)[2].sort(1)[0]
    same = (ours == theirs).all(1)
    print(f"both routers choose the same experts for {same.float().mean():.1%} of random tokens")
    assert same.sum() >= count, "the routers disagree too often: these are not the same layer"
    return x[same][:count].clone()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|, the largest over rows."""
    rows = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp_min(1e-30)
    return rows.max().item()


def compare(block: torch.nn.Module, layer: Layer, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    """Relative differences of outputs and input gradients (largest of a token) and of weight gradients (of a bin).

    The layer's bins are open and empty.
    """
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, theirs = layer(mine), block(other[None])[0]
    out.backward(dy)
    theirs.backward(dy)
    assert mine.grad is not None and other.grad is not None
    found = {"output": difference(out, theirs), "input_gradient": difference(mine.grad, other.grad), "weights": 0.0}
    bins: dict[torch.Tensor, list[torch.Tensor]] = {}
    for name, expected in by_name({n: p.grad for n, p in block.named_parameters()}).items():
        grad = layer.handles[name].grad
        assert grad is not None, name
        bins.setdefault(grad, []).append(expected)
    for grad, parts in bins.items():
        total = sum(part.float() for part in parts)
        found["weights"] = max(found["weights"], difference(grad.flatten(), total.flatten()))
    block.zero_grad(set_to_none=True)
    print("relative differences: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    assert max(found.values()) <= LIMIT, f"the layers differ by more than {LIMIT}"
    return found


# ------------------------------------------------------------------------------------------------ what is timed


def call_of(layer: Layer | torch.nn.Module, inputs: list[torch.Tensor], dy: torch.Tensor | None) -> Call:
    """Forward of every input, ours a recorded program; with `dy` forward and backward."""
    run = layer if isinstance(layer, Layer) else lambda x: layer(x[None])[0]
    if dy is None and isinstance(layer, Layer):
        with torch.no_grad(), library.record(rows=tuple(inputs)) as program:
            for x in inputs:
                layer(x)
        return lambda: program.run(rows=len(inputs[0]))
    leaves = [x.clone().requires_grad_(dy is not None) for x in inputs]

    def call() -> None:
        with torch.set_grad_enabled(dy is not None):
            for x in leaves:
                out = run(x)
                if dy is not None:
                    out.backward(dy)

    return call


def interleaved(arms: Mapping[str, Call], reset: Call, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm and round; a pause and an untimed call let the other side's threads sleep."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            time.sleep(0.02)
            call()
            reset()
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
            reset()
    return seconds


def fastest(block: torch.nn.Module, case: "Case") -> str:
    """Name of the expert implementation that is the fastest in `case`; where a call takes a second, one decides."""
    call, experts = call_of(block, case.inputs, case.dy), block.experts
    choices = len(case.inputs[0]) * experts.config.num_experts_per_tok
    tried = {"grouped_mm": True, "eager": case.dy is None, "batched_mm": choices <= experts.num_experts}
    reset = partial(block.zero_grad, set_to_none=True)
    seconds: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        if not tried[name]:
            continue
        experts.config._experts_implementation = name
        if not seconds:
            call()
            reset()
        began = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - began
        reset()
        if seconds[name] < 1.0:
            seconds[name] = statistics.median(interleaved({name: call}, reset, 3)[name])
    print("   " + ", ".join(f"{name} {1e3 * took:.1f} ms" for name, took in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)


# ------------------------------------------------------------------------------------------------ a model's rows


@dataclasses.dataclass
class Case:
    """A row: `inputs` are timed together, with gradients where there is `dy`."""

    row: dict[str, object]
    inputs: list[torch.Tensor]
    dy: torch.Tensor | None


def cases_of(name: str, x: torch.Tensor, dy: torch.Tensor, only: str) -> list[Case]:
    made = []
    for what in PASSES:
        for tokens, count in TOKENS.items():
            row: dict[str, object] = {"model": name, "pass": what, "tokens": tokens}
            if only in f"{name} {what} {tokens}":
                inputs = [x[i * tokens : (i + 1) * tokens].clone() for i in range(count)]
                made.append(Case(row, inputs, dy[:tokens] if what != PASSES[0] else None))
    return made


def measure(case: Case, arms: dict[str, Call], reset: Call, rounds: int, ratio: str) -> None:
    """Write milliseconds per layer and the ratio of the first arm to the second into the case's row."""
    (mine, ours), (other, theirs) = interleaved(arms, reset, rounds).items()
    for name, seconds in ((mine, ours), (other, theirs)):
        case.row[f"{name}_ms"] = statistics.median(seconds) * 1e3 / len(case.inputs)
    case.row[ratio] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in case.row.items())
    print("   " + "   ".join(shown), flush=True)


def against_peer(
    name: str, config: PretrainedConfig, only: str, rounds: int
) -> tuple[Layer, list[Case], dict[str, float]]:
    """All cases of a model against transformers; our layer, open for gradients, and what `compare` found."""
    block = peer_layer(config)
    layer = Layer(config, "bf16", by_name(block.state_dict()).__getitem__)
    x = common_tokens(block, layer, max(tokens * count for tokens, count in TOKENS.items()))
    dy = torch.randn_like(x)
    cases = cases_of(name, x, dy, only)
    for case in cases:
        case.row["peer"] = fastest(block, case)
    block.experts.config._experts_implementation = IMPLEMENTATIONS[0]
    layer.open_bins()
    found = compare(block, layer, x[:64], dy[:64])
    for case in cases:
        block.experts.config._experts_implementation = case.row["peer"]
        arms = {"zerogap": call_of(layer, case.inputs, case.dy), "peer": call_of(block, case.inputs, case.dy)}
        measure(case, arms, partial(block.zero_grad, set_to_none=True), rounds, "zerogap_over_peer")
    return layer, cases, found


def against_bf16(layer: Layer, config: PretrainedConfig, cases: list[Case], rounds: int) -> None:
    """The same cases with our FP8 against our BF16, whose bins both fill."""
    coded = Layer(config, "fp8", lambda tensor: layer.handles[tensor].value())
    coded.open_bins(layer)
    for case in cases:
        arms = {"fp8": call_of(coded, case.inputs, case.dy), "bf16": call_of(layer, case.inputs, case.dy)}
        measure(case, arms, lambda: None, rounds, "fp8_over_bf16")
        del case.row["bf16_ms"]


def main() -> None:
    options = record.parser("a routed layer against transformers'")
    options.add_argument("--threads", type=int, default=library.num_threads())
    options.add_argument("--only", default="", help="run the rows whose `MODEL PASS TOKENS` contains this")
    options.add_argument("--record", action="store_true", help="write the result file")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    rounds, rows, differences = max(3, chosen.repeats), [], {}
    with library.use_threads(chosen.threads):
        for name, config in CONFIGS.items():
            if not any(chosen.only in f"{name} {what} {tokens}" for what in PASSES for tokens in TOKENS):
                continue
            print(f"{name}, {library.backend()}, {chosen.threads} threads, {rounds} rounds", flush=True)
            layer, cases, differences[name] = against_peer(name, config, chosen.only, rounds)
            gc.collect()
            against_bf16(layer, config, cases, rounds)
            rows += [case.row for case in cases]
            del layer, cases
            gc.collect()
            print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
        if chosen.record:
            record.write("ops_moe", rows, transformers=transformers.__version__, rounds=rounds, differences=differences)


if __name__ == "__main__":
    main()
