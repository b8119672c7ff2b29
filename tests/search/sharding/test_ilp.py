"""The splits ILP finds the optimum of exhaustive search, and explains infeasible requests."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from autoptd.errors import PlanError
from autoptd.layout.placements import BP, B, P, Placement, Split
from autoptd.search.infeasible import InfeasibleSplit
from autoptd.search.sharding import ilp as split_program
from autoptd.search.sharding.ilp import SplitProgram, SplitPrograms, Sums, solve_splits, structure_of
from autoptd.search.sharding.problem import Choice, Node, SplitProblem, SplitSolution
from tests.search.llama_block import block
from tests.search.sharding.random_splits import brute_force, price, random_problem

S1, S2 = Split(1), Split(2)


def objective(problem: SplitProblem) -> float:
    """Return the objective that `solve_splits` finds, checked against the definition of the cost."""
    try:
        found = solve_splits(problem)
    except InfeasibleSplit:
        return math.inf
    assert found.gap == 0
    taken = tuple(next(c for c in n.choices if c.label == found.choices[n.name]) for n in problem.nodes)
    total = found.seconds + problem.second_per_byte * (found.saved_bytes + found.static_bytes)
    assert price(problem, taken) == pytest.approx(total)
    return total


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_optimum_is_that_of_exhaustive_search(start: int) -> None:
    for seed in range(start, start + 50):
        problem = random_problem(seed)
        assert objective(problem) == pytest.approx(brute_force(problem)), seed


def given(name: str, *placements: Placement) -> Node:
    return Node(name, tuple(Choice(str(p), gives=((name, p),)) for p in placements))


def reader(name: str, tensor: str, *placements: Placement) -> Node:
    return Node(name, tuple(Choice(str(p), needs=((tensor, p),)) for p in placements))


def test_a_shared_conversion_is_paid_once() -> None:
    # Split, one gather of 4 s serves q, k and v; whole costs 9 s. Edges priced in pairs would cost 12 s and choose
    # whole.
    x = Node("x", (Choice("S1", gives=(("x", S1),)), Choice("B", gives=(("x", BP),), seconds=9.0)))
    problem = SplitProblem((x, *(reader(n, "x", BP) for n in "qkv")), conversion_s={("x", S1, BP): 4.0})
    found = solve_splits(problem)
    assert found.choices == {"x": "S1", "q": "Bp", "k": "Bp", "v": "Bp"}
    assert found.conversions == (("x", S1, BP),)
    assert found.wanted == {"x": (BP,)}
    assert found.seconds == 4.0


def test_an_only_reader_needs_one_variable_for_each_conversion() -> None:
    # 2 + 3 choices and 6 flows. A second reader: 3 choices, 6 flows, 3 y, and a z for each of the 6 conversions, which
    # all have different prices.
    prices = {("x", q, p): 1.0 + i for i, (q, p) in enumerate((q, p) for q in (B, S1) for p in (P, BP, S2))}
    nodes = (given("x", B, S1), *(reader(name, "x", P, BP, S2) for name in "yz"))

    def size(*those: Node) -> tuple[int, set[int]]:
        program = SplitProgram(structure_of(SplitProblem(those, prices))).program
        return len(program.whole), {row.number for row in program.rows}

    assert size(*nodes[:2]) == (2 + 3 + 6, {1, 5})
    assert size(*nodes) == (2 + 3 + 3 + 6 + 6 + 3 + 6, {1, 2, 3, 4, 5})


def test_problems_of_one_structure_share_a_program() -> None:
    programs, nodes = SplitPrograms(), (given("x", B, S1), reader("y", "x", P))
    for tried in range(2):
        price = {("x", B, P): 1.0 + tried, ("x", S1, P): 2.0 + tried}
        assert solve_splits(SplitProblem(nodes, price), programs=programs).choices["x"] == "B"
    one = programs.of(structure_of(SplitProblem(nodes, price)))
    assert len(programs._stated) == 1 and one is programs._stated[0]
    others = [SplitProblem((given(f"x{i}", B),)) for i in range(20)]
    assert len({id(programs.of(structure_of(other))) for other in others}) == 20
    assert len(programs._stated) == 16 and one not in programs._stated


def test_a_tensor_is_kept_once() -> None:
    # Both readers save x whole: 10 bytes, not 20, at 0.15 s each: less than the 2 s of two splits.
    readers = [
        Node(n, (Choice("B", (("x", B),), saved=(("x", B),)), Choice("S1", (("x", S1),), seconds=1.0))) for n in "ab"
    ]
    nodes = (given("x", B), *readers)
    problem = SplitProblem(nodes, {("x", B, S1): 0.0}, {("x", B): 10.0}, second_per_byte=0.15)
    found = solve_splits(problem)
    assert (found.seconds, found.saved_bytes) == (0.0, 10.0)
    assert solve_splits(replace(problem, second_per_byte=0.25)).seconds == 2.0


def test_tied_nodes_take_one_label() -> None:
    nodes = (given("in", B, S1), reader("f", "in", S1), given("y", B), reader("out", "y", B, S1))
    problem = SplitProblem(nodes, {("in", B, S1): 3.0, ("y", B, S1): 1.0}, ties=(("in", "out"),))
    found = solve_splits(problem)
    assert found.choices["in"] == found.choices["out"] == "S1"
    assert found.seconds == 1.0


def test_equal_answers_go_to_the_earlier_choice() -> None:
    for order in ((B, S1, P), (P, B, S1)):
        nodes = (given("x", *order), reader("y", "x", *order), reader("z", "x", *order))
        seconds = Node("w", (Choice("only", seconds=1.0),))
        assert solve_splits(SplitProblem((*nodes, seconds))).choices["x"] == str(order[0])


def test_same_input_same_answer() -> None:
    assert solve_splits(block()) == solve_splits(block())


def gathers(found: SplitSolution) -> dict[str, tuple[str, str]]:
    """Return the conversions that communicate, by tensor."""
    return {t: (str(q), str(p)) for t, q, p in found.conversions}


def test_a_llama_block_splits_like_megatron() -> None:
    """Column, row, norms by token: per half block one all-gather for all its readers, and one reduce-scatter."""
    found = solve_splits(block(second_per_byte=5e-12))  # expensive enough that weights are not replicated
    assert gathers(found) == {
        "0.norm1.scaled": ("S1", "Bp"),
        "0.o": ("P", "S1"),
        "0.norm2.scaled": ("S1", "Bp"),
        "0.down": ("P", "S1"),
    }
    assert found.choices["in"] == "S1 -> S1"


def test_a_price_of_memory_buys_memory() -> None:
    free, priced = solve_splits(block()), solve_splits(block(second_per_byte=1e-12))
    assert priced.seconds > free.seconds
    assert priced.saved_bytes + priced.static_bytes < free.saved_bytes + free.static_bytes


def test_a_folded_block_takes_less_than_half_a_second() -> None:
    started = time.process_time()
    solve_splits(block())
    assert time.process_time() - started < 0.5


# ---- bad input ----


def test_conflicting_nodes_are_named() -> None:
    nodes = (given("a", B), given("x", P), reader("b", "a", S1, B), reader("y", "x", S1), reader("c", "a", B))
    with pytest.raises(InfeasibleSplit, match="x, y") as error:
        solve_splits(SplitProblem(nodes))
    assert error.value.nodes == ("x", "y")


def test_conflicting_pins_are_named() -> None:
    nodes = (given("x", B, S1), given("w", B, S1), reader("y", "x", B, S1), reader("z", "x", B, S1))
    problem = SplitProblem(nodes, fixed={"w": "B", "x": "S1", "z": "B"})
    with pytest.raises(InfeasibleSplit, match="x=S1, z=B") as error:
        solve_splits(problem)
    assert error.value.nodes == ("x", "z")


def test_a_pin_that_nothing_allows_has_the_users_name() -> None:
    nodes = (given("x", B, S1), reader("y", "x", B))
    with pytest.raises(InfeasibleSplit, match=r"a split that is fixed cannot be computed .*: up\.weight=S1") as error:
        solve_splits(SplitProblem(nodes, fixed={"x": "S1"}, called={"x": "up.weight"}))
    assert error.value.nodes == ("x",) and error.value.fix == "leave it out"


def test_unknown_pins_are_refused() -> None:
    problem = SplitProblem((given("x", B, S1),))
    with pytest.raises(PlanError, match="did you mean 'x'"):
        solve_splits(replace(problem, fixed={"xx": "B"}))
    with pytest.raises(PlanError, match="known: B, S1"):
        solve_splits(replace(problem, fixed={"x": "S7"}))


# ---- planted bugs ----


def _pairwise(
    model: SplitProgram, tensor: str, given: Sums, wants: dict[str, Sums], once: list[str], supplies: Any
) -> None:
    for name, own in wants.items():
        ways = {target: supplies[target] for target in own}
        _ADD_TENSOR(model, tensor, given, {name: own}, [n for n in once if n == name], ways)


def _saved_by_all(model: SplitProgram) -> None:
    """Demand a saved placement only if every option needs it."""
    _ADD_SAVED(model)
    for node in model.structure.nodes:
        for option in node.options:
            for pair in option.saved:
                if pair in model.s:
                    model.program.demand(6, {model.s[pair]: 1, model.x[node.name, option.label]: -1}, high=0)


def _saved_for_nothing(model: SplitProgram) -> None:
    model.s.update({pair: model.program.variable() for pair in model.structure.saved})


def _nothing(*_: object) -> None:
    pass


_ADD_TENSOR, _ADD_SAVED = split_program._add_tensor, split_program._add_saved


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("_add_tensor", _pairwise),
        ("_add_tensor", _nothing),
        ("_add_saved", _saved_by_all),
        ("_add_saved", _saved_for_nothing),
        ("_add_ties", _nothing),
    ],
)
def test_a_wrong_program_is_caught(part: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop a constraint, or state it for each reader separately: exhaustive search disagrees."""
    monkeypatch.setattr(split_program, part, wrong)
    caught = 0
    for seed in range(60):
        problem = random_problem(seed)
        if brute_force(problem) == math.inf:
            continue
        try:
            solved = solve_splits(problem)
        except InfeasibleSplit:
            caught += 1
            continue
        total = solved.seconds + problem.second_per_byte * (solved.saved_bytes + solved.static_bytes)
        caught += total != pytest.approx(brute_force(problem))
    assert caught
