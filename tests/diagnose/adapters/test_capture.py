"""Capture by hooks: every operator's rows, the same bits with and without, nothing left behind."""

import collections

import numpy as np
import pytest
import torch
import torch.distributed.device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

import zerogap as zg
from tests.bits import assert_same_bits
from tests.diagnose.adapters.models import some_sequences, tiny_model
from zerogap.diagnose.adapters.capture import plain_name, watch_attention
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.graph import model_nodes
from zerogap.diagnose.trace import load_trace, save_trace
from zerogap.errors import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe")


def hooks_of(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def batch(padding="right"):
    ids = torch.randint(0, 256, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 4, 7)):
        columns = slice(10 - missing, 10) if padding == "right" else slice(0, missing)
        mask[row, columns] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_capture_sees_every_node_and_changes_no_bit(family, attention, dtype):
    model, given = tiny_model(family, attention, dtype), batch()
    before = model(**given).logits
    with zg.capture(model, rope=True) as seen:
        inside = model(**given).logits
    after = model(**given).logits
    assert_same_bits(inside, before, "with hooks")
    assert_same_bits(after, before, "after them")
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == attention
    moe = frozenset({0, 1} if family == "qwen3_moe" else ())
    expected = {n.name for n in model_nodes(2, qk_norm=family != "llama", moe_layers=moe)} - {"logprob"}
    rows = seen.boundaries()
    assert expected <= set(rows)
    assert {len(tensor) for tensor in rows.values()} == {10 + 6 + 3}
    assert_same_bits(rows["lm_head"], before[given["attention_mask"] != 0], "logits")


@torch.no_grad()
def test_what_no_module_returns_is_what_the_next_one_reads():
    """Each derived boundary against its formula over the recorded inputs, in plain torch."""
    model, given = tiny_model("qwen3"), batch("left")
    with zg.capture(model, rope=True) as seen:
        model(**given)
    rows = seen.boundaries()
    layer = model.model.layers[1]
    assert_same_bits(rows["0.residual_attention"], rows["embed"] + rows["0.o_proj"], "residual after attention")
    assert_same_bits(rows["0.residual_mlp"], rows["0.residual_attention"] + rows["0.down_proj"], "after the MLP")
    assert_same_bits(rows["1.input_norm"], layer.input_layernorm(rows["0.residual_mlp"]), "norm")
    activation = layer.mlp.act_fn(rows["1.gate_proj"]) * rows["1.up_proj"]
    assert_same_bits(rows["1.activation"], activation, "activation")
    assert_same_bits(rows["1.residual_mlp"], rows["1.residual_attention"] + rows["1.down_proj"], "last residual")
    assert_same_bits(rows["final_norm"], model.model.norm(rows["1.residual_mlp"]), "final norm")
    heads = layer.self_attn.q_norm(rows["1.q_proj"].unflatten(1, (4, 16))).flatten(1)
    assert_same_bits(rows["1.q_norm"], heads, "head norm")


@torch.no_grad()
def test_the_models_own_attention_function_runs(monkeypatch):
    """The recorded attention calls what the model itself would have called, whichever that is."""
    import transformers

    calls = []

    def own(module, query, key, value, attention_mask, **settings):
        calls.append(module.layer_idx)
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register("zeros_for_a_test", own)
    model = tiny_model()
    model.set_attn_implementation("zeros_for_a_test")
    with zg.capture(model, rope=True) as seen:
        model(**batch())
    assert calls == [0, 1]
    assert not seen.boundaries()["0.attention"].any() and seen.boundaries()["0.q_rope"].any()
    assert model.config._attn_implementation == "zeros_for_a_test"


@torch.no_grad()
def test_queries_and_keys_can_be_changed_on_the_way():
    model, given = tiny_model(), batch()
    before = model(**given).logits
    with watch_attention(model, lambda module, q, k, v: None):
        assert_same_bits(model(**given).logits, before, "only watched")
    with watch_attention(model, lambda module, q, k, v: (q * 0, k, v)) as works:
        assert works
        assert not torch.equal(model(**given).logits, before)


class Wrapper(torch.nn.Module):
    """What FSDP does to names: the module inside under `_fsdp_wrapped_module`."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


@torch.no_grad()
def test_wrapped_modules_have_the_same_boundaries():
    model, given = tiny_model("qwen3"), batch()
    with zg.capture(model) as plain:
        model(**given)
    for layer in range(2):
        model.model.layers[layer] = Wrapper(model.model.layers[layer])
    wrapped = Wrapper(model)
    with zg.capture(wrapped) as seen:
        wrapped(**given)
    expected, found = plain.boundaries(), seen.boundaries()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)
    assert plain_name("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp") == "model.layers.1.mlp"


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@torch.no_grad()
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.filterwarnings("ignore:FSDP")
def test_fsdp_modules_have_the_same_boundaries_and_weights(version, one_process):
    given = batch()
    plain, model = (tiny_model("qwen3", dtype=torch.float32) for _ in range(2))
    if version == 2:
        for layer in model.model.layers:
            fully_shard(layer, mesh=one_process)
        fully_shard(model, mesh=one_process)
    else:
        settings = {"use_orig_params": True, "device_id": torch.device("cpu")}
        for place, layer in enumerate(model.model.layers):
            model.model.layers[place] = FullyShardedDataParallel(layer, **settings)
        model = FullyShardedDataParallel(model, **settings)
    with zg.capture(plain, rope=True) as expected:
        plain(**given)
    with zg.capture(model, rope=True) as seen:
        model(**given)
    rows = seen.boundaries()
    assert set(rows) == set(expected.boundaries())
    for name, tensor in expected.boundaries().items():
        assert_same_bits(rows[name], tensor, name)
    traces = [TorchSide(m, some_sequences()).trace for m in (plain, model)]
    assert traces[0].weights and traces[0].weights == traces[1].weights


def test_recomputation_in_the_backward_pass_is_not_recorded():
    model, given = tiny_model(dtype=torch.float32), batch()
    layer = model.model.layers[1]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    with zg.capture(model) as seen:
        model(**given).logits.sum().backward()
    assert len(seen.forwards) == 1
    assert len(seen.boundaries()["1.down_proj"]) == 19


@torch.no_grad()
def test_only_what_is_kept_is_copied():
    model = tiny_model()
    with zg.capture(model, keep=lambda name: name.endswith(".o_proj")) as seen:
        model(**batch())
    assert sorted(seen.boundaries()) == ["0.o_proj", "1.o_proj"]


@torch.no_grad()
def test_a_trace_of_a_captured_pass_survives_the_disk(tmp_path):
    model, given = tiny_model(), batch()
    with zg.capture(model) as seen:
        logits = model(**given).logits
    trace = seen.trace("trainer", [4, 3, 1])
    found = load_trace(save_trace(trace, tmp_path / "trace"))
    assert [len(s.ids) for s in found.sequences] == [10, 6, 3]
    ids = given["input_ids"][0]
    expected = logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert_same_bits(found.recorded.logprobs[0][1:], expected.numpy(), "log-probs")
    assert np.isnan(found.recorded.logprobs[0][0])
    assert found.recorded.definition.processed is False
    with pytest.raises(ConfigError, match="prompt_lengths"):
        seen.trace("trainer", [4])


@torch.no_grad()
def test_packed_sequences_are_told_apart_by_positions():
    model = tiny_model()
    ids = torch.arange(9)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with zg.capture(model) as seen:
        model(input_ids=ids, position_ids=positions)
    trace = seen.trace("packed", [1, 1])
    assert [s.ids.tolist() for s in trace.sequences] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]


class Fused(torch.nn.Module):
    """An engine's shape: flat rows, fused projections, norms that add and return the residual."""

    class Linear(torch.nn.Module):
        def __init__(self, inside, outside, sizes=None):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(outside, inside, generator=torch.Generator().manual_seed(0)))
            self.output_sizes = sizes

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight), None

    class Norm(torch.nn.Module):
        def forward(self, x, residual=None):
            if residual is None:
                return x * 2
            residual.add_(x)  # in place, as engines do
            return residual * 2, residual

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return q + 1

    def __init__(self):
        super().__init__()
        part = torch.nn.Module
        self.model = part()
        self.model.embed_tokens, self.model.norm = torch.nn.Embedding(16, 8), self.Norm()
        layer = part()
        layer.input_layernorm, layer.post_attention_layernorm = self.Norm(), self.Norm()
        layer.self_attn, layer.mlp = part(), part()
        layer.self_attn.qkv_proj = self.Linear(8, 16, [8, 4, 4])
        layer.self_attn.attn, layer.self_attn.o_proj = self.Attend(), self.Linear(8, 8)
        layer.mlp.gate_up_proj, layer.mlp.down_proj = self.Linear(8, 8, [4, 4]), self.Linear(4, 8)
        self.model.layers = torch.nn.ModuleList([layer])

    def forward(self, input_ids, positions):
        (layer,) = self.model.layers
        residual = self.model.embed_tokens(input_ids)
        q, k, v = layer.self_attn.qkv_proj(layer.input_layernorm(residual))[0].split([8, 4, 4], -1)
        x, residual = layer.post_attention_layernorm(
            layer.self_attn.o_proj(layer.self_attn.attn(q * 3, k * 3, v))[0], residual
        )
        gate, up = layer.mlp.gate_up_proj(x)[0].chunk(2, -1)
        return self.model.norm(layer.mlp.down_proj(gate * up)[0], residual)[0]


@torch.no_grad()
def test_an_engines_fused_modules_are_taken_apart():
    model = Fused()
    with zg.capture(model) as seen:
        model(input_ids=torch.arange(5), positions=torch.arange(5))
    rows = seen.boundaries()
    nodes = {n.name for n in model_nodes(1, qk_norm=False)} - {"lm_head", "logprob"}
    assert set(rows) == nodes
    assert_same_bits(rows["0.q_rope"], rows["0.q_proj"] * 3, "after RoPE")
    assert_same_bits(rows["0.attention"], rows["0.q_rope"] + 1, "attention")
    assert_same_bits(rows["0.activation"], rows["0.gate_proj"] * rows["0.up_proj"], "activation")
    assert_same_bits(rows["0.residual_attention"], rows["embed"] + rows["0.o_proj"], "copied before it is written to")
    assert_same_bits(rows["0.residual_mlp"], rows["0.residual_attention"] + rows["0.down_proj"], "residual")
    assert seen.forwards[0].positions.tolist() == [[0, 1, 2, 3, 4]]


class OwnLayer(torch.nn.Module):
    """Linear attention of no use, and a gated MLP, under spellings of the reader's own."""

    def __init__(self, spelled):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
        self.attention, self.feed_forward = torch.nn.Module(), torch.nn.Module()
        for name in ("q", "k", "v", "out"):
            self.attention.register_module(name, torch.nn.Linear(8, 8))
        for name in spelled:
            self.feed_forward.register_module(name, torch.nn.Linear(8, 8))
        self.spelled = spelled

    def forward(self, x):
        normed = self.norm1(x)
        own = self.attention
        x = x + own.out(own.q(normed) + own.k(normed) + own.v(normed))
        gate, up, down = (getattr(self.feed_forward, name) for name in self.spelled)
        return x + down(gate(self.norm2(x)) * up(self.norm2(x)))


class OwnModel(torch.nn.Module):
    def __init__(self, spelled=("w1", "w3", "w2")):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.layers = torch.nn.ModuleList(OwnLayer(spelled) for _ in range(2))
        self.ln_f, self.head = torch.nn.RMSNorm(8), torch.nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln_f(x))


@torch.no_grad()
@pytest.mark.parametrize("spelled", [("w1", "w3", "w2"), ("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj")])
def test_usual_spellings_are_known(spelled):
    model = OwnModel(spelled)
    with zg.capture(model) as seen:
        model(torch.tensor([1, 2, 3]))
        model(torch.tensor([4, 5]))
    known = {n.name for n in model_nodes(2, qk_norm=False)}
    unseen = {f"{i}.{part}_rope" for i in (0, 1) for part in "qk"} | {"logprob"}
    assert set(seen.boundaries()) == known - unseen
    assert seen.unrecognised == () and seen.note() == ""
    made = seen.trace("own", [1, 1])
    assert [len(s.ids) for s in made.sequences] == [3, 2]
    assert_same_bits(
        made.recorded.boundaries["0.q_proj"][:3],
        model.layers[0].attention.q(model.layers[0].norm1(model.embedding(torch.tensor([1, 2, 3])))),
        "rows of the first pass",
    )


@torch.no_grad()
def test_unknown_spellings_are_noted_and_can_be_named():
    parts = {"start": torch.nn.Embedding(20, 8), "norm": torch.nn.Identity(), "heights": torch.nn.Linear(8, 20)}
    model = torch.nn.Sequential(collections.OrderedDict(parts))
    with zg.capture(model) as seen:
        model(torch.tensor([1, 2, 3]))
    assert set(seen.unrecognised) == {"start", "heights"}
    with pytest.warns(UserWarning, match="start, heights"):
        made = seen.trace("own", [1], logprobs=[np.zeros(3, np.float32)])
    assert "start" in made.recorded.note and not made.recorded.meaning
    with zg.capture(model, names={"start": "embed", "(h)eights": r"lm_\1ead"}) as seen:
        model(torch.tensor([1, 2, 3]))
    assert set(seen.boundaries()) == {"embed", "final_norm", "lm_head"} and seen.unrecognised == ()
