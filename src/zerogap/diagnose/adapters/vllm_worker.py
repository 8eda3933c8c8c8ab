"""The part of the vLLM adapter that runs inside vLLM's worker: weights' sketches and boundaries, through hooks.

vLLM mixes this class into its worker when started with `worker_extension_cls=`EXTENSION, which is a public option, and
calls its methods by `LLM.collective_rpc`. Only `get_model()` of the worker is used. Tensors travel through a file, as
vLLM asks of such calls.

Fused projections are split into the checkpoint's names. Where the CPU backend has packed a linear layer's weight and
dropped the original, the weight is read back through the layer: its product with the identity has one term per element
and so is exact, but for the sign of zeros. Shards of tensor parallelism, and experts' stacks, are not recorded.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zerogap.diagnose.adapters.capture import Capture, capture, plain_name
from zerogap.diagnose.sketch import sketch

EXTENSION = "zerogap.diagnose.adapters.vllm_worker.Recorder"
_ROWS = 256  # identity rows per call when a weight is read back
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Recorder:
    """Methods that `collective_rpc` calls; their names are the adapter's own, so that they meet none of vLLM's."""

    def zerogap_sketches(self) -> dict[str, Any]:
        """Checkpoint name -> sketch of the weights that the model computes with now."""
        with torch.inference_mode():
            return {name: sketch(tensor) for name, tensor in checkpoint_tensors(self.get_model())}  # type: ignore[attr-defined]

    def zerogap_buffers(self) -> dict[str, Any]:
        """Buffer name -> sketch."""
        return {plain_name(n): sketch(b) for n, b in self.get_model().named_buffers()}  # type: ignore[attr-defined]

    def zerogap_begin(self) -> None:
        """Install hooks; forward passes are recorded from now on."""
        self._zerogap_undo = contextlib.ExitStack()
        model = self.get_model()  # type: ignore[attr-defined]
        self._zerogap_seen = self._zerogap_undo.enter_context(capture(model))
        head = getattr(model, "logits_processor", None)
        if head is not None:
            hook = head.register_forward_hook(_head_hook(self._zerogap_seen), with_kwargs=True)
            self._zerogap_undo.callback(hook.remove)

    def zerogap_take(self, path: str) -> int:
        """Write what was recorded since the last call to a file (`torch.load`, weights only) and forget it; how many
        forward passes that were."""
        forwards = self._zerogap_seen.forwards
        packed = [{"ids": f.ids, "positions": f.positions, "tensors": f.tensors} for f in forwards]
        torch.save(packed, Path(path))
        forwards.clear()
        return len(packed)

    def zerogap_end(self) -> None:
        """Remove the hooks."""
        self._zerogap_undo.close()


def _head_hook(seen: Capture) -> Any:
    """Files logits, which are computed after the forward pass and for some rows only, under the rows whose hidden
    states they were computed from."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: torch.Tensor) -> None:
        given = [*args, *kwargs.values()]
        hidden = next((t for t in given if isinstance(t, torch.Tensor)), None)
        if logits is None or hidden is None or not seen.forwards:
            return
        tensors = seen.forwards[-1].tensors
        normed = tensors.get("final_norm")
        if normed is None or normed.shape[1:] != hidden.shape[1:]:
            return
        if "lm_head" not in tensors:
            tensors["lm_head"] = torch.full((len(normed), logits.shape[1]), torch.nan, dtype=logits.dtype)
        for row, values in zip(hidden.cpu(), logits.cpu()):
            tensors["lm_head"][(normed == row).all(1)] = values

    return hook


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the checkpoint, tensor) of a vLLM model on one rank."""
    for raw, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "tp_size", 1) > 1:
            continue
        for part, parameter in module.named_parameters(recurse=False):
            name = f"{plain_name(raw)}.{part}" if raw else part
            tensor = parameter.detach()
            if tensor.numel() == 0 and part == "weight" and hasattr(module, "quant_method"):
                tensor = _read_back(module)
            if ".experts." in name or tensor.numel() == 0:
                continue
            if vocabulary := getattr(module, "org_vocab_size", None):
                tensor = tensor[:vocabulary]  # padded rows belong to no token
            yield from _split(name, tensor, module)


def _read_back(module: Any) -> torch.Tensor:
    """[N, K] weight of a linear layer as it multiplies: rows of the identity give its columns."""
    width, dtype = int(module.input_size_per_partition), module.params_dtype
    columns = []
    for first in range(0, width, _ROWS):
        rows = torch.zeros((min(_ROWS, width - first), width), dtype=dtype)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        columns.append(module.quant_method.apply(module, rows, bias=None).t())
    return torch.cat(columns, 1)


def _split(name: str, tensor: torch.Tensor, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    found = re.search(r"^(.*)\.(qkv_proj|gate_up_proj)\.(weight|bias)$", name)
    sizes = getattr(module, "output_sizes", None)
    if found is None or sizes is None or sum(sizes) != len(tensor):
        yield name, tensor
        return
    for part, rows in zip(_PARTS[found[2]], tensor.split(list(sizes))):
        yield f"{found[1]}.{part}.{found[3]}", rows
