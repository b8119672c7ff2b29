"""Training resumed from a checkpoint continues as if it had never stopped; a mismatch is refused without effect."""

from __future__ import annotations

import copy
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import autoptd
from autoptd.api import Parallel
from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.folder import PROGRESS, find
from autoptd.checkpoint.restore import restore
from autoptd.errors import CheckpointError, RuntimeFault
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

ROOT = Path(__file__).parents[2]
SIZES = GPTSizes(vocab=32, max_seq=8, width=16, layers=1, heads=2, dropout=0.1)


@cache
def source(sizes: GPTSizes, precision: str) -> autoptd.TracedModel:
    torch.manual_seed(0)
    return autoptd.trace(NanoGPT(sizes), seq=8, precision=precision)


def made(sizes: GPTSizes = SIZES, precision: str = "fp32", traced: Any = None, **options: Any) -> Parallel:
    given = {"world": 1, "batch": 4, "cluster": "local", "clip_norm": 1.0}
    return autoptd.parallelize(traced or source(sizes, precision), **{**given, **options})


def step(parallel: Parallel) -> Tensor:
    generator = torch.Generator().manual_seed(parallel.step)
    tokens = torch.randint(SIZES.vocab, (4, 9), generator=generator)
    return parallel.train_step({"idx": tokens[:, :-1], "targets": tokens[:, 1:]})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_to_the_bit(tmp_path: Path, precision: str) -> None:
    """Resume with dropout, a learning-rate schedule, and a checkpoint that was written in the background."""
    first, second = made(precision=precision), made(precision=precision)
    rates = [MultiStepLR(p.optimizer, [1, 3]) for p in (first, second)]
    losses = []
    for _ in range(5):
        losses.append(step(first))
        rates[0].step()
        if first.step == 2:
            first.save(tmp_path, others={"rate": rates[0]}, wait=False)
    first.finish_saving()
    assert second.load(tmp_path, others={"rate": rates[1]}) == second.step == 2
    for expected in losses[2:]:
        assert torch.equal(step(second), expected)
        rates[1].step()
    assert rates[1].get_last_lr() == rates[0].get_last_lr()
    assert same(first.state_dict(), second.state_dict())


def test_the_next_save_waits_and_the_last_counts(tmp_path: Path) -> None:
    parallel = made()
    for _ in range(3):
        step(parallel)
        parallel.save(tmp_path, keep=2, wait=False)
    parallel.finish_saving()
    assert find(tmp_path).name == "step-00000003" and not list(tmp_path.glob(".*"))


SCRIPT = """
import sys, torch, autoptd
x = torch.ones(2, 4)
par = autoptd.parallelize(torch.nn.Linear(4, 1), world=1, inputs={"input": x}, loss=torch.sum, batch=2)
par.save(sys.argv[1], wait=False)
print("all is said")
"""


def test_a_failure_that_no_call_raises_ends_the_process_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "file")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"saving step 0 into {tmp_path / 'file'} failed" in ended.stderr and "finish_saving" in ended.stderr
    assert ended.returncode == 1 and ended.stdout == "all is said\n"


@pytest.mark.parametrize("keep", [0, -1, "2", 1.5])
def test_a_number_to_keep_that_is_none_removes_nothing(tmp_path: Path, keep: Any) -> None:
    parallel = made()
    for _ in range(2):
        step(parallel)
        parallel.save(tmp_path)
    with pytest.raises(CheckpointError, match="keep="):
        parallel.save(tmp_path, keep=keep)
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_parameters_alone(tmp_path: Path) -> None:
    first, second = made(), made(optimizer="sgd", optimizer_options={"lr": 0.1})
    step(first)
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match="trained by AdamW, not SGD"):
        second.load(tmp_path)
    second.load(tmp_path, optimizer=False)
    assert same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize(("wrote", "reads"), [("fp32", "fp64"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp64", "fp32")])
def test_numbers_become_wider_and_never_narrower(tmp_path: Path, wrote: str, reads: str) -> None:
    first, second = made(precision=wrote), made(precision=reads)
    step(first)
    first.save(tmp_path)
    if wrote == "fp64":
        with pytest.raises(CheckpointError, match=r"(?s)of other types.*float64 in it, torch.float32 in"):
            second.load(tmp_path)
    else:
        assert second.load(tmp_path) == 1


def flip(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "__0_0.distcp").write_bytes(bytes(data))


def nothing(path: Path) -> None:
    pass


WIDER = GPTSizes(vocab=32, max_seq=8, width=24, layers=1, heads=2)
DEEPER = GPTSizes(vocab=32, max_seq=8, width=16, layers=2, heads=2)
GROUPS = {"parameter_groups": [{"names": "*norm*", "weight_decay": 0.0}]}
Refusal = tuple[Callable[[Path], None], dict[str, Any], dict[str, Any], str]
REFUSALS: dict[str, Refusal] = {  # damage to the checkpoint, the other run, keywords of load, the expected message
    "a flipped bit": (flip, {}, {}, "__0_0.distcp is damaged"),
    "a missing file": (lambda path: (path / PROGRESS).unlink(), {}, {}, "progress.pt is missing"),
    "another width": (
        nothing,
        {"sizes": WIDER},
        {},
        r"of another model(.|\n)*norm.weight: .16. in it, .24. in the model",
    ),
    "more layers": (nothing, {"sizes": DEEPER}, {}, "blocks.1.norm_1.weight: not in it"),
    "other groups": (nothing, GROUPS, {}, "has 1 parameter groups, not 2"),
    "no such state": (nothing, {}, {"others": {"rate": None}}, "no state of rate"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    harm, options, keywords, message = REFUSALS[name]
    first, other = made(), made(**options)
    step(first)
    first.save(tmp_path)
    harm(find(tmp_path))
    before = {n: x.clone() for n, x in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path, **keywords)
    assert same(other.state_dict(), before) and other.step == 0


def test_a_deeper_model_s_checkpoint_is_refused(tmp_path: Path) -> None:
    deeper, first = made(sizes=DEEPER), made()
    deeper.save(tmp_path)
    before = {n: x.clone() for n, x in first.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"of another model(.|\n)*blocks.1.norm_1.weight: not in the model"):
        first.load(tmp_path)
    assert same(first.state_dict(), before)


def test_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    """It would take the options that the checkpoint has for that group."""
    first = made(parameter_groups=[{"names": "*norm*", "lr": 0.5}])
    second = made(parameter_groups=[{"names": "*norm_1*", "lr": 0.5}])
    step(first)
    first.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"other parameters in the groups(.|\n)*norm_2.weight: in group 1 .* 0 of the opt"
    ):
        second.load(tmp_path)
    assert second.load(tmp_path, optimizer=False) == 1
    again = made(parameter_groups=[{"names": ["*norm_1*", "*norm*"], "lr": 0.1}])
    again.load(tmp_path)
    assert again.optimizer.param_groups[1]["lr"] == 0.5


def test_a_state_that_is_not_restored_is_named(tmp_path: Path) -> None:
    first, second = made(), made()
    first.save(tmp_path, others={"rates": MultiStepLR(first.optimizer, [1])})
    with pytest.warns(UserWarning, match="the saved state of 'rates' is not restored"):
        second.load(tmp_path)
    with pytest.warns(UserWarning, match="the saved state of 'rates' is not restored"):
        second.resume(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load(tmp_path, optimizer=False)
        second.load(tmp_path, others={"rates": MultiStepLR(second.optimizer, [1])})


def test_the_state_of_parameters_that_are_frozen_now_is_named(tmp_path: Path) -> None:
    first = made()
    step(first)
    first.save(tmp_path)
    model = NanoGPT(SIZES)
    frozen = [name for name, p in model.named_parameters() if "down" in name and p.requires_grad_(False) is p]
    second = made(traced=autoptd.trace(model, seq=8, precision="fp32"))
    with pytest.warns(UserWarning, match=rf"the optimizer's state of {frozen[0]}.*is not restored: frozen now"):
        second.load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load(tmp_path, optimizer=False)


def test_another_batch_than_before_is_named(tmp_path: Path) -> None:
    """A sampler's place in the data is the number of steps of its own batch."""
    first, again, other = made(), made(), made(batch=2)
    first.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(tmp_path)  # no step was done
    step(first)
    first.save(tmp_path)
    with pytest.warns(UserWarning, match="batches of 4 samples, and this plan's have 2: step 1 of a sampler"):
        assert other.resume(tmp_path) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(tmp_path, optimizer=False)
        again.load(tmp_path)


@pytest.mark.parametrize("own", [False, True])
def test_a_state_that_only_one_rank_has_is_named(own: bool) -> None:
    """Rank 0's is saved, and all ranks would go on with it."""
    parallel = made(world=2, fix={"dp": 2})
    values = parallel.initial_values()
    parallel.stage_module(0)

    def body(c: Communicators) -> None:
        mine = copy.copy(parallel)
        mine.start(c, values)
        state = {"seen": {3, 1}, "order": torch.arange(3), "best": [1.0, float("nan")]}
        mine._session._compare({"alike": state, "random": {"seed": c.rank if own else 0}})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_lockstep(parallel.layout.mesh, body)
    said = [str(each.message) for each in caught if "differs over the ranks" in str(each.message)]
    assert len(said) == own and all("'random'" in text for text in said)


def test_what_went_wrong_beside_training_is_raised_by_the_next_call(tmp_path: Path) -> None:
    parallel = made()
    step(parallel)
    (tmp_path / "file").write_text("in the way")
    parallel.save(tmp_path / "file", wait=False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        parallel.finish_saving()
    parallel.save(tmp_path / "folder")  # a folder can be saved to only once
    assert find(tmp_path / "folder").name == "step-00000001"


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        made().resume(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value) and "rank 0" in str(caught.value)
    assert made().resume(tmp_path / "new" / "folder") == 0 and not list((tmp_path / "new" / "folder").iterdir())


def test_the_system_s_reason_is_named(tmp_path: Path) -> None:
    """Torch's archives end with an error of their own after one of the file system."""
    torch.manual_seed(0)
    inputs = {"input": torch.zeros(2, 8)}
    parallel = autoptd.parallelize(nn.Linear(8, 4000), world=1, inputs=inputs, loss=torch.sum, batch=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            parallel.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = made()
    step(parallel)
    parallel.save(tmp_path)
    step(parallel)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp._CheckpointWriter, "resolve_data", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            parallel.save(tmp_path)
    assert find(tmp_path).name == "step-00000001" and not list(tmp_path.glob(".*"))
    parallel.save(tmp_path)
    assert find(tmp_path).name == "step-00000002"


def test_torch_reads_it_without_us(tmp_path: Path) -> None:
    parallel = made()
    step(parallel)
    parallel.save(tmp_path)
    found = {f"model.{name}": torch.zeros_like(x) for name, x in parallel.state_dict().items() if name != "head.weight"}
    torch.distributed.checkpoint.load(found, checkpoint_id=find(tmp_path), no_dist=True)
    for name, x in parallel.state_dict().items():
        assert name == "head.weight" or torch.equal(found[f"model.{name}"], x)  # the head is tied to the embedding


def test_another_model_is_refused_by_ranks_that_lack_nothing(tmp_path: Path) -> None:
    """The first stage finds all it needs in a checkpoint of fewer layers; it must not wait for the ranks that fail."""
    first = made()
    step(first)
    first.save(tmp_path)
    fix = {"dp": 1, "tp": 1, "pp": 2, "micro": 2}
    other = made(sizes=DEEPER, world=2, fix=fix, precision="fp32")
    values = other.initial_values()

    def body(c: Communicators) -> str:
        mine = copy.copy(other)
        mine.start(c, values)
        with pytest.raises(CheckpointError) as caught:
            restore(tmp_path, mine._running, (), None, optimizer=False)
        return str(caught.value)

    told = run_lockstep(other.layout.mesh, body)
    assert all("blocks.1.norm_1.weight: not in it" in text for text in told)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """A second model that saves the same step would remove the checkpoint of the first."""
    first, second = made(), made(GPTSizes(vocab=32, max_seq=8, width=16, layers=2, heads=2))
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match="has checkpoints of another model"):
        second.save(tmp_path)
    assert first.load(tmp_path) == 0


def test_replacing_what_an_equal_model_saved_is_no_secret(tmp_path: Path) -> None:
    first, second = made(), made()
    first.save(tmp_path)
    with pytest.warns(UserWarning, match="step 0 is replaced, which another Parallel of this process saved"):
        second.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.save(tmp_path)


def test_a_load_that_ends_within_is_taken_again_before_training(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("of another version")

    first, second = made(), made()
    step(first)
    first.save(tmp_path, others={"rates": Refuses()})
    with pytest.raises(KeyError):
        second.load(tmp_path, others={"rates": Refuses()})
    for call in (step, Parallel.state_dict, lambda parallel: parallel.save(tmp_path)):
        with pytest.raises(RuntimeFault, match="or a load: some are new"):
            call(second)
    with pytest.warns(UserWarning, match="rates"):
        second.load(tmp_path)
    assert torch.equal(step(second), step(first))


def test_a_run_that_does_not_resume_leaves_checkpoints_of_others(tmp_path: Path) -> None:
    for name, expected in (("old", ["step-00000001"]), ("new", ["step-00000001", "step-00000001.1"])):
        script = f"""
import warnings
from pathlib import Path
from tests.checkpoint.test_session import made, step
parallel = made()
step(parallel)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    parallel.save(Path({str(tmp_path)!r}), keep=1)
assert any("1 checkpoint(s) of another run" in str(each.message) for each in said) == ({name!r} == "new"), said
"""
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *expected]


def test_a_writer_goes_on_though_its_save_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save, as of a script that caught Ctrl-C, waits for it."""
    parallel, commit, goes_on, calls = made(), folder.commit, threading.Event(), list[int]()

    def interrupting(root: Path, number: int, *rest: Any) -> Path:
        calls.append(number)
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(10)
        return commit(root, number, *rest)

    monkeypatch.setattr(folder, "commit", interrupting)
    step(parallel)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest's workers ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel.save(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    step(parallel)
    threading.Timer(0.2, goes_on.set).start()
    parallel.save(tmp_path)
    assert calls == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def test_a_process_may_change_its_folder_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, prepare, goes_on = made(), folder.prepare, threading.Event()

    def waiting(root: Path, number: int) -> Path:
        goes_on.wait(10)
        return prepare(root, number)

    monkeypatch.setattr(folder, "prepare", waiting)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    parallel.save("saved", wait=False)
    monkeypatch.chdir("other")
    goes_on.set()
    parallel.finish_saving()
    assert find(tmp_path / "saved").name == "step-00000000"
    assert not [*(tmp_path / "other").iterdir()]
