"""Growth of speculation trees, in the draft service and in a verify service that drafts by itself."""
