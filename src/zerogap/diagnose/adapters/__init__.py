"""Other people's stacks as sides of a diagnosis: each adapter records a trace, or answers as a live side.

Nothing here is imported by `import zerogap`; transformers and vllm are imported by the adapter that needs them, when it
runs.
"""
