"""Training of drafters: text from the target itself, the trainable modules, and evaluation. Needs torch."""
