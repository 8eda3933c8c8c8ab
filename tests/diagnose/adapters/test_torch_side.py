"""A live transformers model as a side: every path scores the same sequences, boundaries have a row per token, operators
can be replaced, and what is reported of weights and facts is the model's."""

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from tests.diagnose.adapters.models import some_sequences, tiny_model
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.side import Ask
from zerogap.diagnose.trace import Definition, load_trace, save_trace

ALL = ((0, 1, 2),)
ASKS = {
    "whole": Ask(),
    "together": Ask(batches=ALL),
    "in other order": Ask(batches=((2, 0), (1,))),
    "neighbours": Ask(batches=ALL, neighbours=([1, 2, 3] * 9, [5])),
    "decode": Ask("decode"),
    "decode together": Ask("decode", batches=ALL, neighbours=([7] * 11,)),
    "chunked": Ask("chunked", chunk=4),
    "chunked together": Ask("chunked", batches=((2, 0), (1,)), chunk=3),
    "prefix hit": Ask("prefix_hit"),
    "prefix hit together": Ask("prefix_hit", batches=ALL),
}


def by_hand(model, ids, temperature=1.0):
    """Log-probs of one sequence alone, from the model's plain forward."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].float()
    picked = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, picked)[:, 0].numpy()


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ask", ASKS)
def test_every_path_scores_the_same_sequences(ask, family, padding):
    """In FP32 a wrong row, position or mask shows as a large difference, another order of sums as a tiny one."""
    model, sequences = tiny_model(family, "sdpa", torch.float32), some_sequences()
    side = TorchSide(model, sequences, padding=padding)
    found = side.again(ASKS[ask])
    for sequence, logp in zip(sequences, found.logprobs):
        assert np.isnan(logp[0])
        np.testing.assert_allclose(logp[1:], by_hand(model, sequence.ids), atol=2e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("ask", ASKS)
def test_boundaries_have_the_rows_of_their_tokens(ask, padding):
    """Under every path, row for row: close to those of the sequences alone, and the log-probs are not disturbed."""
    asked = ASKS[ask]
    side = TorchSide(tiny_model("qwen3", "eager", torch.float32), some_sequences(), padding=padding)
    alone = side.again(Ask(capture=True))
    found = side.again(Ask(asked.path, asked.batches, asked.neighbours, asked.chunk, capture=True))
    for plain, captured in zip(side.again(asked).logprobs, found.logprobs):
        assert_same_bits(captured, plain, "log-probs with capture")
    assert set(side.nodes) <= set(found.boundaries)
    for name in side.nodes:
        torch.testing.assert_close(found.boundaries[name], alone.boundaries[name], atol=2e-4, rtol=2e-4, equal_nan=True)


def test_alone_and_whole_is_the_plain_forward_bit_for_bit():
    for attention in ("eager", "sdpa"):
        model, sequences = tiny_model("qwen3", attention), some_sequences()
        for sequence, logp in zip(sequences, TorchSide(model, sequences).again(Ask()).logprobs):
            assert_same_bits(logp[1:], by_hand(model, sequence.ids), attention)


def test_log_probs_follow_the_definition():
    model, sequences = tiny_model(dtype=torch.float32), some_sequences()
    side = TorchSide(model, sequences, definition=Definition(0.7, True))
    logp = side.trace.recorded.logprobs[0]
    np.testing.assert_allclose(logp[1:], by_hand(model, sequences[0].ids, 0.7), atol=1e-5)
    raw = side.again(Ask(definition=Definition(0.7, False)))
    np.testing.assert_allclose(raw.logprobs[0][1:], by_hand(model, sequences[0].ids), atol=1e-5)
    rows = side.again(Ask(capture=True)).boundaries["lm_head"][: len(sequences[0].ids)]
    for definition in (
        Definition(1.0, True, top_k=5),
        Definition(1.0, True, top_p=0.6),
        Definition(1.0, True, min_p=0.2),
    ):
        kept = side.again(Ask(definition=definition)).logprobs[0]
        for i in range(1, len(kept)):
            p = rows[i - 1].softmax(-1)
            order = p.argsort(descending=True)
            count = int((p[order].cumsum(0) < 0.6).sum()) + 1 if definition.top_p else 5
            inside = p >= 0.2 * p.max() if definition.min_p else torch.isin(torch.arange(len(p)), order[:count])
            token = int(sequences[0].ids[i])
            expected = torch.log(p[token] / p[inside].sum()) if inside[token] else torch.tensor(-torch.inf)
            np.testing.assert_allclose(kept[i], expected.numpy(), atol=1e-5)


ROWS = 12 + 20 + 9


@pytest.mark.parametrize("path", ["whole", "decode"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_replacing_an_operator_by_its_own_numbers_changes_nothing(family, path):
    """Each replaceable kind, computed by the model's own formulas from the inputs that the replacement is given."""
    model = tiny_model(family)
    side = TorchSide(model, some_sequences())
    plain = side.again(Ask(path))
    functions = own_operators(side)
    kinds = set(functions) - ({"rope"} if path == "decode" else set())
    for kind in sorted(kinds):
        if kind == ("activation" if family == "qwen3_moe" else "experts"):
            continue  # a routed layer has no activation of its own
        calls = []

        def counted(node, inputs, kind=kind, calls=calls):
            calls.append(node)
            assert side.nodes[node].kind == kind
            return functions[kind](node, inputs)

        replaced = side.again(Ask(path, replace={kind: counted}))
        assert calls, kind
        for a, b in zip(plain.logprobs, replaced.logprobs):
            assert_same_bits(b, a, f"{kind} replaced by itself")


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("ask", ["together", "neighbours", "decode together", "chunked together"])
def test_a_replaced_attention_reads_no_padding(ask, padding):
    """It is given each sequence's own keys only, whatever shares the pass."""
    asked = ASKS[ask]
    side = TorchSide(tiny_model("llama", "eager", torch.float32), some_sequences(), padding=padding)
    replace = {"attention": own_operators(side)["attention"]}
    found = side.again(Ask(asked.path, asked.batches, asked.neighbours, asked.chunk, replace=replace))
    for plain, logp in zip(side.again(Ask()).logprobs, found.logprobs):
        np.testing.assert_allclose(logp, plain, atol=2e-5)


def own_operators(side):
    """Every replaceable kind in the model's own arithmetic."""
    model = side.model

    def module(node):
        weights = side.nodes[node].weights
        return model.get_submodule(weights[0].removesuffix(".weight"))

    def norm(node, inputs):
        (x,) = inputs.values()
        return module(node)._plain(x.unflatten(1, (-1, len(module(node).weight)))).flatten(1)

    def linear(node, inputs):
        (x,) = inputs.values()
        return torch.nn.functional.linear(x, module(node).weight)

    def activation(node, inputs):
        gate, up = inputs.values()
        return torch.nn.functional.silu(gate) * up

    def attention(node, inputs):
        q, k, v = (t.unflatten(1, (-1, 16)).transpose(0, 1) for t in inputs.values())
        k, v = (t.repeat_interleave(2, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * 16**-0.5
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        scores = scores + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
        return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(0, 1).flatten(1)

    def rope(node, inputs):
        x, positions = inputs.values()
        x = x.unflatten(1, (-1, 16))
        cos, sin = model.model.rotary_emb(x, positions[None])
        half = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return (x * cos[0][:, None] + half * sin[0][:, None]).flatten(1)

    def experts(node, inputs):
        x, logits = inputs.values()
        block = model.model.layers[int(node.split(".")[0])].mlp
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(2)
        weights = weights / weights.sum(-1, keepdim=True) if block.gate.norm_topk_prob else weights
        return type(block.experts).forward(block.experts, x, chosen, weights.to(logits.dtype))

    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part._plain = type(part).forward.__get__(part)
    table = {"embedding": lambda node, inputs: torch.nn.functional.embedding(inputs["ids"], module(node).weight)}
    table |= {"norm": norm, "linear": linear, "head": linear, "activation": activation, "attention": attention}
    return table | {"rope": rope, "experts": experts}


@pytest.mark.parametrize("kind", ["embedding", "norm", "linear", "head", "activation", "attention", "rope", "experts"])
def test_a_replacement_reaches_the_log_probs(kind):
    side = TorchSide(tiny_model("qwen3_moe" if kind == "experts" else "llama"), some_sequences())
    functions = own_operators(side)
    replaced = side.again(Ask(replace={kind: lambda node, inputs: functions[kind](node, inputs) * 1.25}))
    assert not np.array_equal(replaced.logprobs[0][1:], side.again(Ask()).logprobs[0][1:])
    assert all(len(m._forward_hooks) + len(m._forward_pre_hooks) == 0 for m in side.model.modules())


def test_the_log_prob_itself_can_be_replaced():
    side = TorchSide(tiny_model(), some_sequences())
    seen = []

    def score(node, inputs):
        seen.append(len(inputs["ids"]))
        return torch.full((len(inputs["ids"]), 1), -2.0)

    found = side.again(Ask(replace={"logprob": score}))
    assert seen == [12, 20, 9]
    assert (found.logprobs[1][1:] == -2.0).all() and np.isnan(found.logprobs[1][0])


@pytest.mark.parametrize("ask", [Ask("speculative"), Ask(replace={"residual": lambda n, i: i[n]})], ids=str)
def test_what_hooks_cannot_do_is_refused(ask):
    assert TorchSide(tiny_model(), some_sequences()).again(ask) is None


def test_the_trace_holds_weights_facts_and_routing(tmp_path):
    model = tiny_model("qwen3_moe")
    side = TorchSide(model, some_sequences(), name="reference", source="somewhere")
    trace = load_trace(save_trace(side.trace, tmp_path / "trace"))
    assert trace.name == "reference" and trace.layout["attention"] == "eager" and trace.layout["dtype"] == "bfloat16"
    assert trace.model["num_experts_per_tok"] == 2
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert trace.weights[name]["shape"] == [32, 64]
    assert_same_bits(side.weight(name), model.model.layers[1].mlp.experts.gate_up_proj[3, 32:].detach(), name)
    assert side.weight("no.such.weight") is None
    assert "model.rotary_emb.inv_freq" in trace.buffers
    logits = trace.recorded.boundaries["1.router"][:12].float()
    order = logits.argsort(descending=True)
    experts, margins = trace.sequences[0].experts[:, 1], trace.sequences[0].margins[:, 1]
    assert np.array_equal(experts, order[:, :2].sort().values.numpy())
    p = logits.softmax(-1)
    expected = p.gather(1, order[:, 1:2]) - p.gather(1, order[:, 2:3])
    np.testing.assert_allclose(margins, expected[:, 0].numpy(), atol=1e-6)


def test_parameters_name_what_an_operator_depends_on():
    side = TorchSide(tiny_model("qwen3", "sdpa"), some_sequences())
    assert side.parameters("0.q_proj")["implementation"] == "torch.nn.functional.linear"
    assert side.parameters("0.k_norm") | {"eps": 1e-6, "num_heads": 2} == side.parameters("0.k_norm")
    assert (
        side.parameters("1.attention")["implementation"] == "sdpa" and side.parameters("1.attention")["scale"] == 0.25
    )
    assert side.parameters("1.q_rope")["theta"] == 10000.0 and side.parameters("1.k_rope")["num_heads"] == 2
    assert side.parameters("1.activation")["activation"] == "silu"
    assert side.parameters("nothing") == {}
    moe = TorchSide(tiny_model("qwen3_moe"), some_sequences())
    assert moe.parameters("0.router")["top_k"] == 2 and moe.parameters("0.experts")["num_experts"] == 8
