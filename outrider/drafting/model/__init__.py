"""Draft models: growth in bursts of several draft steps, each a batched forward over nodes of any requests."""
