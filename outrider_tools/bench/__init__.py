"""`outrider bench`: load, figures and plots of a running service."""
