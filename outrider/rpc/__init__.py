"""gRPC as every service uses it: server, channels, statuses and process lifecycle."""
