"""Context parallelism: a strategy on the cp axis for every op, with the tokens of each sequence split over cp ranks.

The rules that split tensors over tp apply to cp too, with the split dim fixed to that of the tokens, `s`. In program
order, each op takes the strategy with the fewest conversions of its operands, and so propagates the split:

    token embedding   Bp, S1 -> S1        inputs are split, parameters replicated with partial gradients
    norm, linear      S1, Bp -> S1
    attention         S2, S2, S2 -> S2    by its own implementation: ring or Ulysses
    loss              S1, S1 -> P         a partial value on every rank

An op that merges tokens with samples, and ops on the rows that it gives, compute each rank's own (`token_rows.py`). An
op that picks or sums tokens (a first token, a mean, a shift) gets them all-gathered. So does the other operand of an
op that keeps one operand's split (keys of an unfused attention). An op that needs all tokens of one tensor to compute
all tokens of another, such as a convolution or a cumulative sum over tokens, gets all tokens of a part of another dim
(channels, heads) by an all-to-all, as Ulysses does, and the tokens are split again by the next op that can. If no other
dim can be split either, it mixes positions and is refused, since gathering would defeat the purpose of cp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from autoptd.errors import PlanError
from autoptd.layout.placements import BP, B, Broadcast, O, OwnRows, P, Placement, Split, conversion
from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import DROPOUT
from autoptd.passes.batch.batch_dims import SamplePlace, makes_new
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, is_getitem, numel, op_name, operands, source_line
from autoptd.passes.opcall import OpCall, Size, Sizes, TensorInfo
from autoptd.passes.rules.factors import Strategy, expand
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.token_rows import TokenRows
from autoptd.passes.trace.traced import BATCH, SEQUENCE

aten = torch.ops.aten
ATTENTION = (aten.scaled_dot_product_attention.default, ops.attention)
_ROWS = Strategy((Split(1), Split(1)), (P,))  # a loss over logits [b, s, v] and labels [b, s]
# costs of conversions, without unit: only their order matters; what is whole had better stay so
_GATHERS, _EXCHANGES, _COMMUNICATES, _MAKES_PARTIAL, _LOCAL = 100, 20, 5, 2, 1


@dataclass(frozen=True)
class TokenSplits:
    """`strategies` of every op on the cp axis, and the placement in which each tensor is `given`.

    `shifted`: cross entropy of logits without their last tokens -> the slice that removes those. Such a loss runs on
    all tokens with ignored labels for the last ones instead, so that nothing is gathered.
    `places`: draws and dropout of rows that merge tokens with samples -> where their results have the tokens.
    `by_tp`: whether another tp may have other strategies, since they split dims that tp splits too.
    """

    ranks: int
    zigzag: bool
    strategies: Mapping[fx.Node, Strategy]
    given: Mapping[fx.Node, Placement]
    shifted: Mapping[fx.Node, fx.Node]
    places: Mapping[fx.Node, SamplePlace]
    by_tp: bool

    @property
    def chunks(self) -> int:
        """The number of parts that a sequence is split into; its length must be a multiple."""
        return 2 * self.ranks if self.zigzag else self.ranks


def is_causal(node: fx.Node) -> bool:
    """Return whether an op is attention with a causal mask."""
    return node.target in ATTENTION and bool(op_of(node).call.arg(5, "is_causal", False))


def split_tokens(folded: Folded, ranks: int, tokens: int, attention: str = "ring", tp: int = 1) -> TokenSplits:
    """Choose every op's strategy on the cp axis. `tokens`: of a sample; `attention`: "ring" or "ulysses".

    Raises PlanError if the sequence cannot be split into so many parts, or an op mixes positions.
    """
    zigzag = attention == "ring" and any(is_causal(n) for s in folded.segments for n in s.nodes)
    chunks = 2 * ranks if zigzag else ranks
    if tokens % chunks:
        raise PlanError(
            f"a sequence of {tokens} tokens is not divisible by {chunks}, the number of chunks of cp {ranks}"
            + (" under a causal mask (two per rank)" if zigzag else ""),
            where="fix['cp']",
            fix=f"use a length that is a multiple of {chunks}, or another cp",
        )
    sizes = Sizes({**folded.traced.example, SEQUENCE: tokens}, BATCH)  # others never matter: only tokens are split
    decider = _Decider(ranks, sizes, attention, tp, chunks)
    for segment in folded.segments:
        decider.segment(segment)
    return TokenSplits(ranks, zigzag, decider.strategies, decider.given, decider.shifted, decider.places, decider.by_tp)


def own_token_strategies(segment: Segment, ranks: int, sizes: Sizes) -> dict[fx.Node, Strategy]:
    """Return the strategies in which each of `ranks` ranks computes rows of its own tokens, for ops that have one.

    They begin and end at tensors whose tokens are split. Ops that cannot be split by tokens have none, nor do ops that
    would need rows of a tensor in the prelude which depends on the model's inputs.
    """
    if not sizes.divisible(SEQUENCE, ranks):
        return {}
    decider = _Decider(ranks, sizes, "ring", 1, gather=True)
    for node in segment.receives:
        shape = infos(node)[0].shape
        decider.given[node] = Split(shape.index(SEQUENCE)) if SEQUENCE in shape else B
    decider.segment(segment)
    found = {n: s for n, s in decider.strategies.items() if n in decider.by_rows and n.target not in DROPOUT}
    rows = [o for n, s in found.items() for o, p in zip(operands(n), s.needs, strict=True) if p == O]
    return {} if any(n in segment.prelude and reads_inputs(n) for n in rows) else found


def reads_inputs(node: fx.Node) -> bool:
    """Return whether a tensor is computed from tokens of the model's inputs."""
    if node.op == "placeholder":
        return any(SEQUENCE in sympy.sympify(n).free_symbols for n in infos(node)[0].shape)
    return any(map(reads_inputs, node.all_input_nodes))


@dataclass
class _Decider:
    """`gather`: an op that mixes tokens gets all of them, rather than being refused."""

    ranks: int
    sizes: Sizes
    attention: str
    tp: int
    chunks: int = 1  # parts of a sequence, and of another dim that is split in its place
    gather: bool = False
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    given: dict[fx.Node, Placement] = field(default_factory=dict)
    shifted: dict[fx.Node, fx.Node] = field(default_factory=dict)
    places: dict[fx.Node, SamplePlace] = field(default_factory=dict)
    seen: dict[tuple[str, tuple[Placement, ...]], Segment] = field(default_factory=dict)
    rows: TokenRows = field(default_factory=TokenRows)
    by_rows: set[fx.Node] = field(default_factory=set)  # ops whose strategies `rows` gave
    by_tp: bool = False

    def segment(self, segment: Segment) -> None:
        """Decide for one segment; repeat the decisions for one of its kind with the same received placements."""
        self.given |= dict.fromkeys(segment.prelude, B)
        self.given |= dict.fromkeys(segment.parameters, BP)
        taken = tuple(self.given[n] for n in segment.receives)
        first = self.seen.setdefault((segment.kind, taken), segment)
        if first is segment:
            self._decide(segment)
            return
        here = dict(zip(first.nodes, segment.nodes, strict=True))
        self.given |= {node: self.given[known] for known, node in here.items() if known in self.given}
        self.strategies |= {node: self.strategies[known] for known, node in here.items() if known in self.strategies}
        self.shifted |= {here[loss]: here[part] for loss, part in self.shifted.items() if loss in here}
        self.places |= {here[node]: place for node, place in self.places.items() if node in here}
        for known in first.sends:
            if known in here:
                self.rows.repeat(known, here[known])

    def _decide(self, segment: Segment) -> None:
        for node in segment.nodes:
            if is_getitem(node):
                continue
            loss = self._shifts(node, segment)
            if loss is not None:
                self.shifted[loss], self.given[node] = node, Split(1)
                continue
            try:
                strategy = self._choose(node, segment) if node not in self.shifted else _ROWS
            except PlanError:
                if not self.gather:
                    raise
                strategy = Strategy((B,) * len(operands(node)), (B,) * len(infos(node)))
            self.strategies[node] = strategy
            if not isinstance(node.meta["info"], tuple):
                self.given[node] = plain(strategy.gives[0], infos(node)[0])
                continue
            for user in node.users:
                index = user.args[1]
                assert isinstance(index, int)
                self.given[user] = plain(strategy.gives[index], infos(user)[0])

    def _shifts(self, node: fx.Node, segment: Segment) -> fx.Node | None:
        """Return the cross entropy whose logits [b, s, v] the node takes without the last tokens, or None."""
        if node.target is not aten.slice.Tensor or len(node.users) != 1:
            return None
        (loss,), (whole,), call = node.users, operands(node), op_of(node).call
        if loss.target is not ops.cross_entropy or loss not in segment.nodes or operands(loss)[0] is not node:
            return None
        labels = operands(loss)[1]
        from_start = call.arg(1, "dim", 0) == 1 and call.arg(2, "start") in (None, 0) and call.arg(4, "step", 1) == 1
        plain_labels = labels in segment.prelude and len(infos(labels)[0].shape) == 2
        return loss if from_start and plain_labels and self.given[whole] == Split(1) else None

    def _choose(self, node: fx.Node, segment: Segment) -> Strategy:
        call = op_of(node).call
        given = [self.given[o] for o in operands(node)]
        if P in given and (of_counts := self.rows.strategy(node, self.given, segment.prelude, self.ranks)) is not None:
            self.by_rows.add(node)
            return of_counts
        if node.target in ops.DRAWS and not self.gather and (place := self.rows.draw(node)) is not None:
            self.places[node] = place
            return Strategy((), (O,), self.ranks)
        options = [] if O in given else self._options(node, call)
        apart = [p for o, p in zip(operands(node), given, strict=True) if isinstance(p, Split) and not _is_tokens(o, p)]
        options += self._other_options(node, call) if apart else []
        cost, best = _cheapest(call, given, options)
        if cost < math.inf:
            return best
        strategy = None if apart else self.rows.strategy(node, self.given, segment.prelude, self.ranks)
        if strategy is None and O not in given:
            cost, best = _cheapest(call, given, self._other_options(node, call))
            if cost < _GATHERS:
                return best
        if strategy is not None and node.target in DROPOUT:
            self.places[node] = self._place(node)
        if strategy is None and makes_new(node) and O not in given:
            return Strategy(tuple(given), (B,))  # no value of its operand is read
        if strategy is None:
            parts = [o.name for o, p in zip(operands(node), given, strict=True) if isinstance(p, (Split, OwnRows))]
            raise PlanError(
                f"cp {self.ranks}: {op_name(node)} mixes positions: it needs all tokens of {', '.join(parts)}",
                where=source_line(node),
                fix="leave cp out: it supports only scaled_dot_product_attention and ops that pick or sum tokens",
            )
        self.by_rows.add(node)
        return strategy

    def _place(self, node: fx.Node) -> SamplePlace:
        """Return where rows have the tokens, which key the numbers that dropout draws."""
        place = self.rows.place(node)
        if place is None or self.gather:  # tp has no key for rows of own tokens
            raise PlanError(
                f"cp {self.ranks}: dropout of rows in another order than that of tokens: its mask would depend on cp",
                where=source_line(node),
                fix="leave cp out, or apply dropout before rows are sorted or after their order is restored",
            )
        return place

    def _options(self, node: fx.Node, call: OpCall) -> list[Strategy]:
        """Return legal strategies that split nothing but tokens; attention's own implementation first."""
        own = self._of_attention(node, call) if node.target in ATTENTION else []
        return own + [s for s in expand(op_of(node), self.ranks, self.sizes) if _splits_tokens(s, call)]

    def _other_options(self, node: fx.Node, call: OpCall) -> list[Strategy]:
        """Return legal strategies that split a dim of fixed size, for all tokens of a part of it."""
        if self.gather or node.target in (*ATTENTION, *DROPOUT, *ops.DRAWS):
            return []
        self.by_tp, parts = True, self.tp * self.chunks
        return [s for s in expand(op_of(node), self.ranks, self.sizes) if _splits_another(s, call, parts)]

    def _of_attention(self, node: fx.Node, call: OpCall) -> list[Strategy]:
        """Return attention's own strategy, if any: q, k and v are split; a mask is split by rows for ring only."""
        query, key, value, *masks = call.operands
        if any(t.shape[-2] != SEQUENCE for t in (query, key, value)) or any(m.requires_grad for m in masks):
            return []
        if self.attention == "ulysses":
            self._check_heads(node, query.shape[-3] if query.ndim > 2 else 1)
        rows = Split(query.ndim - 2)
        cut = self.attention == "ring"
        needs = [Split(m.ndim - 2) if cut and m.ndim > 1 and m.shape[-2] == SEQUENCE else B for m in masks]
        return [Strategy((rows, rows, rows, *needs), (rows,), self.ranks, self.attention)]

    def _check_heads(self, node: fx.Node, heads: Size) -> None:
        self.by_tp = True
        if self.sizes(heads) % (self.tp * self.ranks):
            raise PlanError(
                f"cp {self.ranks} by Ulysses: {heads} heads are not divisible by tp {self.tp} × cp {self.ranks}",
                where=source_line(node),
                fix="use fix={'context': 'ring'}",
            )


def plain(placement: Placement, tensor: TensorInfo) -> Placement:
    """Return the placement, with Bp turned into B for a tensor without gradient."""
    return B if isinstance(placement, Broadcast) and not tensor.requires_grad else placement


def _splits_tokens(strategy: Strategy, call: OpCall) -> bool:
    pairs = (*zip(strategy.needs, call.operands, strict=True), *zip(strategy.gives, call.outputs, strict=True))
    return not strategy.implementation and all(
        t.shape[p.dim] == SEQUENCE and p.groups == 1 for p, t in pairs if isinstance(p, Split)
    )


def _splits_another(strategy: Strategy, call: OpCall, parts: int) -> bool:
    """Return whether a strategy splits dims of fixed sizes, which divide into so many parts, and has no partial sum."""
    pairs = (*zip(strategy.needs, call.operands, strict=True), *zip(strategy.gives, call.outputs, strict=True))
    found = [t.shape[p.dim] for p, t in pairs if isinstance(p, Split) and p.groups == 1]
    grouped = any(isinstance(p, Split) and p.groups > 1 for p, _ in pairs)
    partial = P in (*strategy.needs, *strategy.gives)
    fixed = all(isinstance(n, int) and n % parts == 0 for n in found)
    return bool(found) and fixed and not grouped and not partial and not strategy.implementation


def _is_tokens(node: fx.Node, split: Split) -> bool:
    return infos(node)[0].shape[split.dim] == SEQUENCE


def _cheapest(call: OpCall, given: Sequence[Placement], options: Sequence[Strategy]) -> tuple[float, Strategy]:
    """Return the strategy that takes the fewest conversions, the first of several, and their cost."""
    costs = [(_cost(call, given, option), i) for i, option in enumerate(options)]
    (cost, *_), best = min(costs, default=((math.inf, 0, 0), 0))
    return (cost, options[best]) if options else (math.inf, Strategy((), ()))


def _cost(call: OpCall, given: Sequence[Placement], strategy: Strategy) -> tuple[float, int, int]:
    """Return (cost of conversions, whether tokens stay whole, whether the first operand is converted), to minimise."""
    total, first = 0.0, 0
    for i, (have, need, tensor) in enumerate(zip(given, strategy.needs, call.operands, strict=True)):
        price = _price(have, plain(need, tensor), tensor)
        if price == _GATHERS and strategy.ranks == 1 and not _reduces_tokens(call):
            return math.inf, 0, 0
        total += price
        first += bool(price and i == 0)
    whole = strategy.ranks == 1 and any(SEQUENCE in t.shape for t in call.outputs)
    return total if not whole else total + _COMMUNICATES, int(whole), first


def _price(have: Placement, need: Placement, tensor: TensorInfo) -> float:
    row = conversion(plain(have, tensor), need)
    if not row.function:
        return 0
    if isinstance(have, Split):
        if isinstance(need, Broadcast):
            return _GATHERS
        if not isinstance(need, Split):
            return math.inf
        scores = tensor.shape[have.dim] == tensor.shape[need.dim] == SEQUENCE  # their rows stay rows where they can
        return 2 * _GATHERS if scores else _EXCHANGES
    if have == P:
        return math.inf if isinstance(need, Split) else _COMMUNICATES
    if row.backward and tensor.requires_grad:
        return _COMMUNICATES
    return _MAKES_PARTIAL if need == P else _LOCAL


def _reduces_tokens(call: OpCall) -> bool:
    """Return whether an op picks or sums tokens.

    Its results count no tokens, as those of attention over tokens by queries of another length, or they have fewer
    elements than an operand with tokens.
    """
    if not any(_counts_tokens(t) for t in call.outputs):
        return any(map(_counts_tokens, call.operands))
    out = sum((sympy.sympify(numel(t.shape)) for t in call.outputs), sympy.Integer(0))
    lost = [out - numel(t.shape) for t in call.operands if SEQUENCE in t.shape]
    return any(sympy.expand(n.subs(SEQUENCE, SEQUENCE + 1)).is_negative for n in lost)  # for two tokens or more


def _counts_tokens(tensor: TensorInfo) -> bool:
    return any(SEQUENCE in sympy.sympify(size).free_symbols for size in tensor.shape)
