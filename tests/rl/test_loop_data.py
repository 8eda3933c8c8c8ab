"""Data and rewards on their way through a run: mixtures, what is told, what is let pass and what ends a run."""

import json
import zlib

import pytest

from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.errors import ConfigError
from zerogap.rl.dictionary import find
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.reward_values import RewardError
from zerogap.rl.rollout_log import read_rollout
from zerogap.train.checkpoint import list_checkpoints

REWARDS = """
import time, zlib


def of_row(prompts, answer, **columns):
    print("scored", len(prompts))
    return [zlib.crc32(repr((p[-1]["content"], a)).encode()) / 2**32 for p, a in zip(prompts, answer)]


def breaks_in_step_2(completions, trainer_state):
    if trainer_state.global_step == 2:
        raise RuntimeError("no more")
    return [float(len(c[0]["content"])) for c in completions]


def hangs_in_step_2(completions, trainer_state):
    if trainer_state.global_step == 2:
        time.sleep(1000)
    return [float(len(c[0]["content"])) for c in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) + len(ground_truth), "acc": solution_str == ground_truth}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    recipe(folder)
    (folder / "r.py").write_text(REWARDS)
    rows = [{"question": f"add {i}", "label": f"{i}"} for i in range(4)]
    (folder / "more.json").write_text(json.dumps(rows))
    return folder


class Notes(Observer):
    def __init__(self):
        self.facts, self.notes = {}, []

    def started(self, facts, first_step, max_steps):
        self.facts = dict(facts)

    def note(self, text):
        self.notes.append(text)


def mixture(base, *more, name):
    sources = f"[{{path: {base}/train.jsonl, weight: 2}}, {{path: {base}/more.json, system: Be kind.}}]"
    settings = (f"data.train={sources}", f"reward.functions={base}/r.py:of_row", "optimizer.max_steps=4")
    return recipe(base, *settings, *more, name=name)


def test_rows_of_several_data_sets_are_mixed_scored_and_told(base):
    watch = Notes()
    run = train(mixture(base, name="mixed"), observer=watch)
    sources = []
    for step in range(1, 5):
        logged = read_rollout(run.folder.rollouts, step)
        chosen = run.order.take(3 * (step - 1), 3)
        for i, (sample, reward) in enumerate(zip(logged.samples, logged.rewards, strict=True)):
            row = run.prompts[chosen[i // 4]].row
            prompt, answer = row.prompt[-1]["content"], row.columns["answer"]
            assert prompt in run.tokenizer.decode(sample.prompt_ids)
            assert reward == zlib.crc32(repr((prompt, answer)).encode()) / 2**32
            assert (row.prompt[0] == {"role": "system", "content": "Be kind."}) == row.source.endswith("more.json")
        sources += [run.prompts[i].row.part for i in chosen]
        assert sorted(sources[-3:]) == [0, 0, 1], "two of one and one of the other in every step"
    told = watch.facts["data"].splitlines()
    assert f"{base}/train.jsonl: 5 rows" in told and f"{base}/more.json: 4 rows" in told
    assert any(line.startswith("mixed by weight: 66.7%") for line in told)
    assert any(line.startswith("tokens of prompts: ") for line in told)
    assert any(line.startswith("tokens of held-out prompts: ") for line in told)
    assert (run.folder.path / "rewards.log").read_text().startswith("=== step 0\n--- of_row\nscored 1\n")
    record = lines(run, "metrics")[1]
    assert all(find(name) is not None for name in record if name not in ("step", "version"))
    parts = [record[name] for name in record if name.startswith("reward/")]
    assert len(parts) == 2 and record["reward"] == pytest.approx((2 * parts[0] + parts[1]) / 3, rel=1e-12)


def test_a_mixture_resumes_bit_by_bit(base):
    whole = train(mixture(base, "checkpoint.every=1", "checkpoint.keep=4", name="whole"))
    (checkpoint,) = [path for path in list_checkpoints(whole.folder.checkpoints) if path.name.endswith("2")]
    again = Run(mixture(base, "checkpoint.every=1", name="again"), str(checkpoint))
    assert again.train()
    assert again.decoder.digests() == whole.decoder.digests()
    assert without_times(lines(again, "metrics")) == without_times(lines(whole, "metrics")[2:])


def test_a_data_set_that_changed_is_not_resumed_on(base):
    rows = [{"prompt": f"say {i}", "answer": f"{i}"} for i in range(4)]
    path = base / "changes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"data.train={path}", "data.eval=null", "checkpoint.every=1")
    train(recipe(base, *settings, "optimizer.max_steps=1", name="changes"))
    before = path.read_text()
    for changed in (before.replace('"3"', '"4"'), before.replace("say 3", "say 5"), before.rpartition("{")[0]):
        assert changed != before
        path.write_text(changed)
        with pytest.raises(ConfigError, match=r"data\.train = .* the rows are others than when .*checkpoint-1 was"):
            Run(recipe(base, *settings, name="changes"), "auto")
    path.write_text(before)
    assert Run(recipe(base, *settings, name="changes"), "auto").step == 1


@pytest.mark.parametrize(("extra", "left_out"), [(0, 0), (-1, 1)])
def test_a_prompt_too_long_by_one_token_is_left_out_and_counted(base, extra, left_out):
    rows = [{"prompt": "short", "answer": "1"}, {"prompt": "just as long", "answer": "2"}]
    (base / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"data.train={base}/long.jsonl", "data.eval=null")
    longest = max(len(prompt.ids) for prompt in Run(recipe(base, *settings, name="lengths"), "never").prompts)
    run = Run(recipe(base, *settings, f"data.max_prompt_length={longest + extra}", name="lengths"), "never")
    assert len(run.prompts) == 2 - left_out
    notes = [line for line in run._data_summary if "left out" in line]
    assert notes == [f"1 prompts are longer than {longest - 1} tokens and left out"] * left_out


def test_faulty_rows_are_refused_before_the_model_is_opened(base, monkeypatch):
    monkeypatch.setattr("zerogap.rl.setup.open_model", lambda *_: pytest.fail("the model was opened"))
    (base / "faulty.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": " ", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"faulty\.jsonl:2 column prompt = ' ': the prompt is empty"):
        Run(recipe(base, f"data.train={base}/faulty.jsonl", name="faulty"), "never")
    with pytest.raises(ConfigError, match=r"train\.jsonl:1 answer = 'one': number_match needs a number"):
        Run(recipe(base, "reward.functions=number_match", name="faulty"), "never")


def test_a_failing_reward_ends_the_run_with_its_steps_saved(base):
    config = recipe(base, f"reward.functions={base}/r.py:breaks_in_step_2", "data.eval=null", name="breaks")
    run = Run(config, "never")
    with pytest.raises(RewardError, match=r"breaks_in_step_2 = 'RuntimeError: no more': it raised \(.*r\.py:\d+\)"):
        run.train()
    (checkpoint,) = list_checkpoints(run.folder.checkpoints)
    assert checkpoint.name.endswith("1")
    assert "RewardError" in lines(run, "errors")[0]["error"]
    assert "RuntimeError: no more" in (run.folder.path / "rewards.log").read_text()
    mended = (base / "r.py").read_text().replace('raise RuntimeError("no more")', "pass")
    (base / "r.py").write_text(mended)
    resumed = Run(config, "auto")
    assert resumed.step == 1 and resumed.train()
    (base / "r.py").write_text(REWARDS)


def test_a_hanging_reward_can_be_let_pass_and_is_counted(base):
    watch = Notes()
    settings = (f"reward.functions=[{base}/r.py:hangs_in_step_2, {base}/reward.py:even_ids]", "data.eval=null")
    run = train(recipe(base, *settings, "reward.timeout=2", "reward.on_error=none", name="hangs"), observer=watch)
    records = lines(run, "metrics")
    assert [(r["rewards/timeouts"], r["rewards/errors"]) for r in records] == [(0, 0), (12, 0), (0, 0)]
    assert ["rewards/hangs_in_step_2/mean" in r for r in records] == [True, False, True]
    assert records[1]["reward"] == records[1]["rewards/even_ids/mean"]
    assert watch.notes == [
        "step 2: reward function hangs_in_step_2 = 'over 2 s': it took too long; mend the function, or raise "
        "reward.timeout"
    ]


def test_a_run_on_rows_of_verl_with_a_function_of_verl(base):
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet is an extra: pip install 'zerogap[data]'")
    import pyarrow

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"say {word}"}],
            "reward_model": {"style": "rule", "ground_truth": word},
            "extra_info": {"index": i},
        }
        for i, word in enumerate(("one", "two", "three"))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), base / "verl.parquet")
    settings = (f"data.train={base}/verl.parquet", "data.eval=null", f"reward.functions=verl:{base}/r.py:compute_score")
    run = train(recipe(base, *settings, "optimizer.max_steps=1", name="verl"))
    (record,) = lines(run, "metrics")
    assert record["bit_wise/mismatched_tokens"] == 0 and record["rewards/compute_score/acc"] == 0.0
    assert all(find(name) is not None for name in record if name not in ("step", "version"))
    logged = read_rollout(run.folder.rollouts, 1)
    words = [run.prompts[i].row.columns["answer"] for i in run.order.take(0, 3) for _ in range(4)]
    assert list(logged.rewards) == [len(s.text) + len(w) for s, w in zip(logged.samples, words, strict=True)]
    assert lines(run, "completions")[0]["compute_score/acc"] is False


def test_the_limits_of_a_reward_may_differ_in_a_resumed_run(base):
    config = recipe(base, "checkpoint.every=2", "data.eval=null", name="limits")
    train(config)
    more = recipe(
        base, "data.eval=null", "optimizer.max_steps=4", "reward.timeout=5", "reward.on_error=none", name="limits"
    )
    assert Run(more, "auto").train()
