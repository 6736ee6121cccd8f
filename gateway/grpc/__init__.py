"""The gRPC door."""
