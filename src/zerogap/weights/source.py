"""From what a user names (a folder, a .gguf file, a hub id) to an opened model."""

import os
import re
from pathlib import Path

import huggingface_hub

from zerogap import env
from zerogap.errors import ConfigError
from zerogap.models.published import PUBLISHED
from zerogap.models.spec import ModelSpec
from zerogap.weights.folder import TOKENIZER_FILES, FolderFiles
from zerogap.weights.gguf_file import GgufFiles
from zerogap.weights.model_files import ModelFiles, read_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_SECONDS = 10.0
QUICK_START = "smollm2-135m-instruct"
"""Stands for the model that `quick_start` fetches once into the cache."""


def open_model(source: str | os.PathLike[str]) -> ModelFiles:
    """Open a Hugging Face folder, a .gguf file, a hub id (`owner/name`) or the quick-start model by its name.

    A local path wins over a hub id.

    Raises:
        ConfigError: nothing there, or the model asks for something unsupported.
        CheckpointError: the files are incomplete, corrupt or foreign.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return FolderFiles(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("model", str(source), "give a folder, a .gguf file or a hub id")
        return GgufFiles(path)
    if str(source) == QUICK_START:
        from zerogap.weights.quick_start import fetch_quick_start_model  # it needs `download` from here

        return open_model(fetch_quick_start_model())
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(str(source)):
        return FolderFiles(download(str(source)))
    raise ConfigError("model", str(source), "no such folder or file, and not a hub id (owner/name)")


def spec_at_hand(source: str | os.PathLike[str]) -> ModelSpec | None:
    """What a model is, by what is on this machine: a folder, a .gguf file, the cache of an earlier download, or what is
    packaged of published models; None where that is nothing. No network is used.

    Raises:
        ConfigError, CheckpointError: there are files, and they are not those of a supported model.
    """
    if Path(source).expanduser().exists():
        return open_model(source).spec
    hub_id = str(source)
    if hub_id == QUICK_START:
        from zerogap.weights.quick_start import HUB_ID, packaged_file  # it needs `download` from here

        if packaged_file().is_file():
            return open_model(packaged_file()).spec
        hub_id = HUB_ID
    if not _HUB_ID.fullmatch(hub_id):
        return None
    found = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
    config = read_json(Path(found)) if isinstance(found, str) else PUBLISHED.get(hub_id)
    return None if config is None else ModelSpec.from_hf(config)


def download(hub_id: str, timeout_seconds: float = _HUB_TIMEOUT_SECONDS) -> Path:
    """The local folder of a hub model, fetched if needed (never pickles, never code).

    Raises:
        ConfigError: the hub cannot be reached, or has no such model.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            allow_patterns=["config.json", "generation_config.json", "model*.safetensors*", *TOKENIZER_FILES],
            etag_timeout=timeout_seconds,
            local_files_only=env.hub_offline(),
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        mend = f"the hub could not be used ({reason}); give a local folder or .gguf file, or check network and id"
        raise ConfigError("model", hub_id, mend) from error
    return Path(folder)
