"""A plan, or two side by side, as one HTML page that needs no server and asks for nothing else."""
