"""The places where a step's host may wait for the device, or copy to it, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.runtime.fake_device.device import BlockingCopy, DeviceFault, HostWaits, Place

FIRST, LATER, EVALUATED = "the first step", "a later step", "an evaluation"


@dataclass(frozen=True)
class Wait:
    """`when`: how often; `why`: what the host cannot know otherwise. `most`: in a step of a rank, if it is bounded.

    `fault`: what is allowed there.
    """

    when: str
    why: str
    kinds: tuple[str, ...] = (FIRST, LATER)
    most: int | None = None
    fault: type[DeviceFault] = HostWaits


EVERY = (FIRST, LATER, EVALUATED)
EVERY_STEP = "once a step"
ALLOWED: dict[Place, Wait] = {
    ("runtime/trainer.py", "_finish"): Wait(
        EVERY_STEP,
        "loss, norm and used parameters of all ranks decide whether and how the optimizer steps",
        most=1,
    ),
    ("runtime/batch.py", "check_specs"): Wait(
        "once a step and input of fixed numbers, if the caller gives it on the device",
        "a wrong batch is an error of the host",
        EVERY,
    ),
    ("runtime/batch_counts.py", "of"): Wait(
        "once a step, if the loss compares samples",
        "the tensor of all samples' rows has as many as the batch",
        EVERY,
        most=1,
    ),
    ("runtime/trainer.py", "eval_step"): Wait("once an evaluated batch", "the loss is returned", (EVALUATED,), most=1),
    ("runtime/evaluation/evaluator.py", "_places"): Wait(
        "once a batch of metrics, and after the last",
        "the tensor of all values has a row of each rank's samples",
        (EVALUATED,),
        most=2,
    ),
    ("runtime/evaluation/evaluator.py", "rows"): Wait(
        "twice a batch of metrics", "their values are returned, if no rank had a wrong batch", (EVALUATED,), most=2
    ),
    ("runtime/report.py", "_synchronise"): Wait(
        "twice an evaluated batch",
        "queued steps are training, and evaluations are not, in the rates of a report",
        (EVALUATED,),
        most=2,
    ),
    ("runtime/trainer.py", "most_microbatches"): Wait(
        "once an evaluated batch, if its forward passes communicate over dp",
        "ranks with fewer microbatches than others run as many",
        (EVALUATED,),
        most=1,
    ),
    ("runtime/optimizers/step.py", "run"): Wait(
        "once a step, if optimizer state is on the host",
        "the host reads gradients that the device copied there",
        most=1,
    ),
    ("ops/library.py", "more_than_one"): Wait(
        "once a step and batch norm, after the loss was read",
        "one element per channel has no variance: an error before anything changes",
    ),
    ("ops/expert_axis.py", "route"): Wait(
        "once a forward pass of experts on ranks of their own",
        "an exchange of rows takes their numbers on the host",
        EVERY,
    ),
    ("ops/expert_axis.py", "batch_route"): Wait(
        "the same, if experts have a dim of their own", "an exchange of rows takes their numbers on the host", EVERY
    ),
    ("ops/library.py", "_group_sizes"): Wait(
        "once a grouped product, except in bf16",
        "torch has no grouped kernel for the type: one product per expert",
        EVERY,
    ),
    ("torch.optim._adafactor", "_single_tensor_adafactor"): Wait(
        "twice a step and parameter of Adafactor", "torch's own code reads norms of parameter and update"
    ),
    ("runtime/comm/handshake.py", "_send"): Wait(
        "in the first step", "stages compare the messages of a step", (FIRST,), fault=BlockingCopy
    ),
    ("runtime/comm/handshake.py", "_receive"): Wait(
        "in the first step", "stages compare the messages of a step", (FIRST,)
    ),
}


def allowed(place: Place, kind: str, fault: type[DeviceFault]) -> bool:
    return place in ALLOWED and kind in ALLOWED[place].kinds and fault is ALLOWED[place].fault


def too_often(met: Counter[Place]) -> list[str]:
    """Return the places of a step that waited more often than they may."""
    return [
        f"{place[1]} of {place[0]}: {n} times instead of {most}"
        for place, n in met.items()
        if (most := ALLOWED[place].most) is not None and n > most
    ]


def table() -> str:
    """Return the places as a table of docs/device.md."""
    rows = [f"| `{file}`: `{name}` | {wait.when} | {wait.why} |" for (file, name), wait in ALLOWED.items()]
    return "\n".join(["| place | how often | why |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
