"""Drafters: what guesses the target's next tokens. Nothing here knows streams, credits or trees."""
