"""Normalisation: passes that bring a traced graph into the form that all later passes assume. Import `normalise`, which
states the form and runs the passes in order. Must not import `plans`, `search`, `codegen` or `runtime`."""
