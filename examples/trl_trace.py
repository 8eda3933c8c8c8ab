"""Record a TRL run for `zerogap diagnose`: three GRPO steps of a tiny random model on a CPU, in about a minute.

    pip install trl==1.16.0 zerogap
    python examples/trl_trace.py --output traces
    zerogap diagnose traces/step0-0-rollout traces/step0-0-trainer

In a run of your own only the two lines of `Traced` are needed, with your trainer's other settings as they are. Weights
and what the layers compute are recorded here, too, since the model is tiny.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from zerogap.diagnose.adapters.loop_hooks import TrlTraces

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=?"]


class Traced(TrlTraces, GRPOTrainer):
    trace_folder, trace_steps = "traces", 3
    trace_weights = trace_boundaries = True


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, so that nothing has to be downloaded."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def num_vowels(completions: list[str], **_: object) -> list[float]:
    """The reward: a random model has some of it."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("traces"))
    parser.add_argument("--bf16", action="store_true", help="train under BF16 autocast, as TRL does by default")
    parser.add_argument("--iterations", type=int, default=1, help="updates per generation; 2: the second is off-policy")
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    settings = GRPOConfig(
        output_dir=str(arguments.output / "run"), use_cpu=True, bf16=arguments.bf16, max_steps=3,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=12, learning_rate=1e-3,
        temperature=arguments.temperature, num_iterations=arguments.iterations, report_to="none", save_strategy="no",
        logging_steps=1, seed=0,
    )  # fmt: skip
    prompts = ["what is 2 + 2?", "a b c ", "1 + 1 =", "say aeiou"] * 4
    Traced.trace_folder = arguments.output
    trainer = Traced(
        LlamaForCausalLM(config), num_vowels, settings, Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    print("\n".join(str(folder) for folder in sorted(arguments.output.glob("step*"))))


if __name__ == "__main__":
    main()
