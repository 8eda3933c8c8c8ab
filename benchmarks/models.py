"""One model in both stacks: the same published weights in zerogap and in transformers."""

import tempfile
from pathlib import Path

import torch
import transformers

from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.weights import open_model, save_folder
from zerogap.weights.quick_start import fetch_quick_start_model


def both(
    source: str | None, numerics: str = "bf16", dtype: torch.dtype = torch.bfloat16, max_positions: int = 2048
) -> tuple[Decoder, transformers.PreTrainedModel]:
    """(zerogap decoder, transformers model in eval mode) from a model source."""
    files = open_model(source or fetch_quick_start_model())
    decoder = Decoder(files.spec, preset(numerics), max_positions=max_positions).load(files.tensors())
    with tempfile.TemporaryDirectory() as folder:
        tensors = ((name, handle.value()) for name, handle in decoder.weights.items())
        path = save_folder(Path(folder) / "model", files.spec, tensors, files)
        peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return decoder, peer.eval()
