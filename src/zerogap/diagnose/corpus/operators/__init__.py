"""One operator computed another way."""
