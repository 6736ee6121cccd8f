"""A service in two processes: a door for all network traffic, and an engine that only does the model's work."""
