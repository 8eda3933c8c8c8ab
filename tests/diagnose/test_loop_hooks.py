"""Hooks in a loop shaped like TRL's, with transformers' own generate, and on a batch shaped like verl's.

The real TRL run is examples/trl_trace.py; TRL has an environment of its own.
"""

import functools
import types

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from zerogap.diagnose.adapters import loop_hooks
from zerogap.diagnose.adapters.capture import capture
from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.adapters.loop_hooks import TrlTraces, verl_traces
from zerogap.diagnose.run import diagnose
from zerogap.diagnose.side import RecordedSide
from zerogap.diagnose.trace import Definition, load_trace
from zerogap.errors import ConfigError

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [4]]
EVEN = [[5, 6, 7], [8, 9, 4], [5, 6, 7], [4, 4, 4]]  # transformers then passes no mask
PAD, END, NEW = 0, 1, 12


def tiny_model():
    config = LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=PAD, bos_token_id=None, eos_token_id=END, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).train()


def left_padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(r)) + r for r in rows])
    return ids, torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])


class Loop:
    """What TrlTraces meets in GRPOTrainer: one generation for two micro-batches, then the loss of each."""

    shows_logprobs, keeps_rollout, prompts, use_cache = True, False, PROMPTS, True

    def __init__(self, temperature=0.7):
        self.model = tiny_model()
        self.args = types.SimpleNamespace(
            temperature=temperature, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, use_vllm=False,
            bf16=False, fp16=False,
        )  # fmt: skip
        self.state = types.SimpleNamespace(global_step=0)
        self.accelerator = types.SimpleNamespace(num_processes=1, process_index=0)
        self.micro = []

    def generate(self):
        ids, mask = left_padded(self.prompts)
        settings = GenerationConfig(
            use_cache=self.use_cache,
            max_new_tokens=NEW, do_sample=True, temperature=self.args.temperature, top_k=0, pad_token_id=PAD,
            eos_token_id=END,
        )  # fmt: skip
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        self.model.train()
        answers = out[:, ids.shape[1] :]
        ended = (answers == END).int().cumsum(1)
        keep = ((ended - (answers == END).int()) == 0).int()
        order = torch.tensor([3, 0, 2, 1])  # TRL shuffles
        batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": answers * keep, "completion_mask": keep}
        batch = {name: t[order] for name, t in batch.items()}
        if self.keeps_rollout:
            batch["sampling_per_token_logps"] = torch.full(answers.shape, -0.125)
        self.micro = [{n: t[i : i + 2] for n, t in batch.items()} for i in (0, 2)]

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.micro:
            self.generate()
        return self.compute_loss(model, self.micro.pop(0), num_items_in_batch=num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        self.model(input_ids=ids, attention_mask=mask, fused=self.shows_logprobs, temperature=self.args.temperature)
        return torch.zeros(())


class FusedModel(LlamaForCausalLM):
    """A model whose scoring forward returns log-probs per token, as TRL's fused head does."""

    @functools.wraps(LlamaForCausalLM.forward)  # generate looks at the signature, as TRL knows
    def forward(self, *args, fused=False, temperature=1.0, **options):
        output = super().forward(*args, **options)
        if fused:
            scores = (output.logits[:, :-1].float() / temperature).log_softmax(-1)
            picked = scores.gather(-1, options["input_ids"][:, 1:, None])[..., 0]
            output.log_probs = torch.cat([torch.zeros(len(picked), 1), picked], 1)
        return output


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_hooks, "version", lambda name: "0")
    model = tiny_model()

    class Traced(TrlTraces, Loop):
        trace_folder, trace_steps = tmp_path / "traces", 1

    made = Traced()
    fused = FusedModel(model.config).train()
    fused.load_state_dict(model.state_dict())
    made.model = fused
    return made


def run(loop, steps=2):
    for step in range(steps):
        loop.state.global_step = step
        for _ in range(2):
            loop.training_step(loop.model, {})
    return loop.trace_folder


@pytest.mark.parametrize(("given", "use_cache"), [(PROMPTS, True), (EVEN, True), (PROMPTS, False)])
def test_both_sides_of_a_loop_are_recorded(loop, given, use_cache):
    type(loop).prompts, type(loop).use_cache = given, use_cache
    folder = run(loop)
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["step0-0-rollout", "step0-0-trainer", "step0-1-rollout", "step0-1-trainer"], "step 1 is off"
    assert not loop.model._forward_hooks
    prompts, lengths = [], []
    for call in (0, 1):
        rollout, trainer = (load_trace(folder / f"step0-{call}-{side}") for side in ("rollout", "trainer"))
        assert (rollout.recorded.path, trainer.recorded.path) == ("decode", "whole")
        assert rollout.recorded.definition == trainer.recorded.definition == Definition(0.7, True, 0, 1.0, 0.0)
        for i, (a, b) in enumerate(zip(rollout.sequences, trainer.sequences)):
            assert a.ids.tolist() == b.ids.tolist()
            assert PAD not in a.ids
            prompts.append(a.ids[: a.prompt_length].tolist())
            lengths.append(len(a.ids) - a.prompt_length)
            assert set(a.versions.tolist()) == set(b.versions.tolist()) == {0}
            with torch.no_grad():
                logits = loop.model(input_ids=torch.from_numpy(a.ids)[None].long()).logits[0]
            wanted = defined_logprobs(a.ids, logits, Definition(0.7, True))[a.prompt_length :]
            for side in (rollout, trainer):
                got = side.recorded.logprobs[i]
                assert np.isnan(got[: a.prompt_length]).all()
                np.testing.assert_allclose(got[a.prompt_length :], wanted, atol=2e-5)
    assert sorted(prompts) == sorted(given)
    assert NEW in lengths and min(lengths) < NEW, "one completion ran out of tokens, one ended early"


def test_the_trainers_positions_count_the_padding(loop):
    rollout, trainer = (load_trace(run(loop) / f"step0-0-{side}") for side in ("rollout", "trainer"))
    [first, second] = trainer.sequences  # prompts of 1 and 3 tokens: padded to 3
    assert (first.positions[0], second.positions[0]) == (2, 0)
    assert [one.positions[:2].tolist() for one in rollout.sequences] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_weights_and_boundaries_on_request(loop, use_cache):
    type(loop).use_cache = use_cache
    type(loop).trace_weights = type(loop).trace_boundaries = True
    folder, unknown = run(loop), 0
    for call in (0, 1):
        rollout, trainer = (load_trace(folder / f"step0-{call}-{side}") for side in ("rollout", "trainer"))
        assert rollout.weights == trainer.weights
        assert set(rollout.weights) == {name for name, _ in loop.model.named_parameters()}
        assert "model.rotary_emb.inv_freq" in trainer.buffers
        with capture(loop.model) as seen, torch.no_grad():
            for one in rollout.sequences:
                loop.model(input_ids=torch.from_numpy(one.ids)[None].long())
        wanted = seen.boundaries()
        for name in ("embed", "0.q_proj", "0.attention", "0.residual_mlp", "final_norm"):
            for trace in (rollout, trainer):
                rows = trace.recorded.boundaries[name]
                known = ~rows.isnan().any(1)
                bound = 0.0 if name == "embed" else 1e-5 * float(wanted[name].abs().max())  # FP32, other widths
                assert float((rows[known] - wanted[name][known]).abs().max()) <= bound
            assert not trainer.recorded.boundaries[name].isnan().any()
        assert {"0.q_rope", "0.k_rope"} <= set(trainer.recorded.boundaries) & set(rollout.recorded.boundaries)
        assert "0.residual_mlp" in trainer.recorded.meaning
        ends = np.cumsum([len(one.ids) for one in rollout.sequences]) - 1
        missing = rollout.recorded.boundaries["embed"].isnan().any(1).nonzero()[:, 0].tolist()
        assert set(missing) <= set(ends.tolist()), "only a last token may not have been read"
        unknown += len(missing)
    assert unknown, "a completion that ran out of tokens"


def test_the_diagnosis_names_the_positions_that_count_padding(loop):
    """What the TRL run shows, too: RoPE of padded prompts by other angles, both sides' bits reproduced."""
    type(loop).trace_weights = type(loop).trace_boundaries = True
    folder = run(loop)
    sides = [RecordedSide(load_trace(folder / f"step0-0-{side}")) for side in ("rollout", "trainer")]
    assert diagnose(*sides).verdict.cause.name == "rope/positions"


def test_log_probs_that_the_rollout_recorded_come_first(loop):
    type(loop).keeps_rollout = True
    rollout = load_trace(run(loop) / "step0-0-rollout")
    numbers = np.concatenate(rollout.recorded.logprobs)
    assert set(numbers[~np.isnan(numbers)].tolist()) == {-0.125}
    assert rollout.sequences[0].versions is None


def test_a_generation_that_was_not_heard_leaves_no_numbers(loop, caplog):
    loop.generate()
    rollout = load_trace(run(loop, steps=1) / "step0-0-rollout")
    assert np.isnan(np.concatenate(rollout.recorded.logprobs)).all()
    assert rollout.sequences[0].versions is None
    assert "did not hear" in caplog.text


def test_a_loss_that_shows_no_log_probs_is_refused(loop):
    type(loop).shows_logprobs = False
    with pytest.raises(ConfigError, match="log_probs"):
        run(loop)


def test_listening_changes_no_bit(loop, tmp_path):
    plain = Loop()
    plain.model = loop.model
    plain.generate()
    wanted = plain.micro
    loop._trl_listener = loop_hooks._Listener(0.7)
    hook = loop.model.register_forward_hook(loop._trl_listener, with_kwargs=True)
    loop.generate()
    hook.remove()
    assert all(torch.equal(x[n], y[n]) for x, y in zip(wanted, loop.micro) for n in x)


class Tensors(dict):
    """A TensorDict as far as the hook reads it."""


def test_verl(tmp_path):
    prompts, prompt_mask = left_padded([[5, 6, 7], [8]])
    responses = torch.tensor([[3, 4, 1, 0], [9, 9, 2, 1]])
    seen = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    tensors = Tensors(
        prompts=prompts, responses=responses, attention_mask=torch.cat([prompt_mask, seen], 1),
        response_mask=torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]), rollout_log_probs=-torch.arange(8.0).view(2, 4),
        old_log_probs=-torch.arange(8.0).view(2, 4) - 0.5,
    )  # fmt: skip
    batch = types.SimpleNamespace(batch=tensors, meta_info={"temperature": 0.9})
    rollout, trainer = (load_trace(p) for p in verl_traces(batch, tmp_path, "step7"))
    assert (tmp_path / "step7-trainer").is_dir()
    assert [s.ids.tolist() for s in rollout.sequences] == [[5, 6, 7, 3, 4, 1], [8, 9, 9, 2, 1]]
    assert trainer.sequences[1].counted.tolist() == [False, True, False, True, True]
    nan = float("nan")
    np.testing.assert_array_equal(rollout.recorded.logprobs[0], np.array([nan, nan, nan, 0, -1, -2], np.float32))
    np.testing.assert_array_equal(trainer.recorded.logprobs[1], np.array([nan, -4.5, nan, -6.5, -7.5], np.float32))
    assert trainer.recorded.definition.temperature == 0.9
    old = tensors.pop("old_log_probs")
    del tensors["rollout_log_probs"]
    rollout, again = (load_trace(p) for p in verl_traces(batch, tmp_path, "step8", old))
    np.testing.assert_array_equal(again.recorded.logprobs[1], trainer.recorded.logprobs[1])
    assert np.isnan(np.concatenate(rollout.recorded.logprobs)).all()
