"""Results that depend on the path, the cache, the neighbours or the run."""
