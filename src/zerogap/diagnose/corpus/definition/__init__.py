"""Log-probs that mean something else, and sequences that are not the same."""
