"""Shipped clusters, a TOML file each."""
