"""Text at the edges: tokenizer and chat template, incremental decoding, stop strings. Ids are the key, never text."""

from zerogap.text.incremental import IncrementalDecoder
from zerogap.text.stop import StopMatcher
from zerogap.text.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopMatcher", "Tokenizer"]
