"""Checks of the machines before a run (`autoptd doctor`)."""
