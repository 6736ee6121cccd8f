"""Training of drafters: text from the target itself, the trainable modules, and how well they guess. Needs torch."""
