"""Rounds on a device: CUDA graphs, and the torch reference for CPUs."""
