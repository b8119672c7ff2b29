"""The code around a step: schedulers, curves, a profiler's ranges; and the page that documents them."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.runtime import profiler_ranges as ranges
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences

STEPS = 5
LR = torch.optim.lr_scheduler


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))).double()


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def batch(step: int) -> dict[str, Tensor]:
    return {"input": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) * (step + 1)}


def made(world: int = 1, **fix: Any) -> autoptd.Parallel:
    asked = {"inputs": {"input": batch(0)["input"][:2]}, "loss": squares, "batch": 8, "precision": "fp64"}
    options = {"lr": 0.05, "momentum": 0.9}
    groups = [{"names": "*.bias", "lr": 0.2}]
    return autoptd.parallelize(
        model(), world=world, fix=fix, optimizer="sgd", optimizer_options=options, parameter_groups=groups, **asked
    )


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Make a scheduler that counts steps and changes momentum too, and one that reads the loss."""
    return [
        LR.OneCycleLR(optimizer, max_lr=[0.2, 0.4], total_steps=STEPS + 1),
        LR.ReduceLROnPlateau(optimizer, patience=0, factor=0.3),
    ]


def alone(steps: int = STEPS, *, counted: bool = True) -> dict[str, Tensor]:
    plain = model()
    biases = [p for n, p in plain.named_parameters() if n.endswith("bias")]
    others = [p for n, p in plain.named_parameters() if not n.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": others}, {"params": biases, "lr": 0.2}], lr=0.05, momentum=0.9)
    counting, looking = schedulers(optimizer) if counted else (None, None)
    for step in range(steps):
        optimizer.zero_grad()
        loss = squares(plain(**batch(step)))
        loss.backward()
        optimizer.step()
        if counted:
            counting.step()
            looking.step(loss.detach())
    return {n: p.detach() for n, p in plain.named_parameters()}


@pytest.mark.parametrize("fix", [{"dp": 4}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2, "schedule": "zero-bubble"}], ids=str)
def test_schedulers_do_what_they_do_on_one_process(fix: dict[str, Any]) -> None:
    parallel = made(4, **fix)
    values = parallel.initial_values()
    for stage in range(parallel.plan.mesh.pp):
        parallel.stage_module(parallel.layout.mesh.rank(stage, 0, 0))

    def body(c: Communicators) -> tuple[dict[str, Tensor], list[float]]:
        mine = copy.copy(parallel)
        mine.start(c, values)
        counting, looking = schedulers(mine.optimizer)
        for step in range(STEPS):
            whole = batch(step)["input"]
            loss = mine.train_step({"input": whole.chunk(mine.dp_size)[mine.dp_rank]})
            mine.optimizer.zero_grad(set_to_none=step % 2 == 0)  # a harmless habit
            counting.step()
            looking.step(loss)
        return mine.state_dict(), [group["lr"] for group in mine.optimizer.param_groups]

    results, expected = run_lockstep(parallel.layout.mesh, body), alone()
    for state, rates in results:
        assert rates == results[0][1]
        assert max(differences(state, expected).values()) < 1e-12


@contextmanager
def default_type() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "a default device": lambda: torch.device("meta"),
    "a default type": default_type,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomalies": torch.autograd.detect_anomaly,
}


@pytest.mark.fault("a step without gradients")
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_caller_change_no_step(mode: str) -> None:
    within, par = MODES[mode], made(1, micro=4)
    for step in range(2):
        rows = batch(step)
        if mode == "inference":
            with within():  # such a tensor cannot be saved for backward
                rows = {"input": rows["input"].clone()}
        with within():
            par.train_step(rows)
    with within():
        par.eval_step(rows)
        found = par.state_dict()
    assert max(differences(found, alone(2, counted=False)).values()) <= 1e-12


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_running_rank_is_not_duplicated(duplicate: Callable[[object], object]) -> None:
    par = made()
    par.train_step(batch(0))
    with pytest.raises(RuntimeFault, match="neither copied nor pickled") as caught:
        duplicate(par)
    assert "par.state_dict()" in str(caught.value)
    assert copy.copy(par).step == 1


@pytest.mark.parametrize("mode", ["inference", "a default device", "anomalies"])
def test_a_program_may_be_made_in_any_mode(mode: str) -> None:
    observed = nn.Softplus() if mode == "anomalies" else nn.Identity()  # whose work no other plan here has observed
    first = nn.Sequential(*model(), observed)
    with MODES[mode]():
        par = autoptd.parallelize(
            first, world=1, inputs=batch(0), loss=squares, batch=8, precision="fp64", optimizer="sgd"
        )
    par.train_step(batch(0))
    assert all(float(x.norm()) for x in par.gradients().values())


@pytest.mark.parametrize("fix", [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_optimizer_s_own_step_changes_nothing_and_its_hooks_are_refused(fix: dict[str, Any], hooked: bool) -> None:
    parallel = made(2, **fix)
    values = parallel.initial_values()
    parallel.stage_module(0)

    def body(c: Communicators) -> dict[str, Tensor]:
        mine = copy.copy(parallel)
        mine.start(c, values)
        if hooked:
            mine.optimizer.register_step_pre_hook(lambda *_: None)
        for step in range(2):
            mine.train_step({"input": batch(step)["input"].chunk(mine.dp_size)[mine.dp_rank]})
            mine.optimizer.step()
        return mine.state_dict()

    if hooked:
        with pytest.raises(RuntimeFault, match="InputsError: the optimizer has hooks of its steps"):
            run_lockstep(parallel.layout.mesh, body)
        return
    for state in run_lockstep(parallel.layout.mesh, body):
        assert max(differences(state, alone(2, counted=False)).values()) < 1e-12


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_of_parameters_that_is_added_is_refused(world: int) -> None:
    parallel = made(world)
    values = parallel.initial_values()
    parallel.stage_module(0)

    def body(c: Communicators) -> None:
        mine = copy.copy(parallel)
        mine.start(c, values)
        mine.train_step({"input": batch(0)["input"].chunk(mine.dp_size)[mine.dp_rank]})
        mine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]})
        mine.train_step({"input": batch(1)["input"].chunk(mine.dp_size)[mine.dp_rank]})

    with pytest.raises(RuntimeFault, match="InputsError: the optimizer has 3 groups of parameters, and had 2"):
        run_lockstep(parallel.layout.mesh, body)


def test_every_action_is_a_range_in_the_plan_s_words() -> None:
    parallel = made()
    share = batch(0)
    parallel.train_step(share)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        parallel.train_step(share)
    names = [e.name for e in profiler.events()]
    modules = parallel.plan.stages[0].modules
    count = parallel.plan.schedule.microbatches
    wanted = [f"{kind}{i} stage 0 {modules}" for i in range(count) for kind in "FB"]
    wanted = [*wanted[:-1], "SUM stage 0", wanted[-1]]  # sums start while the last backward pass runs
    assert [n for n in names if " stage 0" in n] == ["GATHER stage 0", *wanted, "REDUCE stage 0", "STEP stage 0"]


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    assert hasattr(torch.autograd, "_profiler_enabled"), "seen in torch 2.13"
    monkeypatch.setattr(ranges, "record_function", never)
    parallel = made()
    parallel.train_step(batch(0))
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError):
        parallel.train_step(batch(0))


def test_the_line_for_trackers_logs_the_report() -> None:
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text("utf-8")
    (line,) = re.findall(r"`(tracker\.log\(.*?\))`", page)
    curves: dict[tuple[str, int], float] = {}
    writer = SimpleNamespace(log=lambda step, values: curves.update({(n, step): x for n, x in values.items()}))
    parallel = made()
    tracker = parallel.tracker(writer)
    for step in range(2):
        loss = float(parallel.train_step(batch(step)))
        exec(line, {"par": parallel, "tracker": tracker})
    assert curves["loss", 2] == loss and curves["learning_rate", 1] == 0.05


class Signs(torch.optim.Optimizer):
    """An optimizer of a user's own, which reads its parameters in a file of theirs."""

    elementwise = True

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


@pytest.mark.parametrize("optimizer", ["adamw", Signs], ids=["adamw", "own"])
def test_reads_of_the_optimizers_parameters_between_steps_warn(optimizer: Any) -> None:
    asked = {"inputs": {"input": batch(0)["input"][:2]}, "loss": squares, "batch": 8, "precision": "fp64"}
    parallel = autoptd.parallelize(model(), world=1, optimizer=optimizer, optimizer_options={"lr": 0.1}, **asked)
    given, clip = parallel.optimizer, torch.nn.utils.clip_grad_norm_

    def parts() -> list[Tensor]:
        return [p for group in parallel.optimizer.param_groups for p in group["params"]]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = LR.LinearLR(given)
        for step in range(2):
            parallel.train_step(batch(step))
            scheduler.step()
            given.step()
            given.zero_grad()
            parallel.report()
        given.load_state_dict(copy.deepcopy(given.state_dict()))
        parallel.train_step(batch(2))
        assert repr(given) and len(given.param_groups[0]["params"])
        assert pickle.dumps(given.param_groups) and copy.deepcopy(given.param_groups)
    for read in (lambda: clip(parts(), 1.0), lambda: clip(parallel.optimizer.param_groups[0]["params"], 1.0), parts):
        with pytest.warns(UserWarning, match="no gradients between steps") as seen:
            read()
        assert {each.filename for each in seen} == {__file__}
