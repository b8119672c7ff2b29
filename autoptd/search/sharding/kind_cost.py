"""The work of one segment of a kind on one rank, and its cost on a cluster.

`KindWork` is the work: kernels, collectives, bytes. It depends on splits and sizes, not on constants of a device.
`price` turns it into seconds; one work may be priced on many clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoptd.cost_models.cluster import Cluster, Device
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.op_time import OpWork, op_s
from autoptd.layout.execution import ExecutionOptions

Works = tuple[OpWork, ...]
Collectives = tuple[tuple[str, int], ...]  # (name, bytes of the whole tensor)
PARTIAL = ("selective", "ops", "logits")  # policies that recompute a part of a segment


@dataclass(frozen=True)
class Moved:
    """A tensor of rows that is sent to experts, or back. `rows`: of one tp rank; `chosen`: rows of a token;
    `copied`: all ranks get all of them."""

    row_bytes: float
    rows: int
    chosen: float
    experts: int
    copied: bool = False


@dataclass(frozen=True)
class RingWork:
    """A collective of tp that can be taken apart beside products (`passes/sharding/tp_products.py`).

    `collectives`: in forward and in backward; `products`: beside each; `copies`: of what they make, into place.
    """

    collectives: tuple[str, str]
    nbytes: int
    products: tuple[Works, Works]
    copies: tuple[Works, Works]


@dataclass(frozen=True)
class Repeated:
    """The part of a forward pass that a backward pass repeats: kernels, and collectives of tp."""

    works: Works = ()
    collectives: Collectives = ()


Again = tuple[str, bool]  # policy of recomputation, whether the segment is the last of what it recomputes together


@dataclass(frozen=True)
class KindWork:
    """Work of one microbatch."""

    forward: Works
    backward: Works
    recomputed: Mapping[Again, Repeated] = field(default_factory=dict)
    forward_collectives: Collectives = ()
    backward_collectives: Collectives = ()
    activation_bytes: int = 0  # saved for backward
    input_bytes: int = 0  # of the received tensors, all that full recomputation saves
    temporary_bytes: int = 0  # operands and results of the largest op
    weights: Works = ()  # the part of `backward` that computes parameter gradients (W)
    ring_bytes: int = 0  # keys and values that ring attention sends
    ring_sums_bytes: int = 0  # sums of their gradients, which it sends too
    exchanged_bytes: int = 0  # queries, keys, values and results that Ulysses exchanges
    moved: tuple[Moved, ...] = ()  # rows that experts on other ranks take, and their results
    rings: tuple[RingWork, ...] = ()
    statistics: tuple[int, ...] = ()  # bytes of each sum over the batch, all-reduced over dp in both passes


@dataclass(frozen=True)
class KindCost:
    """Seconds of a `KindWork`. `forward_s` and `backward_s` include communication."""

    work: KindWork
    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    again_s: Mapping[Again, float]  # kernels that a policy repeats
    again_comm_s: Mapping[Again, float]
    attention_s: float  # forward kernels of fused attention
    weight_s: float = 0.0  # the part of backward_s that computes parameter gradients (W)

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
    """Seconds of one microbatch. `forward_s` and `backward_s` include all other fields."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    forward_tp_s: float = 0.0  # exposed tp and cp communication
    backward_tp_s: float = 0.0
    weight_s: float = 0.0  # parameter gradients (W), which a schedule may defer
    sharding_s: float = 0.0  # exposed communication of sharded parameters and gradients
    copies_s: float = 0.0  # of activations to the host and back


@dataclass(frozen=True)
class TpSeconds:
    """Exposed seconds of tp communication in forward, in backward, and of gathering again in it; and the seconds that
    products in parts around the ring take longer than whole ones (forward, backward)."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0
    slower_s: tuple[float, float] = (0.0, 0.0)


def price(work: KindWork, cluster: Cluster, ranks: int, world: int = 0) -> KindCost:
    """Return the cost of work on `ranks` adjacent tp ranks; `world`: ranks of all tp groups, 0 for one group."""
    device = cluster.device

    def comm_s(each: Collectives) -> float:
        return sum(collective_s(name, nbytes, cluster, ranks, 1, world) for name, nbytes in each)

    forward_comm, backward_comm = comm_s(work.forward_collectives), comm_s(work.backward_collectives)
    return KindCost(
        work=work,
        forward_s=work_s(device, work.forward) + forward_comm,
        backward_s=work_s(device, work.backward) + backward_comm,
        forward_comm_s=forward_comm,
        backward_comm_s=backward_comm,
        again_s={how: work_s(device, again.works) for how, again in work.recomputed.items()},
        again_comm_s={how: comm_s(again.collectives) for how, again in work.recomputed.items()},
        attention_s=work_s(device, (w for w in work.forward if w.attends)),
        weight_s=sum(op_s(device, w) for w in work.weights),
    )


def tp_seconds(cost: KindCost, method: ExecutionOptions, cluster: Cluster, ranks: int, world: int = 0) -> TpSeconds:
    """Return what tp communication adds to the passes of a segment, under the options of an execution.

    Sums of input gradients, and what is re-gathered, are exposed: how much of them the products beside them hide in an
    emitted program was not measured. By hand the product of the input's gradient hides what is re-gathered, as in
    Megatron-LM (Korthikanti et al. 2022, section 4.2.2).
    """
    again = method.gathers == "again" and ranks > 1
    gathered = [n for name, n in cost.work.forward_collectives if name == "all_gather" and again]
    forward_s, backward_s = cost.forward_comm_s, cost.backward_comm_s
    again_s = sum(collective_s("all_gather", n, cluster, ranks, 1, world) for n in gathered)
    compute_s = cost.backward_s - backward_s
    if method.kernels == "fused":
        again_s = max(0.0, again_s - (compute_s - cost.weight_s))
    if method.rings:
        hidden, slower = _rings(cost.work, cluster, ranks, world)
        return TpSeconds(forward_s - hidden[0], backward_s - hidden[1], again_s - again * hidden[2], slower)
    if "tp" in method.overlap and ranks > 1:
        forward_s = exposed_s(forward_s, cost.forward_s - forward_s, ranks)
        backward_s = exposed_s(backward_s, compute_s, ranks)
        if again_s and method.kernels != "fused":
            again_s = exposed_s(again_s, compute_s, ranks)
    return TpSeconds(forward_s, backward_s, again_s)


def _rings(
    work: KindWork, cluster: Cluster, ranks: int, world: int
) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """Price the products around the ring as `ranks` products of equal parts of their rows.

    Returns the seconds of communication that they hide in forward, in backward and of what is re-gathered, and the
    seconds that they take longer in forward and in backward. All messages take as long as the collective; one of the
    parts is exposed, as before the first of a pipeline. What is re-gathered travels beside the same products as the
    gradients of what was gathered.
    """
    device = cluster.device
    hidden, slower = [0.0, 0.0, 0.0], [0.0, 0.0]
    for ring in work.rings:
        comm = [collective_s(name, ring.nbytes, cluster, ranks, 1, world) for name in ring.collectives]
        for i, (products, copies) in enumerate(zip(ring.products, ring.copies, strict=True)):
            whole_s = sum(op_s(device, product) for product in products)
            parts_s = sum(ranks * op_s(device, _part(product, ranks)) for product in products)
            exposed = exposed_s(comm[i], parts_s, ranks)
            hidden[i] += comm[i] - exposed
            slower[i] += max(0.0, parts_s - whole_s) + sum(op_s(device, copy) for copy in copies)
            if i == 1 and ring.collectives[0] == "all_gather":
                hidden[2] += comm[0] + exposed - exposed_s(comm[0] + comm[1], parts_s, ranks)
    return (hidden[0], hidden[1], hidden[2]), (slower[0], slower[1])


def _part(product: OpWork, parts: int) -> OpWork:
    """Return one of equal parts of a product's rows."""
    rows = None if product.m is None else max(1, product.m // parts)
    return replace(product, flops=product.flops / parts, nbytes=product.nbytes / parts, m=rows)


def context_seconds(
    cost: KindCost, method: ExecutionOptions, cluster: Cluster, ranks: int, stride: int, world: int = 0
) -> tuple[float, float]:
    """Return the exposed seconds (forward, backward) of communication over `ranks` of cp.

    Ulysses exchanges all four tensors of attention and their gradients, all of it exposed. Of the messages around a
    ring, attention hides what it lasts. Keys and values take one step less than there are ranks, in both passes. Sums
    of their gradients, in float32 at least, take one step more, to their owner (`ops/context_attention.py`). By hand
    they have the type of the keys, and take no more steps than these (Transformer Engine, AttnFuncWithCPAndKVP2P).
    """
    if method.context == "ulysses":
        nbytes = cost.work.exchanged_bytes * ranks
        exchange_s = collective_s("all_to_all", nbytes, cluster, ranks, stride, world) if nbytes else 0.0
        return exchange_s, exchange_s
    if ranks == 1 or not cost.work.ring_bytes:
        return 0.0, 0.0
    keys_s = sums_s = collective_s("all_gather", cost.work.ring_bytes * ranks, cluster, ranks, stride, world)
    if method.kernels != "fused":
        nbytes = cost.work.ring_sums_bytes * ranks
        sums_s = collective_s("all_gather", nbytes, cluster, ranks, stride, world) * ranks / (ranks - 1)
    attention_s = cost.attention_s
    return exposed_s(keys_s, attention_s, ranks), exposed_s(keys_s + sums_s, 2 * attention_s, ranks)


def floor_s(work: KindWork, device: Device, ranks: int) -> float:
    """Return a lower bound on the seconds of both passes for any split of one rank's `work` over `ranks`.

    Products run at the device's best rate, bytes and attention at theirs, all divided by `ranks`; launches are not
    divided, and communication is free.
    """
    return sum(_floor_s(device, works, ranks) for works in (work.forward, work.backward))


def _floor_s(device: Device, works: Works, ranks: int) -> float:
    busy_s = sum(_ideal_s(device, work) / ranks + _launched(work, ranks) * device.launch_s for work in works)
    return max(busy_s, device.dispatch_s * sum(work.launches for work in works if not work.part))


def _launched(work: OpWork, ranks: int) -> float:
    """Return the least number of kernels of a rank: work that runs in parts has fewer parts on a smaller share."""
    return work.launches / ranks if work.part else work.launches


def _ideal_s(device: Device, work: OpWork) -> float:
    if work.kind == "matmul":
        work = replace(work, m=None, n=None, k=None, odd=False)
    return max(0.0, op_s(device, work) - work.launches * device.launch_s)


def work_s(device: Device, works: Iterable[OpWork]) -> float:
    """Return seconds of kernels in sequence, limited by the device or by the host that launches them."""
    busy_s, launches = 0.0, 0
    for work in works:
        busy_s += op_s(device, work)
        launches += 0 if work.part else work.launches
    return max(busy_s, device.dispatch_s * launches)


def exposed_s(comm_s: float, compute_s: float, pieces: int) -> float:
    """Return the exposed communication: its first of `pieces`, and the excess of the others over `compute_s`."""
    first = comm_s / pieces
    return first + max(0.0, comm_s - first - compute_s)
