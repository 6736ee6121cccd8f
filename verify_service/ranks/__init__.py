"""Tensor parallelism: rank 0 is the engine, and the other ranks replay what its executor launches."""
