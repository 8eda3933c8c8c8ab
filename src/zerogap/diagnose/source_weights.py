"""Weights of a recorded side, read from the folder that its trace names, so that its operators can be replayed.

A tensor is handed out only if it is the one that the side computed with: where the trace holds a sketch of it, the
digests have to agree.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zerogap.diagnose.sketch import sketch

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class SourceWeights:
    """Tensors by their names in the safetensors files of a folder; none where there is no such folder.

    Args:
        folder: as `Trace.source` says it.
        sketches: what the side recorded of its weights, by the same names.
    """

    def __init__(self, folder: str, sketches: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._sketches = Path(folder) if folder else None, sketches

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name -> file. A file that is no safetensors file holds nothing."""
        found: dict[str, Path] = {}
        if self._folder is None or not self._folder.is_dir():
            return found
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as tensors:
                    found |= dict.fromkeys(tensors.keys(), path)
            except (SafetensorError, OSError):
                continue
        return found

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, in the dtype that the side held it in; None if it is not there, or is another one."""
        stored = name if name in self._files else TIED.get(name, name)
        if stored not in self._files:
            return None
        with safe_open(self._files[stored], "pt") as tensors:
            tensor = tensors.get_tensor(stored)
        recorded = self._sketches.get(name, self._sketches.get(stored))
        if recorded is None:
            return tensor
        tensor = tensor.to(getattr(torch, str(recorded.get("dtype", "")), tensor.dtype))
        return tensor if sketch(tensor)["digest"] == recorded.get("digest") else None
