"""Proof that ops on rows of tokens compute each token alone, where no dim of a tensor counts tokens only.

    x [b, s, h] ─reshape─► [b s, h] ─sort by expert, multiply, put back─► [b s, h] ─reshape─► [b, s, h]

A rank with s / cp tokens of each sample has b s / cp of these rows: no slice of a dim, and no contiguous part. They may
be computed apart if each row depends on one token, however rows are ordered on the way. That is what the check for
mixed samples proves of samples (`passes/batch/batch_independence.py`), so it is asked the same of tokens, on copies of
the ops in which the numbers of samples and of tokens have changed places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.layout.placements import BP, Broadcast, O, P, Placement, Split
from autoptd.passes.batch.batch_dims import SamplePlace, sample_place
from autoptd.passes.batch.batch_independence import SUMS, Propagation, input_state
from autoptd.passes.batch.rows import BATCH_ORDER, FILLED, Across, Rows, State
from autoptd.passes.graph import infos, is_getitem, operands, substitute
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.rules.factors import Strategy, split_factor
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.trace.traced import BATCH, SEQUENCE

_SWAPPED = {BATCH: SEQUENCE, SEQUENCE: BATCH}


@dataclass
class TokenRows:
    """The tokens that rows of tensors belong to, found op by op for as long as `strategy` is asked."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # samples, swapped, are outside tokens in a merged dim: (b s)
    found: Propagation = field(default_factory=lambda: Propagation(set(), slower=SEQUENCE))

    def strategy(
        self, node: fx.Node, given: Mapping[fx.Node, Placement], prelude: Collection[fx.Node], ranks: int
    ) -> Strategy | None:
        """Return the strategy that computes each rank's own tokens; None if the op is not proved to keep them apart.

        `given`: the placement of every tensor on the cp axis. `prelude`: tensors of all tokens that the segment reads,
        whose part for a rank can be computed anew.
        """
        try:
            for operand in operands(node):
                if operand not in self.copies:
                    self._start(operand, given[operand], operand in prelude)
            copy = self._copy(node)
        except UnsupportedOp:
            return None
        needs = [self._need(o) for o in operands(node)]
        if None in needs:
            return None
        states = self.found.states.get(copy, (None,) * len(infos(node)))
        gives = [_placement(state, tensor) for state, tensor in zip(states, infos(node), strict=True)]
        if None in gives:
            summed = all(isinstance(s, Across) and s.reason == SUMS for s in states)
            return self._sum_of_rows(node, ranks) if summed else None
        own = O in {*needs, *gives} or P in needs
        return Strategy(tuple(needs), tuple(gives), ranks) if own else None  # type: ignore[arg-type]

    def draw(self, node: fx.Node) -> SamplePlace | None:
        """Return where a draw, which has no operand, has the tokens; None unless they are merged with the samples."""
        place = sample_place(node)
        if place is None or place.inner != SEQUENCE:
            return None
        found = SamplePlace(place.dim, place.outer * BATCH)
        self._leaf(node, Rows(replace(found, outer=_swapped(found.outer))))
        return found

    def place(self, node: fx.Node) -> SamplePlace | None:
        """Return the place of the tokens in an op's first result; None if its rows are not in the order of tokens."""
        state = self._state(node)
        if not isinstance(state, Rows) or state.order != BATCH_ORDER:
            return None
        return SamplePlace(state.place.dim, _swapped(state.place.outer), _swapped(state.place.inner))

    def repeat(self, known: fx.Node, node: fx.Node) -> None:
        """Take over what is known of a tensor's rows for the same tensor of an equal segment, if in batch order."""
        if known in self.copies and node not in self.copies:
            states = self.found.states.get(self.copies[known], (None,) * len(infos(node)))
            if all(state is None or (isinstance(state, Rows) and state.order == BATCH_ORDER) for state in states):
                self._leaf(node, *states)

    def _sum_of_rows(self, node: fx.Node, ranks: int) -> Strategy | None:
        """Return the strategy that gives each rank the sum over its rows, a partial value of the sum over all."""
        op, rows = op_of(node), [isinstance(self._state(o), Rows) or self._is_filled(o) for o in operands(node)]
        loops = op.loops
        for places in () if loops is None else loops.places.values():
            if [place is not None for place in places] == [*rows, *(False for _ in infos(node))]:
                found = split_factor(op.call, loops, places, 1, ranks)  # type: ignore[arg-type]
                if found is not None:
                    return replace(found, needs=tuple(O if isinstance(p, Split) else p for p in found.needs))
        return None

    def _is_filled(self, node: fx.Node) -> bool:
        return self._state(node) is FILLED and any(_counts_tokens(t) for t in infos(node))

    def _state(self, node: fx.Node) -> State:
        return self.found.states.get(self.copies[node], (None,))[0]

    def _need(self, node: fx.Node) -> Placement | None:
        """Return the placement in which an op on rows needs a tensor; None if it mixes tokens."""
        return _placement(self._state(node), infos(node)[0])

    def _start(self, node: fx.Node, given: Placement, in_prelude: bool) -> None:
        """Add a tensor that no earlier question was about. Raises UnsupportedOp if its rows cannot be known."""
        if isinstance(given, Split) and infos(node)[0].shape[given.dim] == SEQUENCE:
            self._leaf(node, Rows(SamplePlace(given.dim)))
        elif is_getitem(node) and node.all_input_nodes[0] in self.copies:
            self._copy(node)
        elif in_prelude and node.op == "call_function":
            for operand in node.all_input_nodes:
                if operand not in self.copies:
                    self._start(operand, given, in_prelude)
            self._copy(node)
        elif isinstance(given, Broadcast) and not any(_counts_tokens(t) for t in infos(node)):
            self._leaf(node, None)
        elif in_prelude:
            self._leaf(node)
        else:
            raise UnsupportedOp("the rows of its tokens are not known")

    def _leaf(self, node: fx.Node, *states: State) -> None:
        copy = self.graph.placeholder(node.name)
        copy.meta = _swapped_meta(node)
        self.copies[node] = copy
        self.found.put(copy, *(states or (input_state(copy),)))

    def _copy(self, node: fx.Node) -> fx.Node:
        """Copy an op, whose operands have copies, with samples and tokens swapped, and find the rows of its results."""
        if node not in self.copies:
            args = substitute(node.args, self.copies.__getitem__)
            kwargs = {name: substitute(value, self.copies.__getitem__) for name, value in node.kwargs.items()}
            made = self.graph.create_node(node.op, node.target, _swapped(args), _swapped(kwargs))
            made.meta = _swapped_meta(node)
            self.copies[node] = made
            self.found.put(made, *self.found.follow(made))
        return self.copies[node]


def _placement(state: State, tensor: TensorInfo) -> Placement | None:
    """Return the placement of a tensor whose rows are known (its sizes are not swapped); None if tokens are mixed."""
    if state is None:
        return BP
    if sum(map(_counts, tensor.shape)) > 1:
        return None
    if isinstance(state, Across):
        return P if state.tally is not None else None  # a rank counts its own rows: a part of the count of all
    plain = isinstance(state, Rows) and state.order == BATCH_ORDER and state.points is None
    if plain and state.place == SamplePlace(state.place.dim) and tensor.shape[state.place.dim] == SEQUENCE:  # type: ignore[union-attr]
        return Split(state.place.dim)  # type: ignore[union-attr]
    return O


def _counts_tokens(tensor: TensorInfo) -> bool:
    return any(map(_counts, tensor.shape))


def _counts(size: Size) -> bool:
    return isinstance(size, sympy.Basic) and SEQUENCE in size.free_symbols


def _swapped_meta(node: fx.Node) -> dict[str, Any]:
    found = tuple(replace(t, shape=_swapped(t.shape)) for t in infos(node))
    origin = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
    return {**origin, "info": found if isinstance(node.meta["info"], tuple) else found[0]}


def _swapped(value: Any) -> Any:
    """Return an argument or a shape with the numbers of samples and of tokens in each other's place."""
    if isinstance(value, sympy.Basic):
        return value.subs(_SWAPPED, simultaneous=True)
    if isinstance(value, Mapping):
        return {key: _swapped(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_swapped, value))
    return value
