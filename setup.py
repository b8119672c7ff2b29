"""Packages as they are in the tree: `autoptd/`, and in it `passes/` and `cost_models/`, which lie beside it."""

from setuptools import find_packages, setup

INSIDE = ("passes", "cost_models")  # folders of the root that install as `autoptd.<name>`

setup(
    packages=[
        *find_packages(include=["autoptd", "autoptd.*"]),
        *(f"autoptd.{name}" for name in find_packages(include=[*INSIDE, *(f"{name}.*" for name in INSIDE)])),
    ],
    package_dir={f"autoptd.{name}": name for name in INSIDE},
)
