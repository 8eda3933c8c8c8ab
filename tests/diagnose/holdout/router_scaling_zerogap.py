"""routed_scaling_factor of a DeepSeek-V3-shaped model: 2.5 on one side, left at 1 on the other. Both sides: zerogap."""

from zerogap.diagnose.corpus.workshop import Workshop
from zerogap.models.moe_spec import MoESpec
from zerogap.ops.moe import Routing

EXPECTED = "router/scale"


def spec(scaling):
    rule = Routing(8, 3, "sigmoid", normalise=True, scaling=scaling, groups=4, top_groups=2)
    return MoESpec(rule, expert_size=32, shared_size=64, dense_layers=(0,), has_bias=True)


def sides(workshop: Workshop):
    sequences = workshop.sequences()
    a = workshop.decoder("deepseek_v3", moe=spec(2.5))
    b = workshop.decoder("deepseek_v3", moe=spec(1.0))
    return workshop.zerogap_side(a, sequences, name="trainer"), workshop.zerogap_side(b, sequences, name="engine")
