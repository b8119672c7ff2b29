"""Measurements that `make bench` prints; each runs in a process of its own."""
