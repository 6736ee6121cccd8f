"""The HTTP server, and the routes that belong to no particular API."""
