"""What faults are made of: tiny seeded models, the sequences that both sides compute, and sides around them.

A model folder, its reference model and its sequences are made once per process; every side gets a model of its own, so
that a fault may change it. Completions are drawn from the reference model, so that most tokens are likely ones.
"""

import copy
import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.diagnose.zerogap_side import ZerogapSide
from zerogap.models.decoder import Decoder
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType, preset
from zerogap.ops.latent import LatentSizes
from zerogap.ops.moe import Routing
from zerogap.weights import open_model
from zerogap.weights.random_model import write_random_model

Model = Any  # a transformers causal language model
Change = Callable[[Model], None]
Sides = tuple[Side, Side]
VOCABULARY, EOS, BOS = 320, 2, 1
LENGTHS = ((6, 20), (9, 25), (3, 13), (12, 33))  # tokens of prompt, and in all
AttentionFunction = Callable[..., torch.Tensor]
Kept = Callable[[torch.Tensor], torch.Tensor]


def spec_of(family: str, **changes: object) -> ModelSpec:
    """Two layers, hidden 64, four query heads over two of 32 (MHA for deepseek), MLP 128, vocabulary 320."""
    facts: dict[str, Any] = {
        "family": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "norm_eps": 1e-5,
        "rope": RopeSpec(10000.0),
        "tied": False,
        "qkv_bias": family == "qwen2",
        "o_bias": False,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "max_position": 256,
        "eos_token_ids": (EOS,),
        "bos_token_id": BOS,
    }
    if family == "qwen3_moe":
        facts["moe"] = MoESpec(Routing(8, 3, "softmax", normalise=True, scaling=1.0), expert_size=32)
    if family == "deepseek_v3":
        rule = Routing(8, 3, "sigmoid", normalise=True, scaling=2.5, groups=4, top_groups=2)
        facts |= {"num_kv_heads": 4, "head_dim": 48, "mla": LatentSpec(LatentSizes(4, 32, 16, 64, 32))}
        facts["moe"] = MoESpec(rule, expert_size=32, shared_size=64, dense_layers=(0,), has_bias=True)
    return ModelSpec(**{**facts, **changes})


# ---------------------------------------------------------------------------------------------------- changing models


def turn(model: Model, suffix: str, kind: type, **attributes: object) -> None:
    """Make the modules whose names match `suffix` (a regular expression of the last parts) instances of a subclass of
    their class: same weights and names, another `forward`.

    Args:
        attributes: set on each of them.
    """
    names = [name for name, _ in model.named_modules() if re.search(rf"(^|\.)({suffix})$", name)]
    assert names, f"no module is called {suffix}"
    for name in names:
        module = model.get_submodule(name)
        assert issubclass(kind, type(module)), f"{name} is a {type(module).__name__}"
        module.__class__ = kind
        for key, value in attributes.items():
            setattr(module, key, value)


def attend(model: Model, name: str, function: AttentionFunction) -> None:
    """Let the model's attention be `function(query, key, value, mask, scale)`, through the public interfaces.

    Args:
        name: of the registration; one name is one function.
    """

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        return function(query, key, value, mask, scaling), None

    transformers.AttentionInterface.register(f"corpus_{name}", forward)
    masks = transformers.masking_utils
    transformers.AttentionMaskInterface.register(f"corpus_{name}", masks.eager_mask)
    model.set_attn_implementation(f"corpus_{name}")


# ---------------------------------------------------------------------------------------------------- edited sides


@dataclasses.dataclass(frozen=True)
class EditedSide:
    """A live side whose stack records something else than it computes.

    Attributes:
        side: the stack itself.
        trace: what its recording says.
        answer: applied to whatever the stack computes again; None where it cannot be asked.
    """

    side: Side
    trace: Trace
    answer: Callable[[Pass], Pass] | None = None

    def again(self, ask: Ask) -> Pass | None:
        if self.answer is None:
            return None
        found = self.side.again(ask)
        return None if found is None else self.answer(found)

    def weight(self, name: str) -> torch.Tensor | None:
        return self.side.weight(name)

    def parameters(self, node: str) -> Mapping[str, object]:
        return self.side.parameters(node)


def edited(side: Side, change: Callable[[np.ndarray, SequenceTrace], np.ndarray], **facts: object) -> EditedSide:
    """The side with every sequence's log-probs changed wherever they are recorded.

    Args:
        change: (float32 [N], sequence) -> float32 [N].
        facts: further fields of the trace to replace.
    """

    def answer(found: Pass) -> Pass:
        pairs = zip(found.logprobs, side.trace.sequences, strict=True)
        return dataclasses.replace(found, logprobs=tuple(change(p.copy(), s).astype(np.float32) for p, s in pairs))

    trace = dataclasses.replace(side.trace, passes=tuple(answer(p) for p in side.trace.passes), **facts)  # type: ignore
    return EditedSide(side, trace, answer)


def retold(side: Side, **facts: object) -> EditedSide:
    """The side with other facts in its trace; it computes as before."""
    return EditedSide(side, dataclasses.replace(side.trace, **facts), lambda found: found)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- the workshop


class Workshop:
    """Makes models and sides. One per process; what it keeps is never handed out to be changed."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="zerogap-corpus-")
        self.folder = functools.cache(self._folder)
        self._reference = functools.cache(self._load)
        self._drawn = functools.cache(self._draw)

    # ---- models

    def _folder(self, family: str = "llama", dtype: str = "bfloat16", **changes: object) -> Path:
        """A Hugging Face folder with seeded random weights."""
        storage = {"bfloat16": DType.BF16, "float32": DType.FP32}[dtype]
        path = Path(tempfile.mkdtemp(dir=self._home.name)) / family
        return write_random_model(path, spec_of(family, **changes), seed=1, peak=3.0, storage=storage)

    def _load(self, family: str, dtype: str, **changes: object) -> Model:
        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder(family, dtype, **changes),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        ).eval()

    def model(self, family: str = "llama", dtype: str = "bfloat16", **changes: object) -> Model:
        """A transformers model of its own: eager attention, BF16 or FP32."""
        return copy.deepcopy(self._reference(family, dtype, **changes))

    def decoder(
        self, family: str = "llama", numerics: str = "bf16", *, contract: Any = None, **changes: object
    ) -> Decoder:
        """A zerogap decoder of its own over the same weights. `contract`: fields of the numerics to change."""
        dtype = "float32" if numerics == "fp32" else "bfloat16"
        files = open_model(self.folder(family, dtype, **changes))
        return Decoder(files.spec, preset(numerics, **(contract or {}))).load(files.tensors())

    # ---- sequences

    @torch.no_grad()
    def _draw(self, family: str, dtype: str, kept: Kept | None, **changes: object) -> tuple[SequenceTrace, ...]:
        model = self._reference(family, dtype, **changes)
        generator = torch.Generator().manual_seed(5)
        found = []
        for prompt, length in LENGTHS:
            ids = torch.randint(3, VOCABULARY, (1, prompt), generator=generator)
            ids[0, 0] = BOS
            while ids.shape[1] < length:
                logits = model(ids).logits[0, -1].float()
                logits[EOS] = -torch.inf
                logits = logits if kept is None else kept(logits)
                draw = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
                ids = torch.cat([ids, draw[None]], 1)
            found.append(SequenceTrace(ids[0].numpy().astype(np.int32), prompt, finish_reason="length"))
        if kept is None:
            last = found[0].ids.copy()
            last[-1] = EOS
            found[0] = dataclasses.replace(found[0], ids=last, finish_reason="stop")
        return tuple(found)

    def sequences(
        self, family: str = "llama", dtype: str = "bfloat16", *, kept: Kept | None = None, **changes: object
    ) -> tuple[SequenceTrace, ...]:
        """Four sequences of 13 to 33 tokens.

        Args:
            kept: logits [V] -> logits from whose softmax completions are drawn; without it, the first sequence ends
                with the end-of-sequence token, likely or not.
        """
        return self._drawn(family, dtype, kept, **changes)

    # ---- sides

    def torch_side(
        self,
        model: Model,
        sequences: Sequence[SequenceTrace] | None = None,
        *,
        name: str = "transformers",
        definition: Definition = Definition(1.0, True),
        **options: Any,
    ) -> TorchSide:
        """A live side around a transformers model that `model` made."""
        known = self.sequences() if sequences is None else sequences
        return TorchSide(model, known, name, definition, str(model.config.name_or_path), **options)

    def zerogap_side(
        self,
        decoder: Decoder,
        sequences: Sequence[SequenceTrace] | None = None,
        *,
        name: str = "zerogap",
        definition: Definition = Definition(1.0, True),
        **options: Any,
    ) -> ZerogapSide:
        """A live side around a decoder that `decoder` made."""
        known = self.sequences() if sequences is None else sequences
        return ZerogapSide(
            decoder,
            [s.ids for s in known],  # type: ignore[misc]
            prompt_lengths=[s.prompt_length for s in known],
            name=name,
            definition=definition,
            **options,
        )

    def pair(
        self,
        change: Change | None = None,
        other: Change | None = None,
        *,
        family: str = "llama",
        dtype: str = "bfloat16",
        facts: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Sides:
        """Two transformers stacks over the same weights and sequences; the second has the fault.

        Args:
            change, other: what is changed in the second's and in the first's model.
            facts: of `spec_of`.
            options: of the second side.
        """
        a, b = (self.model(family, dtype, **(facts or {})) for _ in range(2))
        for model, wanted in ((a, other), (b, change)):
            if wanted is not None:
                wanted(model)
        sequences = self.sequences(family, dtype, kept=None, **(facts or {}))
        return self.torch_side(a, sequences, name="trainer"), self.torch_side(b, sequences, name="rollout", **options)
