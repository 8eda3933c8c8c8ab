"""transformers against zerogap, and one tensor of the rollout is scaled by two: numerics are the smaller part.

Met in the first comparison of any two stacks; the operators differ everywhere, and are not what is wrong.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/scaled"


def plant(model: Model) -> None:
    model.model.layers[0].mlp.down_proj.weight.data.mul_(2.0)


def sides(workshop: Workshop) -> Sides:
    model = workshop.model()
    plant(model)
    return workshop.zerogap_side(workshop.decoder(), name="trainer"), workshop.torch_side(model, name="rollout")
