"""Code of models about what the plan decides: recomputation, and the ranks that compute."""
