"""A small checkpoint as the same function at a large shape, for benchmarks."""
