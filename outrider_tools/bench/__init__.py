"""`outrider bench`: put load on a running service, and report figures and plots of it."""
