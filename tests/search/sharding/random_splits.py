"""Random small split problems, and the exhaustive search for their optimum."""

from __future__ import annotations

import itertools
import math
import random

from autoptd.layout.placements import BP, B, P, Placement, Split
from autoptd.search.sharding.problem import Choice, Node, SplitProblem

PLACEMENTS: tuple[Placement, ...] = (B, BP, P, Split(0), Split(1))


def random_problem(seed: int) -> SplitProblem:
    """Make up to 6 nodes with up to 4 choices: shared tensors, saved bytes, ties, pins, a budget."""
    rng = random.Random(seed)
    places = rng.sample(PLACEMENTS, rng.randint(2, 4))
    nodes: list[Node] = []
    for index in range(rng.randint(3, 6)):
        earlier = [f"t{i}" for i in range(index)]
        # One tensor has many readers, so that conversions are shared.
        reads = (
            sorted({rng.choice(earlier[:2] if rng.random() < 0.6 else earlier) for _ in range(2)}) if earlier else []
        )
        nodes.append(Node(f"n{index}", tuple(_choice(rng, index, k, reads, places) for k in range(rng.randint(1, 4)))))
    tensors = [f"t{i}" for i in range(len(nodes))]
    pairs = [(t, p) for t in tensors for p in places]
    ties = ((nodes[1].name, nodes[-1].name),) if rng.random() < 0.4 else ()
    fixed = {nodes[2].name: nodes[2].choices[-1].label} if rng.random() < 0.2 else {}
    return SplitProblem(
        nodes=tuple(nodes),
        conversion_s={
            (t, q, p): float(rng.choice([0, 0, 1, 2, 3, 5, 8]))
            for t in tensors
            for q in places
            for p in places
            if q != p and rng.random() < 0.85
        },
        saved_bytes={pair: float(rng.randint(0, 20)) for pair in pairs},
        ties=ties,
        fixed=fixed,
        second_per_byte=rng.choice([0.0, 0.0, 0.1, 0.5]),
    )


def _choice(rng: random.Random, index: int, k: int, reads: list[str], places: list[Placement]) -> Choice:
    needs = [(t, rng.choice(places)) for t in reads]
    if reads and rng.random() < 0.15:
        needs = sorted({*needs, (reads[0], rng.choice(places))}, key=str)  # one tensor needed twice
    gives = ((f"t{index}", rng.choice(places)),)
    keep = tuple(pair for pair in (*needs, *gives) if rng.random() < 0.5)
    return Choice(f"k{k}", tuple(needs), gives, float(rng.randint(0, 9)), keep, float(rng.randint(0, 5)))


def brute_force(problem: SplitProblem) -> float:
    """Return the optimum by trying everything; infinity if nothing is feasible."""
    return min(
        (price(problem, combo) for combo in itertools.product(*(n.choices for n in problem.nodes))), default=math.inf
    )


def price(problem: SplitProblem, combo: tuple[Choice, ...]) -> float:
    """Return the objective by its definition, independent of the program's formulation."""
    label = {node.name: choice.label for node, choice in zip(problem.nodes, combo, strict=True)}
    if any(label[a] != label[b] for a, b in problem.ties) or any(label[n] != k for n, k in problem.fixed.items()):
        return math.inf
    given = {tensor: placement for choice in combo for tensor, placement in choice.gives}
    seconds = sum(choice.seconds for choice in combo)
    for tensor, target in {need for choice in combo for need in choice.needs}:
        if target != given[tensor]:
            seconds += problem.conversion_s.get((tensor, given[tensor], target), math.inf)
    nbytes = sum(c.bytes for c in combo) + sum(
        problem.saved_bytes[kept] for kept in {s for c in combo for s in c.saved}
    )
    return seconds + problem.second_per_byte * nbytes
