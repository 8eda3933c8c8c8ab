"""zerogap's operators put into another stack, one kind at a time: what of a logdiff each kind accounts for."""

import functools
from collections.abc import Mapping

import torch

from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.side import Replacement
from zerogap.diagnose.simulate.contract import contract_output
from zerogap.numerics import Numerics

KINDS = ("embedding", "norm", "linear", "rope", "attention", "activation", "head", "logprob")


def contract_replacements(
    side: TorchSide, numerics: str | Numerics | None = None, temperature: float = 1.0
) -> dict[str, Replacement]:
    """What `Ask.replace` takes to compute a kind of operator as the contract does; `side` lends weights and facts, as
    they are when first asked for: make new ones for a model whose tensors have been put in others' places.

    With all of them a BF16 or FP32 model has the contract's bits, for its residual additions are the contract's own.

    Args:
        numerics: the contract; None: `bf16` or `fp32` by the model's dtype.
        temperature: of processed log-probs; 1 for raw ones.
    """
    dtype = next(side.model.parameters()).dtype
    rules = numerics or ("fp32" if dtype == torch.float32 else "bf16")

    @functools.cache  # a model is searched through for every name, and a pass has hundreds of operators
    def facts(name: str) -> tuple[Mapping[str, object], Mapping[str, torch.Tensor]]:
        weights = side.nodes[name].weights
        names = [*weights, *(w.removesuffix(".weight") + ".bias" for w in weights)]
        found = {weight: side.weight(weight) for weight in names}
        return side.parameters(name), {weight: tensor for weight, tensor in found.items() if tensor is not None}

    def compute(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        node = side.nodes[name]
        rows = {given: tensor.detach().cpu() for given, tensor in inputs.items()}
        parameters = dict(facts(name)[0])
        if node.kind == "embedding":
            parameters["ids"], rows = rows["ids"], {}
        elif node.kind == "rope":
            parameters["positions"] = rows.pop("positions")
        elif node.kind == "logprob":
            parameters |= {"targets": rows.pop("ids"), "temperature": temperature}
        elif node.kind == "attention":
            return _attention(list(rows.values()), parameters, rules)
        weights = {weight: tensor.cpu() for weight, tensor in facts(name)[1].items()}
        return contract_output(node.kind, rows, weights, parameters, rules)

    return dict.fromkeys(KINDS, compute)


def _attention(rows: list[torch.Tensor], parameters: dict[str, object], rules: str | Numerics) -> torch.Tensor:
    """One sequence's last T query rows over all K keys: a row depends on its own position, so that any rows may stand
    before them."""
    query, keys, values = rows
    before = query.new_zeros((len(keys) - len(query), query.shape[1]))
    parameters["lengths"] = [len(keys)]
    out = contract_output("attention", [torch.cat([before, query]), keys, values], {}, parameters, rules)
    return out[len(before) :]
