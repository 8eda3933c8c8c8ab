"""The vLLM adapter against a small engine with vLLM's public face; the real vLLM lives in an environment of its own."""

import types

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from zerogap.diagnose.adapters.vllm import vllm_trace
from zerogap.diagnose.adapters.vllm_worker import EXTENSION, Recorder, checkpoint_tensors
from zerogap.diagnose.graph import model_nodes
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.trace import Definition, load_trace, save_trace
from zerogap.errors import ConfigError

WIDTH, VOCABULARY = 8, 16


class Linear(torch.nn.Module):
    """A projection that has packed its weight and dropped the original, as vLLM's on CPU."""

    def __init__(self, inside, outside, seed, sizes=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.packed = [torch.randn((outside, inside), generator=generator).bfloat16()]
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
        self.input_size_per_partition, self.params_dtype = inside, torch.bfloat16
        self.quant_method = types.SimpleNamespace(apply=self.multiply)
        self.output_sizes = sizes or [outside]

    @staticmethod
    def multiply(layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.packed[0])

    def forward(self, x):
        return self.multiply(self, x), None


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 0.5).bfloat16())

    def forward(self, x, residual=None):
        if residual is None:
            return x * self.weight
        residual.add_(x)
        return residual * self.weight, residual


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return q


class Head(torch.nn.Module):
    def forward(self, lm_head, hidden):
        return torch.nn.functional.linear(hidden, lm_head.weight)


class Engine(torch.nn.Module):
    """One layer; attention sees the own row only, so that no cache is needed."""

    def __init__(self):
        super().__init__()
        part = torch.nn.Module
        self.model = part()
        self.model.embed_tokens, self.model.norm = torch.nn.Embedding(VOCABULARY + 3, WIDTH).bfloat16(), Norm()
        self.model.embed_tokens.org_vocab_size = VOCABULARY
        layer = part()
        layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn, layer.mlp = (
            Norm(),
            Norm(),
            part(),
            part(),
        )
        layer.self_attn.qkv_proj, layer.self_attn.o_proj = Linear(WIDTH, 16, 1, [8, 4, 4]), Linear(8, WIDTH, 2)
        layer.self_attn.attn = Attend()
        layer.mlp.gate_up_proj, layer.mlp.down_proj = Linear(WIDTH, 8, 3, [4, 4]), Linear(4, WIDTH, 4)
        self.model.layers = torch.nn.ModuleList([layer])
        self.lm_head, self.logits_processor = torch.nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16(), Head()

    def forward(self, input_ids, positions):
        (layer,) = self.model.layers
        residual = self.model.embed_tokens(input_ids) + positions[:, None].bfloat16()
        q, k, v = layer.self_attn.qkv_proj(layer.input_layernorm(residual))[0].split([8, 4, 4], -1)
        x, residual = layer.post_attention_layernorm(layer.self_attn.o_proj(layer.self_attn.attn(q, k, v))[0], residual)
        gate, up = layer.mlp.gate_up_proj(x)[0].chunk(2, -1)
        return self.model.norm(layer.mlp.down_proj(gate * up)[0], residual)[0]


class Params(types.SimpleNamespace):
    def clone(self):
        return Params(**vars(self))


class FakeLLM(Recorder):
    """Draws the likeliest token; `collective_rpc` calls the worker's methods as vLLM does."""

    def __init__(self, mode="raw_logprobs", extension=EXTENSION):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.engine = Engine()
        names = types.SimpleNamespace
        self.llm_engine = names(
            vllm_config=names(
                parallel_config=names(
                    worker_extension_cls=extension, world_size=1, tensor_parallel_size=1,
                    pipeline_parallel_size=1, data_parallel_size=1,
                ),
                model_config=names(
                    logprobs_mode=mode, model="folder", dtype=torch.bfloat16, enforce_eager=True,
                    hf_config=names(to_dict=lambda: {"hidden_size": WIDTH, "dtype": torch.bfloat16}),
                ),
                scheduler_config=names(max_num_seqs=4, max_num_batched_tokens=64),
                cache_config=names(cache_dtype="auto", block_size=16, enable_prefix_caching=False),
            )
        )  # fmt: skip

    def get_model(self):
        return self.engine

    def collective_rpc(self, method, args=(), kwargs=None):
        return [getattr(self, method)(*args, **(kwargs or {}))]

    @torch.no_grad()
    def generate(self, prompts, params, use_tqdm):
        return [self.serve(prompt["prompt_token_ids"], params) for prompt in prompts]

    def serve(self, prompt, params):
        entry = types.SimpleNamespace
        ids, rows, tokens, scored = list(prompt), list(prompt), [], []
        prompt_logprobs = None
        for _ in range(params.max_tokens):
            first = len(ids) - len(rows)
            hidden = self.engine(input_ids=torch.tensor(rows), positions=torch.arange(first, len(ids)))
            logits = self.engine.logits_processor(self.engine.lm_head, hidden[-1:]).float()
            if getattr(params, "prompt_logprobs", None) is not None and first == 0 and len(rows) > 1:
                logp = self.engine.logits_processor(self.engine.lm_head, hidden[:-1]).float().log_softmax(-1)
                prompt_logprobs = [None]
                prompt_logprobs += [{t: entry(logprob=float(p[t]))} for t, p in zip(prompt[1:], logp)]
            token = int(logits.argmax())
            mode = self.llm_engine.vllm_config.model_config.logprobs_mode
            logp = (logits / params.temperature if mode == "processed_logprobs" else logits).log_softmax(-1)
            scored.append({token: entry(logprob=float(logp[0, token]))})
            tokens.append(token)
            ids.append(token)
            rows = [token]
        output = entry(token_ids=tokens, logprobs=scored, finish_reason="length")
        return entry(outputs=[output], num_cached_tokens=0, prompt_logprobs=prompt_logprobs)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


def params():
    return Params(temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, seed=0, max_tokens=4)


@torch.no_grad()
def test_weights_come_under_their_checkpoint_names_though_fused_and_packed():
    engine = FakeLLM().engine
    found = dict(checkpoint_tensors(engine))
    layer, prefix = engine.model.layers[0], "model.layers.0"
    q, k, v = layer.self_attn.qkv_proj.packed[0].split([8, 4, 4])
    expected = {f"{prefix}.self_attn.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v))}
    gate, up = layer.mlp.gate_up_proj.packed[0].chunk(2)
    expected |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
    expected |= {f"{prefix}.mlp.down_proj.weight": layer.mlp.down_proj.packed[0]}
    expected |= {"model.embed_tokens.weight": engine.model.embed_tokens.weight[:VOCABULARY].detach()}
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)
    assert {"model.norm.weight", f"{prefix}.self_attn.o_proj.weight", "lm_head.weight"} <= set(found)
    assert not any("qkv" in name or "gate_up" in name for name in found)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_trace_says_what_was_drawn_and_what_its_numbers_mean(mode, tmp_path):
    llm = FakeLLM(mode)
    trace = load_trace(save_trace(vllm_trace(llm, PROMPTS, params(), rescore=False, name="engine"), tmp_path / "trace"))
    recorded = trace.recorded
    assert recorded.definition == Definition(0.7, mode == "processed_logprobs", 0, 1.0, 0.0)
    assert recorded.path == "decode" and recorded.batches == ((0,), (1,), (2,))
    assert [s.prompt_length for s in trace.sequences] == [5, 2, 3] and trace.sequences[0].hit_length == 0
    logits = recorded.boundaries["lm_head"][4:8].float() / (0.7 if mode == "processed_logprobs" else 1.0)
    drawn = torch.from_numpy(trace.sequences[0].ids[5:].astype(np.int64))
    expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    assert_same_bits(recorded.logprobs[0][5:], expected.numpy(), "log-probs")
    assert np.isnan(recorded.logprobs[0][:5]).all()
    assert trace.weights["lm_head.weight"] == sketch(llm.engine.lm_head.weight)
    assert trace.layout["tensor_parallel_size"] == 1 and trace.model["dtype"] == "bfloat16"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llm.engine.modules())


def test_boundaries_have_one_row_per_token_in_every_pass():
    llm = FakeLLM()
    trace = vllm_trace(llm, PROMPTS, params())
    decoded, again, whole, together = trace.passes
    nodes = {n.name for n in model_nodes(1, qk_norm=False)}
    assert set(decoded.boundaries) == set(whole.boundaries) == nodes
    last = np.cumsum([len(s.ids) for s in trace.sequences]) - 1
    before = np.setdiff1d(np.arange(last[-1] + 1), last)
    for name in nodes - {"lm_head", "logprob"}:
        assert decoded.boundaries[name][last].isnan().all(), "the last token is drawn, not read"
        assert not whole.boundaries[name].isnan().any()
        torch.testing.assert_close(whole.boundaries[name][before], decoded.boundaries[name][before])
    assert (whole.path, together.path, together.batches) == ("whole", "whole", ((0, 1, 2),))
    assert again.note and not again.boundaries
    for a, b in zip(decoded.logprobs, again.logprobs):
        assert_same_bits(b, a, "again")
    assert not np.isnan(whole.logprobs[0][1:]).any()


def test_an_engine_without_the_recorder_gives_log_probs_only():
    llm = FakeLLM(extension="")
    with pytest.raises(ConfigError, match="worker_extension_cls"):
        vllm_trace(llm, PROMPTS, params())
    trace = vllm_trace(llm, PROMPTS, params(), capture=False)
    assert not trace.weights and not trace.recorded.boundaries and len(trace.passes) == 4


def test_logits_are_no_log_probs():
    with pytest.raises(ConfigError, match="logprobs_mode"):
        vllm_trace(FakeLLM("raw_logits"), PROMPTS, params())
