"""gRPC as every service uses it: server, channel, statuses, the life of a process."""
