"""The policy was left in training mode: attention dropout of 0.1 in every scoring pass (case 6 of the public list)."""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "rerun/nondeterministic"


def training(model):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def sides(workshop: Workshop):
    return workshop.pair(training)
