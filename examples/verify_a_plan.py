"""Verify a plan on a CPU; then break it in three ways, each of which is detected:

    python examples/verify_a_plan.py

The faults are a hand-written strategy that no rule allows, a program without a necessary all-reduce, and a plan that
was edited after its verification.
"""

from __future__ import annotations

import json
import sys

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.verification.report import text
from autoptd.verification.smaller.smaller import subject_of
from autoptd.verification.verdict import judge, make_trial, replace_text, verify_plan

MESH = {"dp": 2, "tp": 2, "pp": 2, "micro": 1, "sequence_parallel": False}


def main() -> int:
    """Return 0 if the correct plan is verified and every broken one is refused."""
    model = NanoGPT(GPTSizes(vocab=256, max_seq=64, width=64, layers=4, heads=4))
    plan = autoptd.plan(model, world=8, batch=16, seq=64, precision="fp32", fix=MESH, cluster="dgx-h100")

    right = verify_plan(plan, model)
    print(text(right, 100))
    certified = plan.model_copy(update={"certificate": right.certificate})

    kind, ops = next((kind, ops) for kind, ops in plan.strategies.items() if "mlp" in kind or "up" in kind)
    wrong = {**plan.strategies, kind: {**ops, list(ops)[-1]: "S0, S0 -> S0"}}
    refused = _refusal(lambda: verify_plan(plan.model_copy(update={"strategies": wrong}), model))
    print(f"A strategy that no rule allows:\n{refused}\n")

    trial = make_trial(subject_of(plan, model))
    broken = judge(replace_text(trial, "tp.all_reduce_both(out)", "out"), plan)
    where, what = broken.faults[0]
    print(f"A program without a necessary all-reduce:\n{where}: {what}\n")

    data = json.loads(certified.to_json())
    data["schedule"]["kind"] = "gpipe"
    edited = _refusal(lambda: autoptd.parallelize(model, plan=Plan.from_json(json.dumps(data))))
    print(f"A plan that was edited after its verification:\n{edited}")
    return 0 if right.agrees and not broken.agrees and refused and edited else 1


def _refusal(run: object) -> str:
    """Call `run`; return the text of its AutoptdError, "" if it raises none."""
    assert callable(run)
    try:
        run()
    except autoptd.AutoptdError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
