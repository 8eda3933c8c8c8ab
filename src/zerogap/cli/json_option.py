"""Options of several commands that name a file to write (`--json FILE`): refused before the work that would be lost."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(path: Path | None, option: str = "--json") -> None:
    """Check where results will be written; None: nowhere.

    Args:
        option: what names the file.

    Raises:
        ConfigError: the file cannot be written.
    """
    from zerogap.errors import ConfigError

    if path is None:
        return
    place = path.absolute().parent
    if not place.is_dir():
        raise ConfigError(option, str(path), f"there is no folder {place}: make it, or name another file")
    if path.is_dir():
        raise ConfigError(option, str(path), "it is a folder; name a file")
    if not os.access(path if path.exists() else place, os.W_OK):
        raise ConfigError(option, str(path), "it may not be written; name another file")
