"""`outrider doctor`: checks of machine, options, models and services."""
