"""FP8 operands, scales and caches."""
