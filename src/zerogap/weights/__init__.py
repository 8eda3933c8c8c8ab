"""Models on disk: read from Hugging Face folders, hub ids and GGUF files, written to Hugging Face folders.

`open_model(source)` gives a `ModelFiles`, whose `tensors()` is the seam to everything that computes.
"""

from zerogap.weights.model_files import ModelFiles, sampling_defaults_notice
from zerogap.weights.save import save_folder
from zerogap.weights.source import open_model

__all__ = ["ModelFiles", "open_model", "sampling_defaults_notice", "save_folder"]
