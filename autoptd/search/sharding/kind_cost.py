"""What one segment of a kind does on one rank, and its price on a cluster.

`KindWork` is the work: kernels, collectives, bytes. It depends on the splits and sizes, not on any constant of a
device. `price` turns it into seconds; the same work may be priced on many clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoptd.cost_models.cluster import Cluster, Device
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.op_time import OpWork, op_s

Works = tuple[OpWork, ...]
Collectives = tuple[tuple[str, int], ...]  # (name, bytes of the whole tensor)
PARTIAL = ("selective", "ops")  # policies of recomputation that run a part of a segment again


@dataclass(frozen=True)
class KindWork:
    """Per microbatch. `again`: by policy, the forward kernels that partial recomputation runs once more."""

    forward: Works
    backward: Works
    again: Mapping[str, Works] = field(default_factory=dict)
    forward_collectives: Collectives = ()
    backward_collectives: Collectives = ()
    activation_bytes: int = 0  # kept for the backward pass
    input_bytes: int = 0  # of what it receives: all that a full recompute keeps
    temporary_bytes: int = 0  # the largest op's operands and results
    weights: Works = ()  # of `backward`: those that make gradients of parameters alone
    ring_bytes: int = 0  # of keys and values, as ring attention passes them on
    exchanged_bytes: int = 0  # of queries, keys, values and results, as Ulysses exchanges them


@dataclass(frozen=True)
class KindCost:
    """Seconds of a `KindWork`. `forward_s` and `backward_s` include communication."""

    work: KindWork
    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    policy_s: Mapping[str, float]
    attention_s: float  # of fused attention, forward
    weight_s: float = 0.0  # of backward_s: gradients of parameters

    @property
    def activation_bytes(self) -> int:
        return self.work.activation_bytes

    @property
    def input_bytes(self) -> int:
        return self.work.input_bytes

    @property
    def temporary_bytes(self) -> int:
        return self.work.temporary_bytes


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of one microbatch. `forward_s` and `backward_s` hold all that the others name."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    forward_tp_s: float = 0.0  # not hidden by compute
    backward_tp_s: float = 0.0
    weight_s: float = 0.0  # of backward_s: gradients of parameters, which a schedule may put off
    sharding_s: float = 0.0  # exchange of sharded parameters and gradients, not hidden


def price(work: KindWork, cluster: Cluster, ranks: int, world: int = 0) -> KindCost:
    """What the work takes on `ranks` tensor-parallel ranks, neighbours in the cluster, of groups that fill `world`."""
    device = cluster.device
    forward_comm, backward_comm = (
        sum(collective_s(name, nbytes, cluster, ranks, 1, world) for name, nbytes in each)
        for each in (work.forward_collectives, work.backward_collectives)
    )
    return KindCost(
        work=work,
        forward_s=work_s(device, work.forward) + forward_comm,
        backward_s=work_s(device, work.backward) + backward_comm,
        forward_comm_s=forward_comm,
        backward_comm_s=backward_comm,
        policy_s={policy: work_s(device, works) for policy, works in work.again.items()},
        attention_s=work_s(device, (w for w in work.forward if w.attends)),
        weight_s=sum(op_s(device, w) for w in work.weights),
    )


def floor_s(work: KindWork, device: Device, ranks: int) -> float:
    """What no split of this work of one rank over `ranks` can be quicker than, both passes, without communication.

    Products at the device's best rate, bytes and attention at theirs, all of it shared out; every op is launched all
    the same.
    """
    return sum(_floor_s(device, works, ranks) for works in (work.forward, work.backward))


def _floor_s(device: Device, works: Works, ranks: int) -> float:
    busy_s = sum(_ideal_s(device, work) / ranks + _launched(work, ranks) * device.launch_s for work in works)
    return max(busy_s, device.dispatch_s * sum(work.launches for work in works if not work.part))


def _launched(work: OpWork, ranks: int) -> float:
    """Kernels of a rank at the least: of what goes in stretches, the fewer the smaller its share."""
    return work.launches / ranks if work.part else work.launches


def _ideal_s(device: Device, work: OpWork) -> float:
    if work.kind == "matmul":
        work = replace(work, m=None, n=None, k=None)
    return max(0.0, op_s(device, work) - work.launches * device.launch_s)


def work_s(device: Device, works: Iterable[OpWork]) -> float:
    """Seconds of kernels one after the other: of the device, or of the host that launches them."""
    busy_s, launches = 0.0, 0
    for work in works:
        busy_s += op_s(device, work)
        launches += 0 if work.part else work.launches
    return max(busy_s, device.dispatch_s * launches)


def exposed_s(comm_s: float, compute_s: float, pieces: int) -> float:
    """What compute of that length does not hide: one of so many pieces, and what is longer than the compute."""
    first = comm_s / pieces
    return first + max(0.0, comm_s - first - compute_s)
