"""Reward functions in processes of their own: bounded, captured, begun anew, and without a trace in this process."""

import contextlib
import os
import time

import pytest

from zerogap.config import RewardConfig
from zerogap.errors import ConfigError
from zerogap.rl.data_rows import Row
from zerogap.rl.reward import load_rewards
from zerogap.rl.reward_process import MOST_SLOW
from zerogap.rl.reward_values import RewardError

FUNCTIONS = """
import asyncio, os, pathlib, signal, subprocess, sys, time, datetime

calls = 0


def counted(completions):
    global calls
    calls += 1
    return [float(calls)] * len(completions)


def talks(completions, trainer_state, log_extra, log_metric):
    print("step", trainer_state.global_step)
    print("to stderr", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    log_extra("when", [datetime.date(2020, 1, i + 1) for i in range(len(completions))])
    log_metric("m", 1)
    log_metric("m", 2)
    return [1.0] * len(completions)


def floods(completions):
    print("begin" + "x" * 10_000_000 + "end")
    return [0.0] * len(completions)


def less_and_less(completions, trainer_state):
    print("x" * trainer_state.global_step)
    return [0.0] * len(completions)


def slow_length(completions):
    time.sleep(0.3)
    return [float(len(c[0]["content"])) for c in completions]


def breaks_in_step_1(completions, trainer_state):
    if trainer_state.global_step == 1:
        raise ValueError("no")
    return [0.0] * len(completions)


def hangs(completions):
    print("soon")
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(1000)


def spins(completions):
    while True:
        pass


def dies(completions):
    os._exit(3)


def leaves(completions):
    sys.exit("enough")


def takes_all(completions):
    os.kill(os.getpid(), signal.SIGSEGV)


def uses_signals(completions):
    def late(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(20)
    except TimeoutError:
        return [0.25] * len(completions)


async def later(completions):
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


def odd(completions):
    return [1.0, object(), float("nan")]


def pid(completions):
    return [float(os.getpid())] * len(completions)


def waits_for_the_other(completions, me, other):
    here = pathlib.Path(__file__)
    here.with_name(me).touch()
    while not here.with_name(other).exists():
        time.sleep(0.01)
    return [1.0] * len(completions)
"""

ROWS = [Row(f"f:{i}", ({"role": "user", "content": "q"},), {"answer": str(i)}) for i in range(3)]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    return tmp_path / "f.py"


def rewards(file, *names, **section):
    functions = [f"{file}:{name}" if isinstance(name, str) else name for name in names]
    return load_rewards(RewardConfig(functions=functions, **section))


def score(loaded, step=7):
    return loaded.score(ROWS, ["a", "b", "c"], [[1], [2], [3]], step)


def is_running(pid):
    with contextlib.suppress(OSError):
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_process_stays_from_call_to_call_and_ends_when_closed(file):
    loaded = rewards(file, "counted", "pid")
    first, second = score(loaded), score(loaded)
    assert (first.columns[0], second.columns[0]) == ([1.0] * 3, [2.0] * 3)
    pid = int(first.columns[1][0])
    assert pid == second.columns[1][0] != os.getpid() and is_running(pid)
    loaded.close()
    assert not is_running(pid)
    assert score(loaded).columns[0] == [1.0] * 3, "a new process"
    pid = int(score(loaded).columns[1][0])
    del loaded
    assert not is_running(pid), "nobody refers to it any more"


def test_what_is_printed_and_logged_is_captured(file, capfd):
    result = score(rewards(file, "talks"))
    assert set(result.output.splitlines()) == {"--- talks", "", "from a child", "step 7", "to stderr"}
    assert result.extra == {"when": ["2020-01-01", "2020-01-02", "2020-01-03"]}, "as text, whatever it was"
    assert result.metrics == {"m": 1.5}
    assert capfd.readouterr() == ("", "")


def test_a_flood_of_output_is_cut_in_the_middle(file):
    loaded = rewards(file, "floods")
    for _ in range(2):
        output = score(loaded).output
        assert output.startswith("--- floods\nbeginxxx") and output.rstrip().endswith("xxxend") and "\n...\n" in output
        assert len(output) < 70_000


@pytest.mark.parametrize("name", ["hangs", "spins"])
def test_a_function_that_hangs_is_ended_in_time_and_named(file, name):
    loaded = rewards(file, name, timeout=0.5)
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"reward function {name} = 'over 0\.5 s': it took too long") as error:
        score(loaded)
    assert time.monotonic() - began < 30
    assert error.value.timed_out
    if name == "hangs":
        assert error.value.output == "soon\n"
        deadline = time.monotonic() + 30
        child = int(file.with_name("child").read_text())
        while is_running(child):
            assert time.monotonic() < deadline, "what it had started goes with it"
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dies", "exit code 3': its process ended"),
        ("leaves", "exit code 1': its process ended"),
        ("takes_all", "exit code -11': its process ended"),
        ("odd", r"odd, completion 1 \(f:1\) = '<object object at .*': return a number or None, not object"),
    ],
)
def test_a_process_that_ends_is_named_and_begins_anew(file, name, words):
    loaded = rewards(file, "counted", name)
    for _ in range(2):
        with pytest.raises(RewardError, match=words):
            score(loaded)
    passed = rewards(file, "counted", name, on_error="none")
    for call in (1.0, 2.0):
        result = score(passed)
        assert result.columns[0] == [call] * 3, "the other function's process is untouched"
        assert result.columns[1] == ([1.0, None, None] if name == "odd" else [None] * 3)
        assert (result.errors, result.timeouts) == (2 if name == "odd" else 3, 0)
        assert len(result.notes) == (2 if name == "odd" else 1)


def test_a_time_out_can_be_let_pass(file):
    result = score(rewards(file, "hangs", "later", timeout=2, on_error="none"))
    assert result.columns == [[None] * 3, [2.0] * 3]
    assert (result.errors, result.timeouts) == (0, 3)
    assert "hangs = 'over 2 s'" in result.notes[0] and "soon" in result.output


def test_signals_work_as_in_a_script(file):
    assert score(rewards(file, "uses_signals")).totals == [0.25] * 3


def test_functions_run_side_by_side(file):
    name = f"{file}:waits_for_the_other"
    both = [{"function": name, "name": me, "me": me, "other": other} for me, other in (("x", "y"), ("y", "x"))]
    assert score(rewards(file, *both, timeout=60)).totals == [2.0] * 3


def test_output_belongs_to_its_call(file):
    loaded = rewards(file, "less_and_less")
    assert [score(loaded, step).output.strip() for step in (5, 2)] == [
        "--- less_and_less\nxxxxx",
        "--- less_and_less\nxx",
    ]


def test_an_answer_that_comes_after_a_fault_is_not_taken_for_the_next_one(file):
    loaded = rewards(file, "slow_length", "breaks_in_step_1")
    with pytest.raises(RewardError, match="breaks_in_step_1"):
        loaded.score(ROWS[:1], ["long"], [[]], 1)
    assert loaded.score(ROWS[:1], ["short one"], [[]], 2).totals == [9.0]


def test_a_fault_ends_the_calls_of_the_others(file):
    loaded = rewards(file, "hangs", "dies", timeout=600)
    began = time.monotonic()
    with pytest.raises(RewardError, match="dies"):
        score(loaded)
    assert time.monotonic() - began < 60


def test_loading_faults_are_told_before_any_call(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nprint('no licence', flush=True)\nos._exit(2)\n")
    with pytest.raises(ConfigError, match="its process ended while it was loaded: no licence"):
        rewards(tmp_path / "ends.py", "f")


VERL = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hang":
        time.sleep(1000)
    right = solution_str == ground_truth["target"] if isinstance(ground_truth, dict) else solution_str == ground_truth
    return {"score": right + bonus, "acc": right, "said": solution_str, "index": extra_info.get("index", -1)}


def plain(solution_str, ground_truth, **rest):
    assert sorted(rest) == ["data_source", "extra_info"], rest
    return solution_str == ground_truth


async def judge(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str)}


def without_score(solution_str, ground_truth):
    return {"acc": 1.0}


def more(solution_str, ground_truth, tokenizer):
    return 0.0
"""


def verl_rows(*truths):
    columns = [{"data_source": "d", "reward_model": {"ground_truth": t}, "answer": t, "extra_info": {}} for t in truths]
    return [Row(f"v:{i}", (), {**c, "extra_info": {"index": i} if i else None}) for i, c in enumerate(columns)]


@pytest.fixture
def verl(tmp_path):
    (tmp_path / "v.py").write_text(VERL)
    return f"verl:{tmp_path}/v.py"


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_functions_of_verl(verl, timeout):
    functions = [f"{verl}:compute_score", f"{verl}:plain", f"{verl}:judge"]
    functions.append({"function": f"{verl}:compute_score", "name": "more", "bonus": 0.5})
    loaded = load_rewards(RewardConfig(functions=functions, timeout=timeout))
    rows = verl_rows("a", {"target": "b"})
    loaded.check(list(rows[0].columns))
    loaded.check_rows(rows)
    result = loaded.score(rows, ["a", "b"], [[], []], 0)
    assert result.columns == [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.5, 1.5]]
    assert loaded.score(rows, ["a", "four"], [[], []], 0).columns[2] == [1.0, 4.0]
    assert result.metrics["rewards/compute_score/acc"] == 1.0
    assert result.extra["compute_score/said"] == ["a", "b"] and result.extra["more/index"] == [-1, 1]
    for _ in range(2):
        rest = [Row("plain", (), {"answer": "a"})]
        assert loaded.score(rest, ["a"], [[]], 0).columns[1] == [1.0], "a row that is not verl's: its answer"


def test_faults_of_functions_of_verl(verl):
    for name, words in [
        ("without_score", r"without_score, row v:0 = \['acc'\]: .* an entry `score`"),
        ("more", "'tokenizer'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_rewards(RewardConfig(functions=f"{verl}:{name}")).score(verl_rows("a"), ["a"], [[]], 0)
    loaded = load_rewards(RewardConfig(functions=f"{verl}:plain"))
    with pytest.raises(ConfigError, match="v:0 answer = None: verl's functions need a ground truth"):
        loaded.check_rows(verl_rows(None))


def test_a_time_out_costs_one_completion_of_verl_and_many_end_the_batch(verl):
    loaded = load_rewards(RewardConfig(functions=f"{verl}:compute_score", timeout=2, on_error="none"))
    result = loaded.score(verl_rows("a", "a", "c"), ["a", "hang", "c"], [[]] * 3, 0)
    assert result.totals == [1.0, None, 1.0]
    assert (result.timeouts, len(result.notes)) == (1, 1)
    assert "row v:1" in result.notes[0]
    loaded.functions[0].limit = 0.3
    texts = ["hang"] * MOST_SLOW + ["c"] * 4
    result = loaded.score(verl_rows(*["c"] * len(texts)), texts, [[]] * len(texts), 0)
    assert result.totals == [None] * len(texts)
    assert (result.timeouts, len(result.notes)) == (len(texts), MOST_SLOW)
