"""Passes that bring a traced graph into one form. `normalise` has the list."""
