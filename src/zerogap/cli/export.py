"""`zerogap export`: any model that zerogap reads, as a Hugging Face folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from zerogap.cli.numerics_option import contract_from
from zerogap.errors import ConfigError

FORMATS = ("fp32", "bf16", "fp8")


def export(
    model: Annotated[str, typer.Argument(help="A model folder, hub id or .gguf file, or smollm2-135m-instruct.")],
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    weights: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="How weights are stored. bf16: 2 bytes each, read by everything. fp32: 4 bytes. fp8: linear layers as "
            "E4M3 codes with one FP32 scale per 128 x 128 block (about 1 byte each; float8_e4m3fn and *_scale_inv, as "
            "in DeepSeek-V3 and Qwen3-FP8), the rest BF16: the codes that engine and trainer compute with under "
            "fp8 numerics. Default: what --numerics publishes, fp32 or bf16.",
        ),
    ] = None,
    numerics: Annotated[
        str | None,
        typer.Option(
            help="The contract that publishes the weights, as everywhere; under --format fp8 it says which tensors are "
            'quantised, and how scales are rounded: "{preset: fp8, scale_format: pow2, bf16_layers: {last: 1}}". '
            "Default: the preset that --format names, else bf16."
        ),
    ] = None,
) -> None:
    """Write MODEL to FOLDER: weights as the contract publishes them, config, tokenizer, chat template.

    What is written is what engine and trainer compute with, so under that contract log-probs of the exported model are
    the same bits. Two exceptions: the codes of a block-FP8 MODEL are kept under --format fp8 only, and calibrated KV
    scales are not written.
    """
    from zerogap.models.decoder import Decoder
    from zerogap.numerics import DType
    from zerogap.weights import open_model, save_folder

    if weights is not None and weights not in FORMATS:
        raise ConfigError("format", weights, f"choose one of {', '.join(FORMATS)}")
    contract = contract_from(numerics or weights or "bf16")
    weights = weights or contract.storage.value
    if weights == "fp8" and contract.linear is not DType.FP8:
        raise ConfigError("format", weights, f"numerics {contract.name} quantises nothing; choose --numerics fp8")
    if weights != "fp8" and weights != contract.storage.value:
        mend = f"numerics {contract.name} publishes {contract.storage.value}; choose that, or other numerics"
        raise ConfigError("format", weights, mend)
    files = open_model(model)
    decoder = Decoder(files.spec, contract, max_positions=64).load(files.tensors())
    tensors = (
        (name, handle.codes() if weights == "fp8" and handle.spec.fp8 else handle.value())
        for name, handle in decoder.weights.items()
    )
    meta = {"numerics": contract.fields(), "identity": str(decoder.identity), "digests": decoder.digests()}
    path = save_folder(folder, files.spec, tensors, files, meta)
    typer.echo(f"{path}: {len(decoder.weights)} tensors, {weights}")
