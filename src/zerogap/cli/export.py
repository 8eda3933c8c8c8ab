"""`zerogap export`: any model that zerogap reads, as a Hugging Face folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from zerogap.cli.numerics_option import contract_from


def export(
    model: Annotated[str, typer.Argument(help="A model folder, hub id or .gguf file.")],
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    numerics: Annotated[str, typer.Option(help="bf16 stores BF16 weights, fp32 stores FP32.")] = "bf16",
) -> None:
    """Write MODEL to FOLDER: weights as the contract publishes them, config, tokenizer, chat template.

    What is written is what engine and trainer compute with, so log-probs of the exported model are the same bits.
    """
    from zerogap.models.decoder import Decoder
    from zerogap.weights import open_model, save_folder

    contract = contract_from(numerics)
    files = open_model(model)
    decoder = Decoder(files.spec, contract, max_positions=64).load(files.tensors())
    tensors = ((name, handle.value()) for name, handle in decoder.weights.items())
    meta = {"numerics": contract.fields(), "identity": str(decoder.identity), "digests": decoder.digests()}
    path = save_folder(folder, files.spec, tensors, files, meta)
    typer.echo(f"{path}: {len(decoder.weights)} tensors, {contract.storage.value}")
