"""Plan a model for 64 GPUs on a machine that has none, and write the program of every stage:

python examples/plan_on_a_laptop.py [MODEL] [FOLDER]
"""

from __future__ import annotations

import sys

import autoptd
from autoptd.models import load_model


def main(name: str = "llama3-70b", folder: str = "out") -> None:
    model, _ = load_model(name)  # shapes only: no weights are allocated or read
    parallel = autoptd.parallelize(model, world=64, cluster="dgx-h100", batch=512)
    print(parallel.plan.explain())
    parallel.plan.save("plan.json")
    parallel.emit(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
