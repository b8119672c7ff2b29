"""A plan's notes: ops without a rule, devices, attention kernels, placements of embedding tables and their costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.dispatch import MEDIAN, QUANTILE, fullest
from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED
from autoptd.errors import PlanError
from autoptd.passes.analysis.attention import form_of
from autoptd.passes.graph import infos
from autoptd.passes.rules.lookup import discovery
from autoptd.passes.sharding.sharding import ops_of, parameter_splits
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.search.infeasible import InfeasibleSplit
from autoptd.search.pipeline.evaluate import Staged
from autoptd.search.runners_up import Answer
from autoptd.search.sharding.dispatch_cost import experts_of
from autoptd.search.sharding.kind_cost import work_s
from autoptd.text import fold_names

if TYPE_CHECKING:
    from autoptd.compile.traced import TracedModel


def device_of(staged: Staged, cluster: Cluster, stage: int) -> str:
    """Return the device type of a stage; "" if the cluster has only one."""
    pools = staged.candidate.pools
    return cluster.pools[pools[staged.route.holder(stage)]].device.name if pools else ""


def answer_notes(source: TracedModel, answer: Answer) -> list[str]:
    """Return the notes of a plan that a search found."""
    notes = list(source.folded.loss_form.notes)
    found = (discovery(op.call) for op in source.known.facts.ops.values())
    notes += [f"no row in the rule table: {text}" for text in dict.fromkeys(str(w) for w in found if w is not None)]
    if answer.staged.candidate.pools:
        order = dict.fromkeys(
            device_of(answer.staged, answer.staged.chunks.cluster, k) for k in range(answer.staged.candidate.pp)
        )
        notes.append(f"the pipeline runs on {', then '.join(order)}: assign ranks to nodes in this order")
    unused = [source.folded.traced.parameters[n.name] for n in source.folded.unused_parameters]
    if unused:
        notes.append(f"parameters that do not reach the loss are not trained: {', '.join(sorted(unused))}")
    notes += statistics_notes(source, answer.staged)
    notes += update_notes(source)
    notes += whole_notes(answer.staged)
    notes += attention_notes(source, answer.staged)
    notes += head_notes(answer.staged)
    notes += _embedding_notes(source, answer)
    notes += ring_notes(answer.staged)
    notes += _context_notes(source, answer)
    notes += _expert_notes(answer)
    waits = "; splits are chosen as if no segment waited for the host, as some do: others may be a few percent faster"
    sends = "; splits are chosen as if messages between stages took no time: others, that send less, may be faster"
    notes.append(
        f"{answer.considered} configurations considered, {answer.visited} partitioned into stages; "
        f"by this cost model none is faster by more than {answer.gap:.1%}"
        f"{waits * _waits_for_host(answer.staged)}{sends * _sends_whole(answer.staged)}"
    )
    return notes


def _waits_for_host(staged: Staged) -> bool:
    """Return whether the device waits for the host to launch kernels for 1 % of the passes or more, over tp ranks:
    other splits may have fewer kernels."""
    device = staged.chunks.cluster.device
    at_once, waiting_s, total_s = device.model_copy(update={"dispatch_s": 0.0}), 0.0, 0.0
    for count, cost in staged.chunks.sharded.every_kind:
        for works in (cost.work.forward, cost.work.backward):
            total_s += count * work_s(device, works)
            waiting_s += count * (work_s(device, works) - work_s(at_once, works))
    return staged.candidate.tp > 1 and waiting_s >= 0.01 * total_s


def _sends_whole(staged: Staged) -> bool:
    """Return whether stages send tensors that all tp ranks have whole, in 1 % of the passes' time or more: other splits
    may send parts."""
    crossing, passes_s = staged.chunks.messages.crossing, sum(s.forward_s + s.backward_s for s in staged.stages)
    whole = any(crossing[first][0][0] for first, _ in staged.solution.boundaries[1:])
    return staged.candidate.tp > 1 and whole and sum(map(sum, staged.sends_s)) >= 0.01 * passes_s


def update_notes(source: TracedModel) -> list[str]:
    """Return a note on the buffers that a step updates, if there are any."""
    names = fold_names(source.updates)
    if not names:
        return []
    return [
        f"forward updates buffers ({', '.join(names)}): once per step, from {source.folded.updates.width:,} sums over "
        "the whole batch, after all forward passes have read the old values"
    ]


def ring_notes(staged: Staged) -> list[str]:
    """Return a note on how much of tp's communication products around the ring take apart."""
    if not staged.chunks.method.rings or staged.candidate.tp == 1:
        return []
    works = [(count, cost.work) for count, cost in staged.chunks.sharded.every_kind]
    apart = sum(count * 2 * len(work.rings) for count, work in works)
    every = sum(count * (len(work.forward_collectives) + len(work.backward_collectives)) for count, work in works)
    return [
        f"overlap of tp: {apart} of {every} collectives of a microbatch travel beside products, as far as these last; "
        "the others wait"
    ]


def whole_notes(staged: Staged) -> list[str]:
    """Return a note on the parameters that the optimizer updates as whole tensors, and what that costs."""
    chunks, c = staged.chunks, staged.candidate
    if not chunks.whole.shapes:
        return []
    ends = [(chunks.on(rank), list(staged.route.of(staged.solution.boundaries, rank))) for rank in range(c.pp)]
    seconds = max(costs.whole_s(costs.whole_load(runs)) for costs, runs in ends)
    memory = max(costs.whole_load(runs).temporary_bytes(costs.main, costs.stage_ranks) for costs, runs in ends)
    moved = sum(costs.whole_load(runs).moved for costs, runs in ends)
    names = fold_names(chunks.whole.shapes)
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = f"{chunks.optimizer} updates whole tensors ({shown})"
    if not moved:
        return [f"{text}, which every rank holds: no exchange"]
    return [
        f"{text}, each at one of the ranks of its stage: {moved:,} elements are brought together per step and sent "
        f"back, {1e3 * seconds:,.3g} ms with the products of the update, {memory / 2**20:,.0f} MiB meanwhile on a rank"
    ]


def batch_notes(staged: Staged, batch: int) -> list[str]:
    """Return a note on ranks and microbatches of unequal sizes, if there are any."""
    c = staged.candidate
    padded = c.dp * c.micro * c.microbatches
    if padded == batch:
        return []
    shares = sorted({batch // c.dp, -(-batch // c.dp)})
    return [
        f"a batch of {batch} is not {c.dp} × {c.microbatches} × {c.micro}: data-parallel ranks have "
        f"{' or '.join(map(str, shares))} samples, whose last microbatch may be smaller. Every sample counts once; a "
        f"step takes as long as with {padded}"
    ]


def memory_notes(staged: Staged, cluster: Cluster) -> list[str]:
    """Return a warning if a rank is not sure to have enough memory."""
    pools = staged.candidate.pools or (0,) * staged.candidate.pp
    ranks = [(m.needed, cluster.pools[pool].device.memory_bytes) for m, pool in zip(staged.memory, pools, strict=True)]
    needed, whole = max(ranks, key=lambda rank: rank[0] / rank[1])
    if needed * MOST_MEASURED <= whole:
        return []
    return [
        f"may run out of memory: the fullest rank is predicted to need {needed / 2**30:.1f} of {whole / 2**30:.1f} "
        f"GiB, and with {CONFIDENCE:.0%} confidence less than {MOST_MEASURED * needed / 2**30:.1f} GiB"
    ]


def statistics_notes(source: TracedModel, staged: Staged) -> list[str]:
    """Return a note on the statistics of the batch that samples are normalised by, if there are any."""
    found, dp = source.folded.statistics, staged.candidate.dp
    if not found.count:
        return []
    return [
        f"samples are normalised by {found.count:,} sums over the batch ({found.op}), each an all-reduce over dp {dp} "
        "in both passes: one microbatch per step, since the first of several would need samples of the others"
    ]


def attention_notes(source: TracedModel, staged: Staged) -> list[str]:
    """Return notes on attention that runs in another kernel than flash, which the cost model assumes, and why."""
    device, ring = staged.chunks.cluster.device.kind, staged.candidate.cp > 1 and staged.method.context == "ring"
    found: Counter[tuple[str, str]] = Counter()
    fast = 0
    for kind, segment in source.folded.representatives.items():
        for _, node in ops_of(segment):
            op = source.known.facts.ops[node]
            if op.work.kind == "attention":
                form, times = form_of(op.call, ring), source.folded.multiplicity(kind)
                fast += times * form.dropped
                form = replace(form, dropped=form.dropped and not staged.method.drops_fast(staged.candidate.cp))
                found[form.kernel(device), form.why(device)] += times
    notes = [
        f"{_subject(count)} {_KERNELS[kernel]}: {why}" for (kernel, why), count in found.items() if kernel != "fused"
    ]
    return notes + _fast_dropout_notes(staged, fast)


def _fast_dropout_notes(staged: Staged, count: int) -> list[str]:
    """Return what `dropout` "fast" means for so many attentions that drop scores."""
    if staged.method.dropout != "fast":
        return []
    if not count:
        return ["dropout fast has no effect: no attention drops scores"]
    if not staged.method.drops_fast(staged.candidate.cp):
        return ["dropout fast has no effect: tiles of ring attention drop the same elements under every plan"]
    return [
        f"{_subject(count)} dropped by the kernel's own masks (dropout fast): they depend on the plan, so that another "
        "plan trains with other ones, and verify has nothing to compare with"
    ]


def head_notes(staged: Staged) -> list[str]:
    """Return a note if logits in chunks were asked for, and no head has them."""
    used = (policy for stage in staged.solution.policies for policy in stage.values())
    if staged.method.loss != "chunked" or "logits" in used:
        return []
    return [
        "loss chunked has no effect: chunks are of the vocabulary, for logits that one product computes, nothing but a "
        "cross entropy reads, and ranks do not exchange under these splits"
    ]


def _subject(count: int) -> str:
    return "attention is" if count == 1 else f"{count} attentions are"


_KERNELS = {
    "written": "computed without a fused kernel, in blocks of scores, which takes several times as long",
    "efficient": "computed by torch's memory-efficient kernel, at about half the rate of the flash kernel",
}


def _expert_notes(answer: Answer) -> list[str]:
    """Return what the prediction assumes of a mixture whose experts are on ranks of their own."""
    c, routed = answer.staged.candidate, experts_of(answer.staged.sharded)
    if c.ep == 1:
        return []
    if answer.staged.method.routing == "balanced":
        return ["routing is assumed to be balanced: a rank whose experts get more rows takes more time and memory"]
    most, median = (fullest(c.ep, *routed, "natural", quantile) for quantile in (QUANTILE, MEDIAN))
    return [
        f"routing is assumed to be natural: the fullest of {c.ep} ranks gets {median:.2f} times the average rows in "
        f"the median pass, and {most:.2f} times, for which memory is counted, in all but {1 - QUANTILE:.0%}"
    ]


def _context_notes(source: TracedModel, answer: Answer) -> list[str]:
    """Return the reason if the tokens cannot be split over the plan's cp ranks, or the experts beside them."""
    c, tokens = answer.staged.candidate, source.sizes.get(SEQUENCE, 1)
    error = source.known.context_error(c.cp, c.tp, c.ep, tokens, answer.staged.method.context)
    return [f"the plan is a prediction: {error.what} ({error.where})"] if error else []


def _embedding_notes(source: TracedModel, answer: Answer) -> list[str]:
    """Return each embedding table's placement, with the time of a microbatch under each alternative.

    Left out if tensors were pinned by hand. Each alternative is a solution of the sharding ILP, as long as the plan's.
    """
    if answer.tensors.ranks == 1 or answer.question.pins:
        return []
    names = source.folded.traced.parameters
    placed = parameter_splits(source.folded, answer.staged.sharded.sharding)
    notes = []
    for segment in source.folded.segments:
        for _, node in ops_of(segment):
            if node.target is torch.ops.aten.embedding.default:
                table = node.args[0]
                assert isinstance(table, fx.Node)
                if table.name not in names:  # computed from a table, by dropout, say
                    continue
                rows, width = infos(table)[0].shape
                name = names[table.name]
                notes.append(_embedding_note(f"{name} [{rows}, {width}]", placed[name], _alternatives(answer, name)))
                if int(rows) % answer.tensors.ranks:
                    notes[-1] += f"; its {rows} rows do not divide by tp {answer.tensors.ranks}"
    return notes


def _embedding_note(table: str, placed: str, costs: list[tuple[str, float | None]]) -> str:
    """Return `embedding w [8, 4] is split by rows (S0): 2.00 ms per microbatch; replicated (B) 2.10 ms`."""
    times = dict(costs)
    mine = times.pop(placed, None)
    spent = "" if mine is None else f": {mine * 1e3:.2f} ms per microbatch"
    others = [
        f"{_SPLIT_WORDS.get(p, 'replicated')} ({p}) " + ("impossible" if t is None else f"{t * 1e3:.2f} ms")
        for p, t in times.items()
    ]
    against = f"; {', '.join(others)}" if others else ""
    return f"embedding {table} is {_SPLIT_WORDS.get(placed, 'replicated')} ({placed}){spent}{against}"


_SPLIT_WORDS = {"S0": "split by rows", "S1": "split by hidden size"}


def _alternatives(answer: Answer, name: str) -> list[tuple[str, float | None]]:
    """Return (placement, seconds per microbatch) for each placement of a parameter; None where it is not legal."""
    tensors, sharded = answer.tensors, answer.staged.sharded
    node, placed = tensors.parameter_node(name), parameter_splits(tensors.folded, sharded.sharding)[name]

    def seconds(slot: str, label: str) -> float | None:
        if label == placed:
            return sharded.seconds
        try:
            return tensors.solve(answer.question.second_per_byte, fixed={slot: label}).seconds
        except (InfeasibleSplit, PlanError):
            return None

    return [] if node is None else [(choice.label, seconds(node.name, choice.label)) for choice in node.choices]
