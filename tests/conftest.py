"""Settings that hold for every test: no network, torch's global state restored, reasons for what is skipped."""

import os

import pytest
import torch

# Read by the hub client when it is first imported, so set before any test module is: no test talks to a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _torch_state():
    """A test may set torch's threads, seed or default dtype; the next one does not see it."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests say why they did not run."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
