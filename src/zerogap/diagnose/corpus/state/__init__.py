"""Weights and buffers that are not what they should be."""
