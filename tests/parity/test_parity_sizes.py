"""Branches of a model on sizes: a program is made, and run, for sizes at which the model takes the traced ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, InputsError, PlanError, UnsupportedOp
from autoptd.layout.size_conditions import SizeCondition
from autoptd.passes.trace.traced import SEQUENCE

SAMPLES, TOKENS = 8, 6
Branch = Callable[[Tensor], Tensor]


def compared(y: Tensor) -> Tensor:
    return y * 2 if y.size(0) > 4 else y


def ghost(y: Tensor) -> Tensor:
    """Parts of the batch of at most 4 samples, each with a factor of its own."""
    return torch.cat([part * (i + 1) for i, part in enumerate(y.chunk(math.ceil(y.size(0) / 4)))])


def in_fours(y: Tensor) -> Tensor:
    return torch.cat([part * (i + 1) for i, part in enumerate(y.split(4))])


def repeated(y: Tensor) -> Tensor:
    for i in range((y.size(0) + 3) // 4):
        y = y * (i + 2)
    return y


def asserted(y: Tensor) -> Tensor:
    assert y.size(0) >= 4
    return y * (2 if y.size(0) % 4 == 0 else 3)


def long(y: Tensor) -> Tensor:
    return y * 3 if y.size(1) > 4 else y


def recent(y: Tensor) -> Tensor:
    """The last tokens, of which there are fewer in a shorter sequence."""
    return y[:, -4:] * torch.arange(4)[:, None]


class Branching(nn.Module):
    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.layer, self.branch = nn.Linear(4, 4), branch

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self.layer(x)).square().mean()


def batch(samples: int = SAMPLES, tokens: int = TOKENS) -> Tensor:
    return torch.randn(samples, tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def traced(
    branch: Branch, samples: int, tokens: int = TOKENS, kind: type[Branching] | None = None
) -> autoptd.TracedModel:
    torch.manual_seed(0)
    return autoptd.trace((kind or Branching)(branch).double(), inputs={"x": batch(samples, tokens)}, precision="fp64")


@pytest.mark.parametrize("branch", [compared, repeated, asserted])
@pytest.mark.fault("a branch on the number of samples")
def test_a_model_is_traced_again_for_the_samples_of_a_step(branch: Branch) -> None:
    source = traced(branch, 2)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", fix={"micro": 2}, optimizer="sgd")
    again = autoptd.parallelize(source, world=1, plan=par.plan, optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch()))
    for each in (par, again):
        assert float(each.train_step({"x": batch()})) == pytest.approx(expected, rel=1e-12)
    assert source.for_batch(2) is source or branch is asserted
    assert source.for_batch(SAMPLES) is not source


def exactly(y: Tensor) -> Tensor:
    return y * (2 if y.size(0) == SAMPLES else 3)


def exactly_in_python(y: Tensor) -> Tensor:
    return y * (2 if int(y.size(0)) == SAMPLES else 3)


@pytest.mark.parametrize(("branch", "examples"), [(exactly, SAMPLES), (exactly, 2), (exactly_in_python, SAMPLES)])
def test_branches_that_only_loops_over_samples_can_be_traced_for(branch: Branch, examples: int) -> None:
    """A graph for one number of samples is none of microbatches; the trace with loops is of other numbers."""
    with pytest.raises(PlanError, match="depends on sizes: it was traced where b"):
        autoptd.plan(traced(branch, examples), world=1, batch=SAMPLES, cluster="dgx-h100")


def named(y: Tensor) -> Tensor:
    return y * {"8": 2, "2": 3}.get(f"{y.size(0)}", 4)


def shown(y: Tensor) -> Tensor:
    return y * (2 if str(tuple(y.shape)).startswith("(8,") else 3)


@pytest.mark.parametrize("branch", [named, shown])
@pytest.mark.fault("a branch on the number of samples")
def test_a_branch_on_the_text_of_a_size_is_one_on_the_size(branch: Branch) -> None:
    par = autoptd.parallelize(source := traced(branch, 2), world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch()))
    assert float(par.train_step({"x": batch()})) == pytest.approx(expected, rel=1e-12)


def printed(y: Tensor) -> Tensor:
    logging.getLogger(__name__).debug(
        f"{y.size(0)} samples",
    )
    print(f"{y.shape} {y.size(0):03d}", end="")
    if y.size(1) < 1:
        raise ValueError(f"no tokens in {y.shape}")
    return y * 2


def test_texts_that_are_only_shown_decide_nothing() -> None:
    source = traced(printed, 2)
    assert not source.folded.traced.conditions
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        assert float(par.eval_step({"x": batch(3)})) == pytest.approx(float(source.model(batch(3))), rel=1e-12)


@pytest.mark.parametrize("kind", [lambda n: isinstance(n, int), lambda n: type(n) is int, lambda n: type(n).__name__])
def test_sizes_are_numbers(kind: Callable[[object], object]) -> None:
    source = traced(lambda y: y * (2 if kind(y.size(0)) in (True, "int") else 3) * (2 if kind(y.size(1)) else 3), 2)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        assert float(par.train_step({"x": batch()})) == pytest.approx(float(source.model(batch())), rel=1e-12)


def named(y: Tensor) -> Tensor:
    rows = []
    for i, row in enumerate(y):
        print(f"sample {i} at {i / 2}", end="")
        with torch.profiler.record_function(f"sample {i}"):
            rows.append(row * 2)
    return torch.stack(rows)


def cut_off(y: Tensor) -> Tensor:
    total = []
    for i, row in enumerate(y):
        if i >= 7:
            break
        total.append(row)
    return torch.stack(total)


LOOPS: dict[str, Branch] = {
    "cut off": cut_off,
    "one sample": lambda y: torch.stack([row * (2 if i == 7 else 1) for i, row in enumerate(y)]),
    "groups": lambda y: torch.stack([y[i] * (2 if i // 8 else 1) for i in range(y.size(0))]),
    "key": lambda y: torch.stack([row * {7: 2}.get(i, 1) for i, row in enumerate(y)]),
    "text": lambda y: torch.stack([row * {"7": 2}.get(str(i), 1) for i, row in enumerate(y)]),
    "bits": lambda y: torch.stack([row * (2 if i & 8 else 1) for i, row in enumerate(y)]),
    "square": lambda y: torch.stack([row * (2 if i**2 > 48 else 1) for i, row in enumerate(y)]),
    "inverse": lambda y: torch.stack([row * (2 if (i + 1) ** -1 < 0.13 else 1) for i, row in enumerate(y)]),
    "rounded": lambda y: torch.stack([row * (1 + int(i / 7)) for i, row in enumerate(y)]),
    "rounded down": lambda y: torch.stack([row * (1 + math.floor(i * 0.14)) for i, row in enumerate(y)]),
    "any": lambda y: y * (2 if any(i == 7 for i in range(len(y))) else 1),
    "within": lambda y: y * (2 if 7 in range(y.size(0)) else 1),
    "part": lambda y: y * len(range(y.size(0))[:3]),
    "zip": lambda y: y * sum(w for _, w in zip(range(y.size(0)), (1, 2, 3, 4))),  # noqa: B905
    "equal": lambda y: y * (2 if [0] * y.size(0) == [0] * 8 else 1),
    "table": lambda y: y * [1, 1, 1, 1, 1, 1, 1, 1, 2][y.size(0)],
    "percent": lambda y: y * (2 if "%d" % y.size(0) == "8" else 1),  # noqa: UP031
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.fault("later turns of a loop over samples")
def test_what_differs_for_later_samples_than_those_of_the_trace_is_refused(name: str) -> None:
    with pytest.raises(AutoptdError) as error:
        autoptd.plan(traced(LOOPS[name], 2), world=1, batch=SAMPLES, cluster="dgx-h100")
    assert error.value.fix


def test_loops_that_treat_all_samples_alike() -> None:
    bodies: list[Branch] = [
        lambda y: torch.stack([row * 2 for i, row in enumerate(y) if i >= 0]),
        lambda y: torch.stack([y[i] * 3 for i in range(y.size(0))]),
        named,
        lambda y: torch.cat(y.split([1] * y.size(0))),
        lambda y: torch.stack([a * b for a, b in zip(y, y, strict=True)]),
    ]
    for body in bodies:
        source = traced(body, 2)
        par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", fix={"micro": 2}, optimizer="sgd")
        with torch.no_grad():
            assert float(par.train_step({"x": batch()})) == pytest.approx(float(source.model(batch())), rel=1e-12)


class Token(nn.Module):
    """A parameter that a list repeats for each sample."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.first, self.stacked = nn.Parameter(torch.ones(1, 4)), stacked

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        if self.stacked:
            return (torch.cat([torch.stack([self.first] * b), x], 1) * x.mean()).square().mean()
        return (torch.cat([self.first] * b) * x[:, 0]).square().mean()


@pytest.mark.parametrize("stacked", [True, False])
def test_a_list_of_one_tensor_for_each_sample(stacked: bool) -> None:
    model = Token(stacked).double()
    source = autoptd.trace(model, inputs={"x": batch()}, precision="fp64")
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        assert float(par.train_step({"x": batch()})) == pytest.approx(float(model(batch())), rel=1e-12)


def test_a_table_by_the_length_of_a_sequence_is_one_for_that_length() -> None:
    source = traced(lambda y: y * {"4": 2, "6": 3}[f"{y.size(1)}"], SAMPLES)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with pytest.raises(InputsError, match="traced where s == 6, but here s = 4"):
        par.eval_step({"x": batch(tokens=4)})


@pytest.mark.parametrize("function", [lambda b: math.gcd(b, 12), math.log, lambda b: b.bit_length(), hash])
@pytest.mark.fault("a number of samples read in Python")
def test_functions_of_python_get_no_number_of_samples(function: Callable[[int], float]) -> None:
    """They would be given that of the trace, where loops over samples are traced."""
    with pytest.raises(AutoptdError) as error:
        traced(lambda y: y * function(y.size(0)), SAMPLES)
    assert error.value.fix


def several(y: Tensor) -> Tensor:
    return y * 2 if y.size(0) > 1 else y


def test_a_step_of_one_sample_takes_no_branch_for_several() -> None:
    par = autoptd.parallelize(traced(several, 2), world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with pytest.raises(InputsError, match="traced where b > 1, but here b = 1"):
        par.eval_step({"x": batch(1)})


def spread(y: Tensor) -> Tensor:
    """A number for each token, which is given to every sample if there are several."""
    at = torch.arange(y.size(1), dtype=y.dtype).view(1, -1, 1)
    if y.size(0) != at.size(0):
        at = at.expand(y.size(0), -1, -1)
    return y * at


def flat_alone(y: Tensor) -> Tensor:
    """A view that one sample alone has, of the same numbers."""
    return y.view(1, -1, 4) * 3 if y.size(0) == 1 else y * 3


@pytest.mark.parametrize("branch", [spread, flat_alone])
def test_a_step_of_one_sample_may_branch_if_it_computes_the_same(branch: Branch) -> None:
    source = traced(branch, 2)
    par = autoptd.parallelize(source, world=1, batch=1, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch(1)))
    assert float(par.train_step({"x": batch(1)})) == pytest.approx(expected, rel=1e-12)
    again = autoptd.parallelize(source, world=1, plan=par.plan, optimizer="sgd")
    assert float(again.train_step({"x": batch(1)})) == pytest.approx(expected, rel=1e-12)


def more_alone(y: Tensor) -> Tensor:
    return y * (3 if y.size(0) == 1 else 2)


def other_alone(y: Tensor) -> Tensor:
    return y.flatten(1).unflatten(1, (4, -1)).mT if y.size(0) == 1 else y.flatten(1).unflatten(1, (-1, 4))


def long_alone(y: Tensor) -> Tensor:
    return y * (2 if y.size(0) == 1 and y.size(1) > 4 else 1)


@pytest.mark.parametrize("branch", [several, more_alone, other_alone, long_alone])
@pytest.mark.fault("a branch on the number of samples")
def test_a_step_of_one_sample_that_computes_otherwise_is_refused(branch: Branch) -> None:
    with pytest.raises(PlanError, match="depends on sizes: it was traced where b"):
        autoptd.plan(traced(branch, 2), world=1, batch=1, cluster="dgx-h100")


def at_least_four(y: Tensor) -> Tensor:
    return y * max(y.size(0), 4)


class Before(Branching):
    """The layer follows the branch, and is not computed once for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.branch(x)).square().mean()


@pytest.mark.parametrize("number", [lambda b: max(b, 4), lambda b: min(b, 2), lambda b: 1 % b, lambda b: 1 // b + 1])
def test_numbers_of_the_batch_s_size_are_not_those_of_a_microbatch(number: Callable[[int], int]) -> None:
    """Also those that differ for a microbatch of one sample only."""
    with pytest.raises(UnsupportedOp, match="computes with the number of samples"):
        traced(lambda y: y * number(y.size(0)), 2, kind=Before)


@pytest.mark.parametrize("branch", [ghost, in_fours])
def test_parts_of_a_batch_that_a_step_has_and_the_example_has_not_are_refused(branch: Branch) -> None:
    with pytest.raises(UnsupportedOp, match="works across samples"):
        autoptd.plan(traced(branch, 2, kind=Before), world=1, batch=SAMPLES, cluster="dgx-h100")


@pytest.mark.parametrize("branch", [ghost, in_fours, at_least_four])
def test_an_end_of_the_loss_computes_with_the_samples_of_the_whole_batch(branch: Branch) -> None:
    source = traced(branch, 2)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", fix={"micro": 2}, optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch()))
    assert float(par.train_step({"x": batch()})) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("branch", [compared, repeated])
def test_in_microbatches_it_takes_the_branches_of_the_whole_batch(branch: Branch) -> None:
    source = traced(branch, SAMPLES)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", fix={"micro": 2}, optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch()))
    assert float(par.train_step({"x": batch()})) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(InputsError, match="b = 4"):
        par.eval_step({"x": batch(4)})


def test_sequences_at_which_a_model_branches_are_refused() -> None:
    source = traced(long, SAMPLES)
    par = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd")
    with torch.no_grad():
        expected = float(source.model(batch(tokens=5)))
    assert float(par.train_step({"x": batch(tokens=5)})) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(InputsError, match=r"s = 4"):
        par.train_step({"x": batch(tokens=4)})


def test_the_last_tokens_of_sequences_that_have_as_many() -> None:
    par = autoptd.parallelize(
        source := traced(recent, SAMPLES), world=1, batch=SAMPLES, cluster="dgx-h100", optimizer="sgd"
    )
    for tokens in (4, 6):
        with torch.no_grad():
            expected = float(source.model(batch(tokens=tokens)))
        assert float(par.eval_step({"x": batch(tokens=tokens)})) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(InputsError, match=r"traced where s >= 4, but here s = 3") as error:
        par.train_step({"x": batch(tokens=3)})
    assert "y[:, -4:]" in error.value.where


def test_what_holds_for_all_sizes_is_no_condition() -> None:
    assert not traced(lambda y: y if y.size(0) + y.size(1) > 1 else y * 2, SAMPLES).folded.traced.conditions
    (condition,) = traced(long, SAMPLES).folded.traced.conditions
    assert isinstance(condition, SizeCondition) and not condition.holds({"b": 8})


def test_a_condition_that_divides_by_zero_does_not_hold() -> None:
    parts = sympy.floor(SEQUENCE / sympy.floor(SEQUENCE / 4))
    for relation in (sympy.Eq(parts, 4), sympy.Eq(sympy.Min(SEQUENCE, parts), parts)):
        assert [SizeCondition(relation, "model.py:1").holds({"s": n}) for n in (2, 8)] == [False, True]
