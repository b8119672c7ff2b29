"""Refusal of ops that mix samples: data-parallel ranks and microbatches would mix only the samples that they have.

The graph is walked from its inputs, and each tensor gets a state: which samples its rows belong to (`rows.py`). An op's
rule says what happens to the batch dim. Samples stay independent if they are the same factor of the op's loops in all
operands, and that factor appears in every output:

    b h, o h -> b o       a layer
    . h -> . h            a norm over the batch, a shift of samples: needs the whole dim
    b h -> h              a sum over the batch
    b h, c h -> b c       every sample with every other, as in contrastive losses

An op whose rule does not show this is tried: some samples are changed, and the results of the others must not change.
Moves by computed indices, such as tokens to their experts and back, are proved in the graph (`index_moves.py`,
`row_numbers.py`, `expert_groups.py`). An op that is not proved is refused.

Sums over samples that contribute to the loss only are allowed; `reduce_loss.py` handles them. Ops that pair rows of
different samples are refused, unless they belong to the end of a loss that is computed once per step
(`losses/whole_batch.py`), which is not followed here. A sum over samples that samples read, as in batch norm, is
marked: it must be one over the whole batch (`losses/batch_statistics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.ops.random import DRAWS
from autoptd.passes.batch.batch_dims import (
    SamplePlace,
    counts_in,
    counts_samples,
    forget_place,
    grows,
    is_whole,
    makes_new,
    place_anywhere,
    place_by_shape,
    sample_place,
)
from autoptd.passes.batch.expert_groups import counted, follow_group
from autoptd.passes.batch.index_moves import follow_move
from autoptd.passes.batch.row_numbers import SAME_VALUES, follow_numbers, follow_range, follow_sort, misused
from autoptd.passes.batch.rows import (
    BATCH_ORDER,
    FILLED,
    FIXES,
    PAIRS,
    UNKNOWN,
    Across,
    Order,
    Rows,
    State,
    check_order,
    orders_differ,
    placed_by,
)
from autoptd.passes.graph import (
    ancestors,
    info,
    infos,
    is_float,
    is_getitem,
    op_call,
    operands,
    source_line,
    user_op_name,
)
from autoptd.passes.losses.loss_form import loss_node
from autoptd.passes.normalise.at_example import at_example, needs_example
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.opcall import OpCall, Size, TensorInfo, target_name
from autoptd.passes.random.draws import draws
from autoptd.passes.rules import op_notations as notations
from autoptd.passes.rules.discover import keeps_apart
from autoptd.passes.rules.factor_notation import Loops
from autoptd.passes.rules.lookup import resolve
from autoptd.passes.rules.prove import frozen
from autoptd.passes.rules.table import RULES
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import Traced

States: TypeAlias = "tuple[State, ...]"

READ_BY_SAMPLES = "read by samples"  # in the meta of an op that seems to sum over samples: its state, `Across`
SUMS = "sums over samples"
_ACROSS = "works across samples"
_COUNTS = "computes with the number of samples"
_SHAPED = (  # take sizes of their outputs as arguments; a part of the batch dim is refused by their rules
    *("expand", "narrow", "repeat", "repeat_interleave", "reshape", "slice", "slice_scatter", "split"),
    *("split_with_sizes", "unflatten", "view"),
)
_UNIFORM = ("softmax", "log_softmax", "sum", "mean", "amax", "amin")  # give one value everywhere if they are given one
_BROADCASTING = (  # elementwise losses, whose operands are broadcast from the right
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


def refuse_mixed_samples(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for the first op whose result for one sample depends on others.

    Metrics have their rows in the order of the batch, and read no sums over it.
    """
    metrics = isinstance(traced.objective, Metrics)
    states, statistics = follow_samples(graph, traced, _refuse, statistics=not metrics)
    if metrics:
        check_order(loss_node(graph), states.get(loss_node(graph), (None,)))
    for node, mixed in statistics.items():
        node.meta[READ_BY_SAMPLES] = mixed
    for node, found in states.items():
        for i, state in enumerate(found):
            if isinstance(state, Rows) and state.order != BATCH_ORDER:
                forget_place(node, i)


def follow_samples(
    graph: fx.Graph,
    traced: Traced,
    refuse: Callable[[fx.Node, Across], None],
    counts: Container[fx.Node] = (),
    statistics: bool = True,
) -> tuple[dict[fx.Node, States], dict[fx.Node, Across]]:
    """Return the states of all nodes that depend on samples or their number, but the end of a loss of the whole batch;
    and the numbers that samples read, which must be sums over the whole batch.

    `refuse` is called with each node whose result for one sample depends on others, and with how it does. `counts` have
    the value of the whole batch in every microbatch. Without `statistics`, no sum may be read by samples.
    """
    sized = at_example(graph, traced) if needs_example(graph) else graph
    given = dict(zip(sized.nodes, graph.nodes, strict=True))
    apart = [n for n in sized.nodes if n.op == "call_function" and not is_whole(n)]
    of_samples = (n for n in apart if any(counts_samples(t) for t in infos(n)))
    propagation = Propagation(
        ancestors(of_samples), refuse=lambda node, mixed: refuse(given[node], mixed), statistics=statistics
    )
    for node in sized.nodes:
        if node.op == "placeholder" and node.name in traced.inputs and counts_samples(info(node)):
            propagation.put(node, input_state(node))
        elif node.op == "call_function" and not is_whole(node):
            states = propagation.follow(node)
            propagation.put(node, *(None if given[node] in counts else state for state in states))
    every = {given[node]: states for node, states in propagation.states.items()}
    return every, {given[node]: mixed for node, mixed in propagation.whole.items()}


def input_state(node: fx.Node) -> State:
    """Return the state of an input, whose rows are the samples of its only dim that counts them."""
    place = place_by_shape(info(node))
    return Across(node, "has no dim that counts samples only") if place is None else Rows(place)


def _refuse(node: fx.Node, mixed: Across) -> None:
    raise refusal(mixed)


def refusal(mixed: Across) -> UnsupportedOp:
    """Return the error of an op that mixes samples."""
    return UnsupportedOp(
        f"{user_op_name(mixed.node)} {mixed.reason}: its result for one sample depends on others of the batch, "
        "but each microbatch and data-parallel rank has only a part of the batch",
        where=source_line(mixed.node),
        fix=mixed.fix,
    )


@dataclass
class Propagation:
    """Propagation of states through the graph, node by node."""

    returning: set[fx.Node]  # nodes that count samples, and those that such a node depends on
    slower: Size = 1  # factor of merged dims that is outside the samples (`place_anywhere`)
    refuse: Callable[[fx.Node, Across], None] = _refuse
    statistics: bool = True  # whether samples may read sums over the whole batch
    states: dict[fx.Node, States] = field(default_factory=dict)
    seen: dict[Hashable, _Found] = field(default_factory=dict)  # results for equal ops
    whole: dict[fx.Node, Across] = field(default_factory=dict)  # sums that samples read, if they are of the whole batch

    def put(self, node: fx.Node, *states: State) -> None:
        """Store the states of a node's outputs. Raises UnsupportedOp if samples are mixed that must not be."""
        for state, tensor in zip(states, infos(node), strict=True):
            if isinstance(state, Across) and (state.pairs or counts_samples(tensor)):
                self.refuse(node, state)
        if any(state is not None for state in states):
            self.states[node] = states

    def follow(self, node: fx.Node) -> States:
        """Return the states of an op's outputs, from those of its operands."""
        if is_getitem(node):
            owner, index = node.args
            assert isinstance(owner, fx.Node) and isinstance(index, int)
            return (self.states[owner][index] if owner in self.states else None,)
        call, states = op_call(node), [self.states.get(o, (None,))[0] for o in operands(node)]
        mixed = next((s for s in states if isinstance(s, Across)), None)
        if makes_new(node):
            return (_fill_state(node, call),)
        if call.target in DRAWS:
            return (_drawn(node, states),)
        if _is_random(call):
            return (states[0] if states else FILLED,) * len(call.outputs)
        if target_name(call.target) == "arange":
            return (follow_range(node, self.slower),)
        if all(state is None for state in states):
            return tuple(self._from_constants(node, call, t) for t in call.outputs)
        if mixed is not None:
            return self._after_mixing(node, states, mixed)
        for special in (_moved(node, states), *_counting(node, call)):
            if special is not NotImplemented:
                return _tallied(node, states, special)
        return self._of_the_batch(node, _tallied(node, states, self._in_place(node, call, states)))

    def _of_the_batch(self, node: fx.Node, found: States) -> States:
        """Return the states, None for a number that samples read if it may be a sum over the whole batch."""
        state, tensor = found[0], infos(node)[0]
        if not self.statistics or len(found) > 1 or node not in self.returning or not isinstance(state, Across):
            return found
        if state.pairs or state.tally is not None or counts_samples(tensor) or not is_float(tensor.dtype):
            return found
        self.whole[node] = state
        return (None,)

    def _after_mixing(self, node: fx.Node, states: Sequence[State], mixed: Across) -> States:
        """Return the states of an op with a mixed operand: mixed too, except for a grouped product of experts."""
        group, tally = follow_group(node, states), counted(node, states)
        if group is not NotImplemented:
            return (group,)
        if tally is None and node in self.returning:
            self.refuse(node, mixed)
        return (replace(mixed, tally=tally),) * len(infos(node))

    def _in_place(self, node: fx.Node, call: OpCall, states: Sequence[State]) -> States:
        """Return the states of an op that moves no rows, by its rule or by a trial."""
        rows = {i: s for i, s in enumerate(states) if isinstance(s, Rows)}
        if not rows:
            if _keeps_one_value(call, states):
                return tuple(FILLED if counts_samples(t) else None for t in call.outputs)
            filled = {i: place_anywhere(call.operands[i], self.slower) for i, s in enumerate(states) if s is FILLED}
            rows = {i: Rows(place) for i, place in filled.items() if place is not None}
        orders = {r.order for r in rows.values()}
        if len(orders) != 1:
            return (orders_differ(node, orders),) * len(call.outputs)
        (order,) = orders
        places = tuple((i, r.place) for i, r in rows.items())
        key = node.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs, places, order.size
        if key not in self.seen:
            self.seen[key] = output_places(call, {i: Rows(p, Order(order.size)) for i, p in places})
        found = self.seen[key]
        if isinstance(found, str):
            fix = FIXES.get(target_name(call.target), Across.fix)
            return (Across(node, found, fix, pairs=found == PAIRS),) * len(call.outputs)
        # what has no rows, and is made of rows, depends on all samples: a trial need not show it of (h > 3).any()
        return tuple(Across(node, _ACROSS) if place is None else Rows(place, order) for place in found)

    def _from_constants(self, node: fx.Node, call: OpCall, tensor: TensorInfo) -> State:
        """Return the state of an output that depends on no sample; it may still depend on their number."""
        if not counts_samples(tensor):
            return Across(node, _COUNTS) if counts_in((call.args, tuple(call.kwargs.values()))) else None
        place = (
            place_anywhere(tensor, self.slower)
            if target_name(call.target) in ("broadcast_to", "expand", "expand_as", "repeat")
            else None
        )
        return misused(node) if place is None else Rows(place)


def _drawn(node: fx.Node, states: Sequence[State]) -> State:
    """Return the state of a draw: the rows of the tensor that it is like, else those that its shape says."""
    if states and isinstance(states[0], (Rows, Across)):
        return replace(states[0], points=None) if isinstance(states[0], Rows) else states[0]
    place = sample_place(node)
    if place is not None:
        return Rows(place)
    numbers = [a for a in node.args[1:] if not isinstance(a, (list, tuple))]
    return Across(node, _COUNTS) if counts_samples(info(node)) or counts_in(numbers) else None


def _is_random(call: OpCall) -> bool:
    """Return whether an op draws and has no rule: `refuse_random` refuses it, whatever it does with samples."""
    return call.target not in RULES and draws(call.target, call.args, call.kwargs)


def _fill_state(node: fx.Node, call: OpCall) -> State:
    """Return the state of `zeros`, `full_like` and similar ops."""
    values = [*(a for a in call.args if not isinstance(a, (list, tuple))), *call.kwargs.values()]
    if counts_in(values):
        return Across(node, _COUNTS)
    return FILLED if counts_samples(call.outputs[0]) else None


def _keeps_one_value(call: OpCall, states: Sequence[State]) -> bool:
    """Return whether an op of tensors that each hold one value everywhere gives such a tensor again."""
    name = target_name(call.target)
    alone = all(s is FILLED or t.ndim == 0 for s, t in zip(states, call.operands, strict=True))
    if alone and name in _UNIFORM:
        (x,) = call.operands
        return not any(grows(x.shape[dim]) for dim in notations.chosen(call.arg(1, "dim"), x.ndim))
    return alone and (_is_elementwise(call) or name in (*SAME_VALUES, "cat", "concat", "stack"))


def _is_elementwise(call: OpCall) -> bool:
    return call.target in RULES and RULES[call.target].notation is notations.elementwise


def _moved(node: fx.Node, states: Sequence[State]) -> Any:
    """Return the states of an op that sorts rows, or reads or writes them by index; NotImplemented for other ops."""
    if states and isinstance(states[0], Rows) and len(states) == 1:
        found = follow_sort(node, states[0])
        if found is not NotImplemented:
            return found
    for follow in (follow_move, follow_numbers):
        state = follow(node, states)
        if state is not NotImplemented:
            return (state,) * len(infos(node))
    return NotImplemented


def _counting(node: fx.Node, call: OpCall) -> Iterator[States]:
    """Yield states for an op that depends on the number of samples by a non-shape argument or a gradient's scale."""
    if target_name(call.target) not in _SHAPED and counts_in((call.args, tuple(call.kwargs.values()))):
        yield (Across(node, _COUNTS),) * len(call.outputs)
    if target_name(call.target) == "embedding" and call.arg(3, "scale_grad_by_freq", False):
        fix = "remove scale_grad_by_freq"
        yield (Across(node, "scales gradients by how often a row occurs in the batch", fix, pairs=True),)


def _tallied(node: fx.Node, states: Sequence[State], found: States) -> States:
    """Return the states, with mixed ones extended by the tally of the op."""
    if not isinstance(found[0], Across) or found[0].pairs:
        return found
    return tuple(replace(s, tally=counted(node, states)) if isinstance(s, Across) else s for s in found)


_Found: TypeAlias = "str | tuple[SamplePlace | None, ...]"  # why an op mixes samples, or their places in its outputs


def output_places(call: OpCall, rows: Mapping[int, Rows]) -> _Found:
    """Return the position of the rows in each output of an op, or how it mixes them."""
    if any(sum(map(grows, t.shape)) > 1 for t in call.outputs):
        return PAIRS
    places, unit = {i: r.place for i, r in rows.items()}, next(iter(rows.values())).order.size
    loops = resolve(call).loops
    found = (None,) * len(call.outputs) if loops is None else placed_by(call, loops, rows)
    given = tuple(None if r is None else r.place for r in found)
    reason = None if loops is None else _mixes(call, loops, places, unit)
    if reason is None:
        given = tuple(p or place_by_shape(t, unit) for p, t in zip(given, call.outputs, strict=True))
        return _mixes_in_trial(call, places, given) or given
    lost = any(p is None and counts_samples(t) for p, t in zip(given, call.outputs, strict=True))
    return reason or (UNKNOWN if lost else given)


def _mixes(call: OpCall, loops: Loops, places: Mapping[int, SamplePlace], unit: Size) -> str | None:
    """Return how an op mixes the samples at `places` in its operands; "" if it does not, None if no factor of its loops
    contains them."""
    found = set[tuple[str, Size]]()
    for i, place in places.items():
        names = {
            (name, outside)
            for name, where in loops.places.items()
            if (here := where[i]) is not None
            and here.dim == place.dim
            and (outside := quotient(place.outer, here.outer)) is not None
            and quotient(loops.sizes[name], outside * unit) is not None
        }
        if not names:
            return None
        found |= names
    if len(found) > 1:
        return PAIRS
    ((name, _),) = found
    there = loops.places[name][len(call.operands) :]
    return SUMS if any(place is None for place in there) else ""


def _mixes_in_trial(call: OpCall, places: Mapping[int, SamplePlace], given: Sequence[SamplePlace | None]) -> str:
    """Return how an op mixes samples, by trying it on small tensors; "" if it does not."""
    known = [place for place in (*places.values(), *given) if place is not None]
    lost = any(p is None and counts_samples(t) for p, t in zip(given, call.outputs, strict=True))
    apart: bool | None = False
    if not lost and all(place == SamplePlace(place.dim) for place in known):
        dims, there = {i: place.dim for i, place in places.items()}, [None if p is None else p.dim for p in given]
        every = all(i in dims or not counts_samples(t) for i, t in enumerate(call.operands))
        apart = keeps_apart(call, dims, there, every)
    if apart:
        return ""
    if not _side_by_side(call, places):
        return PAIRS
    return UNKNOWN if apart is None and call.target not in RULES else _ACROSS


def _side_by_side(call: OpCall, places: Mapping[int, SamplePlace]) -> bool:
    """Return whether broadcasting aligns the samples of all operands."""
    from_right = target_name(call.target) in _BROADCASTING
    return len({(p.dim - (call.operands[i].ndim if from_right else 0), p.outer) for i, p in places.items()}) == 1
