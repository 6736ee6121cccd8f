"""Verify's copies of the trees, the draft replicas that grow them, what a round takes and waits for. Torch-free."""
