"""Parts of the axes: slices of a dim by rank, messages around a ring, and products beside them."""
