"""What door and engine tell each other. Torch-free."""
