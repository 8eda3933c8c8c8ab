"""Folders that are whole or absent: what is written beside the target and synced gets the target's name at the end."""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

WRITE_ERRORS = (OSError, SafetensorError)  # what a full disk or a read-only folder raises, tensors or not


def replace_folder(partial: Path, target: Path) -> None:
    """Sync the files of `partial` to disk and give it the name `target`; both lie in the same parent folder.

    A folder of that name is moved aside first and removed last: at no moment is there less than one whole copy.
    """
    for entry in [*partial.iterdir(), partial]:
        _sync(entry)
    if target.exists():
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)
    _sync(target.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder that a killed process must not leave half deleted under its name: it loses the name first."""
    gone = path.with_name(f".{path.name}.old-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
