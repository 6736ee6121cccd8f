"""The process that schedules rounds and owns the committed tokens."""
