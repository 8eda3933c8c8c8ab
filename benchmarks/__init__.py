"""Side-by-side measurements. Each module prints ratios from interleaved runs and writes a result file."""
