"""Packages of the distribution: `autoptd/`, and inside it `passes/` and `cost_models/`, its siblings in the tree."""

from setuptools import find_packages, setup

INSIDE = ("passes", "cost_models")  # top-level folders that are installed as `autoptd.<name>`

setup(
    packages=[
        *find_packages(include=["autoptd", "autoptd.*"]),
        *(f"autoptd.{name}" for name in find_packages(include=[*INSIDE, *(f"{name}.*" for name in INSIDE)])),
    ],
    package_dir={f"autoptd.{name}": name for name in INSIDE},
)
