"""Activation recompute: keep a block's inputs, run its forward again in the backward pass.

Every op's forward is a pure function of its inputs with a fixed order, so the second run gives the bits of the first,
and gradients are the same bits with and without (tests/train/test_trainer.py).
"""

import torch
from torch.utils.checkpoint import checkpoint

from zerogap.layers.block import Block


def recompute_block(block: Block, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `block` without keeping its activations."""
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
