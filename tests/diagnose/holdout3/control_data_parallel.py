"""Eight data-parallel replicas against one, another engine version, other flags: no reduction is split. All equal."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair(dtype="float32")
    told = retold(rollout, layout={"data_parallel_size": 8, "enforce_eager": True}, versions={"vllm": "0.32.0"})
    return retold(trainer, layout={"data_parallel_size": 1}, versions={"torch": "2.13.0"}), told
