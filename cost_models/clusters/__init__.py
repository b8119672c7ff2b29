"""Shipped clusters, one TOML file each; read them with `Cluster.load`."""
