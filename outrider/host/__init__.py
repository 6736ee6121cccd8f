"""A service in two processes: a door that talks to the world, and an engine that does nothing but its own work."""
