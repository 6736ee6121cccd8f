"""The HTTP server and the routes that are of no particular API."""
