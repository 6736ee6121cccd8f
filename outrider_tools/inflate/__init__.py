"""Give a small checkpoint a large shape without changing its function, for benchmarks."""
