"""Write the planned program as Python that a person would accept in review."""
