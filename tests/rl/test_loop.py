"""The loop on a tiny model: what a step logs, and what every switch of the recipe does to the batch that is trained."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.bits import assert_same_bits
from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.errors import CheckpointError, ConfigError, ParityError
from zerogap.rl.dictionary import find
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.rollout_log import LoggedRollout, logged_steps, read_rollout, write_rollout
from zerogap.rl.run_folder import RunFolder
from zerogap.types import SamplingParams
from zerogap.weights import open_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def finished(base):
    return train(recipe(base, "logging.tensorboard=true", "eval.every=2"))


class Watch(Observer):
    """Keeps what the run says, and the batches that its trainer was given."""

    def __init__(self) -> None:
        self.notes, self.phases, self.started_with = [], [], None

    def started(self, facts, first_step, max_steps):
        self.started_with = (dict(facts), first_step, max_steps)

    def phase(self, step, name):
        self.phases.append((step, name))

    def note(self, text):
        self.notes.append(text)


# ---- what is written


def test_every_step_logs_the_names_users_know_and_no_mismatch(finished):
    records = lines(finished, "metrics")
    assert [r["step"] for r in records] == [1, 2, 3]
    for record in records:
        assert record["bit_wise/mismatched_tokens"] == 0 < record["bit_wise/compared_tokens"]
        assert record["bit_wise/logprob_diff/max"] == record["sampling/sampling_logp_difference/max"] == 0.0
        assert record["sampling/importance_sampling_ratio/min"] == 1.0
        names = "reward reward_std frac_reward_zero_std entropy grad_norm learning_rate step_time num_tokens loss epoch"
        assert {*names.split(), "tokens_per_second", "rewards/even_ids/mean", "time/train"} <= set(record)
    assert [r["version"] for r in records] == [1, 2, 3]
    assert finished.compared_tokens == sum(r["bit_wise/compared_tokens"] for r in records)
    assert records[1]["num_tokens"] > records[0]["num_tokens"]


def test_every_logged_name_is_in_the_dictionary(finished):
    logged = {name for kind in ("metrics", "eval") for record in lines(finished, kind) for name in record}
    assert [name for name in sorted(logged) if find(name) is None] == []


def test_held_out_rows_are_scored_before_between_and_after(finished):
    assert [r["step"] for r in lines(finished, "eval")] == [0, 2, 3]
    assert lines(finished, "eval")[0]["eval/num_prompts"] == 1.0


def test_every_held_out_completion_is_in_the_table_of_its_evaluation(base):
    words = ("eval.every=2", "eval.num_samples=3", "eval.temperature=1.0", "eval.pass_k=[1,3]")
    run = train(recipe(base, *words, name="tables"))
    figures = lines(run, "eval")
    assert sorted(path.name for path in run.folder.evaluations.iterdir()) == [f"step-{s}.jsonl" for s in (0, 2, 3)]
    for record in figures:
        table = [json.loads(line) for line in (run.folder.evaluations / f"step-{record['step']}.jsonl").open()]
        assert [(row["step"], row["prompt_number"], row["sample"]) for row in table] == [
            (record["step"], 0, sample) for sample in range(3)
        ]
        assert record["eval/mean@3"] == pytest.approx(sum(row["reward"] for row in table) / 3, abs=1e-15)
        assert record["eval/accuracy"] == sum(row["correct"] for row in table) / 3
        assert record["eval/completions/mean_length"] == sum(row["length"] for row in table) / 3
        assert record["eval/completions/clipped_ratio"] == sum(r["finish_reason"] == "length" for r in table) / 3
        assert {"eval/maj@3", "eval/pass@1", "eval/pass@3"} <= set(record)
        assert len({row["completion"] for row in table}) > 1, "one seed, and completions that differ"
        assert table[0]["answer"] == "six"
    run.folder.begin(run.config, 2)
    assert sorted(path.name for path in run.folder.evaluations.iterdir()) == ["step-0.jsonl", "step-2.jsonl"]


def test_the_run_folder_holds_recipe_model_report_and_events(finished):
    folder = finished.folder
    assert folder.config() == finished.config
    saved = dict(open_model(folder.model).tensors())
    for name, handle in finished.decoder.weights.items():
        assert_same_bits(saved[name], handle.value(), name)
    assert "say " in folder.report.read_text()
    assert list(folder.tensorboard.glob("events*"))
    assert sorted(folder.saved_versions()) == [0, 2]
    assert not list(folder.path.rglob("*.partial*"))


def test_completions_come_from_different_prompts_first(finished):
    shown = [r for r in lines(finished, "completions") if r["step"] == 1]
    assert len(shown) == finished.config.logging.completions == 4
    assert len({r["prompt"][0]["content"] for r in shown}) == 3
    assert {"completion", "answer", "reward", "finish_reason", "length"} <= set(shown[0])


def test_tokens_and_log_probs_of_shown_completions_are_those_of_the_rollout(finished):
    rollout = read_rollout(finished.folder.rollouts, 1)
    of_rollout = {s.logprobs.tobytes(): s for s in rollout.samples}
    for record in [r for r in lines(finished, "completions") if r["step"] == 1]:
        logprobs = np.array(record["logprobs"], np.float32)
        sample = of_rollout[logprobs.tobytes()]  # every bit came through the file
        assert record["length"] == len(sample.completion_ids) == len(record["tokens"])
        assert "".join(record["tokens"]) == finished.tokenizer.decode(sample.completion_ids)


def test_a_step_says_how_much_memory_the_process_holds(finished):
    for record in lines(finished, "metrics"):
        assert 0.05 < record["memory/resident"] <= record["memory/peak"] < 64


def test_a_logged_rollout_reads_back_bit_by_bit(finished, tmp_path):
    assert logged_steps(finished.folder.rollouts) == [1, 2, 3]
    logged = read_rollout(finished.folder.rollouts, 2)
    filtered = dataclasses.replace(
        logged.samples[1],
        params=SamplingParams(top_k=3, stop=("a", "b"), stop_token_ids=(7, 9)),
        kept_counts=np.full(len(logged.samples[1].completion_ids), 3, np.int32),
        kept_digests=np.full(len(logged.samples[1].completion_ids), 2**64 - 1, np.uint64),
    )
    rollout = LoggedRollout(7, (logged.samples[0], filtered, logged.samples[2]), (1.0, None, 0.5), (0.1, 0.0, -0.1))
    write_rollout(tmp_path, rollout)
    again = read_rollout(tmp_path, 7)
    assert (again.step, again.rewards, again.advantages) == (7, rollout.rewards, rollout.advantages)
    for ours, theirs in zip(again.samples, rollout.samples, strict=True):
        for field in dataclasses.fields(theirs):
            value, expected = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(expected, np.ndarray):
                assert_same_bits(value, expected, field.name)
            else:
                assert value == expected, field.name


def test_a_damaged_rollout_is_named(finished, tmp_path):
    write_rollout(tmp_path, read_rollout(finished.folder.rollouts, 1))
    arrays = load_file(tmp_path / "step-1.safetensors")
    save_file({**arrays, "logprobs": arrays["logprobs"][:-1]}, tmp_path / "step-1.safetensors")
    with pytest.raises(CheckpointError, match=r"step-1\.json: not a whole rollout"):
        read_rollout(tmp_path, 1)
    (tmp_path / "step-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-1\.json: not a whole rollout"):
        read_rollout(tmp_path, 1)


def test_facts_name_contract_identity_and_what_is_trained(base):
    watch = Watch()
    run = train(recipe(base, "optimizer.max_steps=1", "trainable=last:1", name="facts"), observer=watch)
    facts, first, last = watch.started_with
    assert (first, last) == (1, 1)
    assert run.decoder.numerics.fingerprint() in facts["numerics"]
    assert str(run.decoder.identity) in facts["identity"]
    assert "of 20 tensors" in facts["trainable"]
    assert "kv_split 1024" in facts["contract"]


# ---- a step


def test_keys_and_rows_are_a_function_of_the_step(finished):
    for step in (1, 2):
        samples = read_rollout(finished.folder.rollouts, step).samples
        assert [(s.key.step, s.key.prompt, s.key.sample) for s in samples] == [
            (step, p, n) for p in range(3) for n in range(4)
        ]
        assert {s.key.seed for s in samples} == {5}
        rows = finished.order.take(3 * (step - 1), 3)
        assert [s.prompt_ids.tolist() for s in samples[::4]] == [finished.prompts[r].ids.tolist() for r in rows]
        assert {int(v) for s in samples for v in s.versions} == {step - 1}


def test_two_runs_of_one_recipe_are_equal_and_another_seed_differs(base, finished):
    again = train(recipe(base, "eval.every=2", name="again"))
    assert without_times(lines(again, "metrics")) == without_times(lines(finished, "metrics"))
    assert again.decoder.digests() == finished.decoder.digests()
    other = train(recipe(base, "eval.every=2", "seed=6", name="other"))
    assert other.decoder.digests() != finished.decoder.digests()


@pytest.mark.parametrize(
    "change",
    [
        "rollout.page_size=64",
        "rollout.max_sequences=3",
        "rollout.prefix_cache=false",
        "optimizer.micro_batch_tokens=1024",
        "optimizer.activation_recompute=true",
    ],
)
def test_settings_that_change_no_bit(base, finished, change):
    run = train(recipe(base, "eval.every=2", change, name="other-batching"))
    assert run.decoder.digests() == finished.decoder.digests()


def test_several_updates_compare_bits_on_the_first_one_only(base, finished):
    run = train(recipe(base, "algorithm.num_iterations=3", "optimizer.max_steps=2", name="updates"))
    records = lines(run, "metrics")
    assert [r["version"] for r in records] == [3, 6]
    assert [r["bit_wise/mismatched_tokens"] for r in records] == [0, 0]
    drawn = [sum(len(s.completion_ids) for s in read_rollout(run.folder.rollouts, step).samples) for step in (1, 2)]
    assert [r["bit_wise/compared_tokens"] for r in records] == drawn
    assert records[0]["clip_ratio/region_mean"] > 0.0  # the later updates are off the rollout's policy
    assert sorted(run.folder.saved_versions()) == [0, 3]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_stays_what_it_was(base, estimator):
    settings = (f"algorithm.kl_estimator={estimator}", "algorithm.beta=0.1", "optimizer.learning_rate=3e-3")
    run = train(recipe(base, *settings, name="kl"))
    first, *later = (r["kl"] for r in lines(run, "metrics"))
    assert first == 0.0  # reference and policy are one model at the first step, to the bit
    assert all(kl != 0.0 for kl in later)
    assert run.reference.decoder.digests() != run.decoder.digests()
    source = dict(open_model(run.config.model).tensors())
    assert_same_bits(run.reference.decoder.weights["model.norm.weight"].value(), source["model.norm.weight"])


@pytest.mark.parametrize("sides", [(), ("rollout.numerics=fp8-kv",)])
def test_a_kl_in_the_reward_changes_advantages_token_by_token(base, sides):
    settings = ("algorithm.name=reinforce_pp", "optimizer.learning_rate=3e-3", *sides)
    watch = Watch()
    run = train(recipe(base, *settings, "algorithm.beta=0.5", name="kl-in-reward"), observer=watch)
    plain = train(recipe(base, *settings, name="no-kl"))
    with_kl, without = (read_rollout(r.folder.rollouts, 2).advantages for r in (run, plain))
    first, second, _ = (r["kl"] for r in lines(run, "metrics"))
    assert first == 0.0 != second
    assert read_rollout(run.folder.rollouts, 1).advantages == read_rollout(plain.folder.rollouts, 1).advantages
    assert with_kl != without
    assert run.decoder.digests() != plain.decoder.digests()
    assert watch.started_with[0]["algorithm"] == (
        "reinforce_pp: loss_type dapo, baseline none, scale_rewards whiten, kl_in_reward True, kl_estimator k1"
    )


def test_groups_of_one_train_where_no_group_is_compared(base):
    run = train(recipe(base, "algorithm.name=reinforce_pp", "rollout.num_generations=1", name="ones"))
    assert [(r["bit_wise/mismatched_tokens"], r["grad_norm"] > 0) for r in lines(run, "metrics")] == [(0, True)] * 3


def test_truncated_completions_can_be_left_out(base, finished):
    run = train(recipe(base, "algorithm.mask_truncated_completions=true", "optimizer.max_steps=1", name="masked"))
    assert run.decoder.digests() != finished.decoder.digests()
    everything = "rollout.max_completion_length=1"
    run = Run(recipe(base, everything, "algorithm.mask_truncated_completions=true", name="all-masked"), "never")
    before = run.decoder.digests()
    assert run.train()
    records = lines(run, "metrics")
    assert [r["completions/clipped_ratio"] for r in records] == [1.0] * 3
    assert [(r["loss"], r["grad_norm"]) for r in records] == [(0.0, 0.0)] * 3
    assert run.decoder.digests() == before
    assert all(r["bit_wise/compared_tokens"] > 0 == r["bit_wise/mismatched_tokens"] for r in records)


def test_filters_temperature_and_missing_rewards(base):
    settings = ("rollout.temperature=0.7", "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.01")
    functions = f"reward.functions=[{base}/reward.py:even_ids, {base}/reward.py:sometimes]"
    run = train(recipe(base, *settings, functions, "reward.weights=[1.0, 0.5]", name="filters"))
    records = lines(run, "metrics")
    assert [r["bit_wise/mismatched_tokens"] for r in records] == [0, 0, 0]
    assert "rewards/sometimes/mean" in records[0]
    kept = np.concatenate([s.kept_counts for s in read_rollout(run.folder.rollouts, 3).samples])
    assert 1 <= kept.min() < kept.max() <= 20


# ---- the parity policy


def _flip_one(run):
    """The run's engine from now on returns one log-prob with its lowest bit flipped."""
    real = run.engine.generate

    def generate(*args, **kwargs):
        samples = real(*args, **kwargs)
        if kwargs.get("num_samples", 1) > 1:
            samples[5].logprobs.view(np.int32)[1] ^= 1
        return samples

    run.engine.generate = generate


def test_one_flipped_bit_aborts_before_the_update(base):
    run = Run(recipe(base, name="abort"), "never")
    _flip_one(run)
    before = run.decoder.digests()
    with pytest.raises(ParityError, match="sample 5, completion position 1"):
        run.train()
    assert run.decoder.digests() == before
    assert run.step == 0
    (error,) = lines(run, "errors")
    assert error["step"] == 1
    assert "ParityError" in error["error"]
    assert logged_steps(run.folder.rollouts) == [1]  # what was drawn is there to be looked at


def test_one_flipped_bit_is_counted_where_the_policy_is_to_warn(base):
    watch = Watch()
    run = Run(recipe(base, "parity.on_mismatch=warn", "optimizer.max_steps=2", name="warn"), "never", watch)
    _flip_one(run)
    assert run.train()
    assert [r["bit_wise/mismatched_tokens"] for r in lines(run, "metrics")] == [1, 1]
    assert lines(run, "metrics")[0]["bit_wise/logprob_diff/max"] > 0
    assert run.mismatched_tokens == 2
    assert "step 1: 1 of" in watch.notes[0]


# ---- refused before work starts


def test_what_cannot_be_honoured_raises_before_the_weights_are_read(base, monkeypatch):
    monkeypatch.setattr("zerogap.rl.setup.load_decoder", lambda *_: pytest.fail("the weights were read"))
    (base / "needs.py").write_text("def f(completions, colour): return [0.0] * len(completions)\n")
    with pytest.raises(ConfigError, match="colour"):
        Run(recipe(base, f"reward.functions={base}/needs.py:f", name="refused"), "never")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length = 3: raise it"):
        Run(recipe(base, "data.max_prompt_length=3", name="refused"), "never")
    assert not (base / "refused").exists()


def test_a_run_longer_than_the_models_positions_is_refused(base):
    with pytest.raises(ConfigError, match=r"exceeds the model's 1024 positions"):
        Run(recipe(base, "data.max_prompt_length=1020", name="refused"), "never")


# ---- stopping


class StopAt(Observer):
    """Asks the run to stop in a phase of a step."""

    def __init__(self, step, phase):
        self.at, self.run = (step, phase), None

    def phase(self, step, name):
        if (step, name) == self.at:
            self.run.ask_to_stop()


@pytest.mark.parametrize(("phase", "done"), [("rollout", 1), ("train", 2), ("reward", 2)])
def test_asked_to_stop_it_saves_a_checkpoint_and_resumes_bit_by_bit(base, finished, phase, done):
    watch = StopAt(2, phase)
    config = recipe(base, "eval.every=2", name=f"stopped-{phase}")
    watch.run = Run(config, "never", watch)
    assert not watch.run.train()
    assert watch.run.step == done
    assert [r["step"] for r in lines(watch.run, "metrics")] == list(range(1, done + 1))
    resumed = Run(config, "auto")
    assert resumed.step == done
    assert resumed.train()
    assert resumed.decoder.digests() == finished.decoder.digests()
    assert without_times(lines(resumed, "metrics")) == without_times(lines(finished, "metrics"))
    assert without_times(lines(resumed, "eval")) == without_times(lines(finished, "eval"))
    assert lines(resumed, "completions") == lines(finished, "completions")


def test_a_finished_run_is_not_run_again_unless_asked(base, finished):
    config = recipe(base, "eval.every=2")
    with pytest.raises(ConfigError, match="the run there is finished"):
        Run(config, "auto")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Run(config, str(base))


def test_another_recipe_does_not_continue_a_run(base):
    config = recipe(base, "checkpoint.every=1", "optimizer.max_steps=1", name="longer")
    train(config)
    longer = recipe(base, "checkpoint.every=1", "optimizer.max_steps=2", "rollout.page_size=64", name="longer")
    assert Run(longer, "auto").train()
    changed = recipe(base, "checkpoint.every=1", "optimizer.max_steps=3", "rollout.temperature=0.5", name="longer")
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0\.5: .* was made with 1\.0"):
        Run(changed, "auto")
    linear = [*("checkpoint.every=1", "optimizer.lr_scheduler_type=linear")]
    train(recipe(base, *linear, "optimizer.max_steps=1", name="linear"))
    with pytest.raises(ConfigError, match=r"optimizer\.max_steps = 2"):
        Run(recipe(base, *linear, "optimizer.max_steps=2", name="linear"), "auto")


def test_beginning_anew_leaves_nothing_of_the_old_run(base, finished):
    copy = base / "copy"
    shutil.copytree(finished.folder.path, copy)
    (copy / "notes.txt").write_text("mine")
    folder = RunFolder(copy)
    folder.begin(finished.config, 0)
    assert sorted(p.name for p in copy.iterdir()) == ["config.yaml", "notes.txt"]


def test_lines_keep_what_was_whole_when_the_process_died(base, finished):
    copy = base / "cut"
    shutil.copytree(finished.folder.path, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    RunFolder(copy).begin(finished.config, 2)
    steps = [json.loads(line)["step"] for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert logged_steps(copy / "rollouts") == [1, 2]
    assert [json.loads(line)["step"] for line in (copy / "eval.jsonl").read_text().splitlines()] == [0, 2]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append("metrics", {"step": 1, "a": float("nan"), "b": [float("inf"), 1.5], "c": np.float32(2.0)})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": [None, 1.5], "c": 2.0}
