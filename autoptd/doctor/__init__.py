"""`autoptd doctor`: is this machine, are these ranks, ready for a run."""
