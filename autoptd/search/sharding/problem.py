"""The data of the splits ILP: the strategies, the cost of a choice, and the choices that need not be considered.

Nodes need and give tensors in placements. A choice that cannot be met, or that another choice of its node is never
worse than, is dropped before a program is built: `with_fixed` then `pruned`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autoptd.errors import PlanError, nearest
from autoptd.layout.placements import Placement
from autoptd.passes.fold import Segment
from autoptd.passes.sharding.sharding import tensor_name

Pair = tuple[str, Placement]  # (tensor, placement)


@dataclass(frozen=True)
class Choice:
    """One way to run a node. `seconds` is per microbatch, weighted by how often the node is repeated."""

    label: str
    needs: tuple[Pair, ...] = ()
    gives: tuple[Pair, ...] = ()
    seconds: float = 0.0
    saved: tuple[Pair, ...] = ()  # for backward
    bytes: float = 0.0  # permanent, such as a stored parameter


@dataclass(frozen=True)
class Node:
    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class SplitProblem:
    """The problem that `solve_splits` decides.

    A conversion that is not in `conversion_s` is impossible; none is needed from a placement to itself. `ties` are
    pairs of node names, `fixed` maps node names to labels. `called`: users' names of the fixed ones, for errors.
    """

    nodes: tuple[Node, ...]
    conversion_s: Mapping[tuple[str, Placement, Placement], float] = field(default_factory=dict)
    saved_bytes: Mapping[Pair, float] = field(default_factory=dict)
    ties: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    second_per_byte: float = 0.0
    called: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def producer(self) -> dict[str, str]:
        """Map each tensor to the node that gives it."""
        found: dict[str, str] = {}
        for node in self.nodes:
            for tensor in {t: None for choice in node.choices for t, _ in choice.gives}:
                assert tensor not in found, f"{tensor} is given by {found[tensor]} and by {node.name}"
                found[tensor] = node.name
        return found

    def conversion(self, tensor: str, source: Placement, target: Placement) -> float:
        """Return the seconds of a conversion, infinity where it is impossible."""
        return 0.0 if source == target else self.conversion_s.get((tensor, source, target), math.inf)


@dataclass(frozen=True)
class SplitSolution:
    """A choice for every node.

    `wanted`: every placement in which some node needs the tensor. `gap`: by how much, relative to this objective, a
    cheaper solution may exist; 0 for a proved optimum.
    """

    choices: dict[str, str]
    wanted: dict[str, tuple[Placement, ...]]
    conversions: tuple[tuple[str, Placement, Placement], ...]
    seconds: float
    saved_bytes: float
    static_bytes: float
    gap: float = 0.0
    notes: tuple[str, ...] = ()


def evaluate(problem: SplitProblem, taken: Mapping[str, Choice]) -> SplitSolution:
    """Return the cost of one choice per node, in closed form. Every conversion must be possible."""
    given = {t: p for choice in taken.values() for t, p in choice.gives}
    wanted: dict[str, dict[Placement, None]] = {}
    for choice in taken.values():
        for tensor, placement in choice.needs:
            wanted.setdefault(tensor, {})[placement] = None
    ordered = {t: tuple(sorted(places, key=str)) for t, places in wanted.items()}
    conversions = tuple((t, given[t], p) for t, places in ordered.items() for p in places if p != given[t])
    saved = {pair: None for choice in taken.values() for pair in choice.saved}
    return SplitSolution(
        choices={name: choice.label for name, choice in taken.items()},
        wanted=ordered,
        conversions=conversions,
        seconds=math.fsum([c.seconds for c in taken.values()] + [problem.conversion(*c) for c in conversions]),
        saved_bytes=math.fsum(problem.saved_bytes[pair] for pair in saved),
        static_bytes=math.fsum(choice.bytes for choice in taken.values()),
    )


def with_fixed(problem: SplitProblem) -> SplitProblem:
    """Leave each fixed node only its fixed choice."""
    names = [node.name for node in problem.nodes]
    assert len(set(names)) == len(names), "two nodes of one name"
    for name in problem.fixed:
        if name not in set(names):
            raise PlanError(f"there is no op {name!r} to fix", fix=nearest(name, names))
    nodes = []
    for node in problem.nodes:
        label = problem.fixed.get(node.name)
        choices = tuple(c for c in node.choices if label in (None, c.label))
        if not choices and node.choices:
            raise PlanError(f"{label!r} is not possible here", where=node.name, fix=nearest(str(label), labels(node)))
        nodes.append(replace(node, choices=choices))
    return replace(problem, nodes=tuple(nodes))


def labels(node: Node) -> list[str]:
    return [choice.label for choice in node.choices]


def pruned(problem: SplitProblem) -> SplitProblem:
    """Drop choices that cannot be met (to a fixpoint), then dominated ones."""
    lists = {node.name: list(node.choices) for node in problem.nodes}
    changed = True
    while changed:
        sizes = [len(choices) for choices in lists.values()]
        _drop_unmet(problem, lists)
        for a, b in problem.ties:
            common = {c.label for c in lists[a]} & {c.label for c in lists[b]}
            for name in (a, b):
                lists[name] = [c for c in lists[name] if c.label in common]
        changed = sizes != [len(choices) for choices in lists.values()]
    tied = {name for pair in problem.ties for name in pair}
    return replace(
        problem,
        nodes=tuple(
            Node(name, tuple(choices if name in tied else _undominated(choices))) for name, choices in lists.items()
        ),
    )


def _drop_unmet(problem: SplitProblem, lists: dict[str, list[Choice]]) -> None:
    """Keep choices whose needs some producer can meet, and producers that every consumer can use."""
    given = {t: {dict(c.gives)[t] for c in lists[name]} for t, name in problem.producer.items()}
    for name, choices in lists.items():
        lists[name] = [
            c for c in choices if all(any(problem.conversion(t, q, p) < math.inf for q in given[t]) for t, p in c.needs)
        ]
    for choices in lists.values():
        consumed = {t for c in choices for t, _ in c.needs}
        for tensor in consumed:
            source = problem.producer[tensor]
            lists[source] = [
                g
                for g in lists[source]
                if any(
                    all(problem.conversion(t, dict(g.gives)[t], p) < math.inf for t, p in c.needs if t == tensor)
                    for c in choices
                )
            ]


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Drop dominated choices; of equal ones the first stays."""
    kept: list[Choice] = []
    for choice in choices:
        if any(_never_worse(other, choice) for other in kept):
            continue
        kept = [other for other in kept if not _never_worse(choice, other)] + [choice]
    return kept


def _never_worse(a: Choice, b: Choice) -> bool:
    return (
        a.seconds <= b.seconds
        and a.bytes <= b.bytes
        and set(a.gives) == set(b.gives)
        and set(a.needs) <= set(b.needs)
        and set(a.saved) <= set(b.saved)
    )


@dataclass(frozen=True)
class Scope:
    """Names of tensors and nodes within a kind; tensors from outside the segment get the kind as a prefix."""

    kind: str
    segment: Segment

    def __call__(self, node: fx.Node) -> str:
        return f"{self.kind}:{node.name}" if self.is_input(node) else tensor_name(node)

    def is_input(self, node: fx.Node) -> bool:
        return node not in self._own

    @cached_property
    def _own(self) -> frozenset[fx.Node]:
        return frozenset(self.segment.nodes)

    def is_outside(self, node: fx.Node) -> bool:
        """Return whether a node is a parameter or in the prelude: these stay in memory anyway."""
        return node in self.segment.parameters or node in self.segment.prelude

    def parameter(self, i: int) -> str:
        return f"{self.kind}/parameter:{i}"

    def receive(self, i: int) -> str:
        return f"{self.kind}/receive:{i}"

    def send(self, i: int) -> str:
        return f"{self.kind}/send:{i}"
