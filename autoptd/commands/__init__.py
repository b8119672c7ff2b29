"""Bodies of the commands that are more than a few lines; `autoptd/cli.py` says which there are."""
