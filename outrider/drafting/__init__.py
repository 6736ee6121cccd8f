"""What grows speculation trees, for the draft service and for a verify service that drafts by itself."""
