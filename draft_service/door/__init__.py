"""The process that verify services connect to. Torch-free."""
