"""Measurements that `make bench` prints; each runs in a process of its own.

Plans are made here, never found where an earlier run kept them, and leave nothing behind.
"""

import os

os.environ["AUTOPTD_CACHE"] = "off"
