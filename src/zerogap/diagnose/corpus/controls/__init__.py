"""Differences that are harmless: none may be blamed."""
