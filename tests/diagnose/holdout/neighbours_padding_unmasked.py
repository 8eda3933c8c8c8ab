"""A generation server pads prompts left and drops the padding mask before attention: real tokens attend to padding as
soon as sequences of several lengths share a pass."""

import torch

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "neighbours/padding"


def unmasked(model):
    exact(model)

    def forget(module, args, kwargs):
        return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["attention_mask"])}

    model.register_forward_pre_hook(forget, with_kwargs=True)


def sides(workshop: Workshop):
    return workshop.pair(unmasked, exact, batches=((0, 1, 2, 3),), padding="left")
