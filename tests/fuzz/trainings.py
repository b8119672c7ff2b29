"""Random ways to train random networks: each ends as in one process, or is refused by an error of autoptd.

    python -m tests.fuzz.trainings --count 400 --seed 0       print a table of the outcomes
    python -m tests.fuzz.trainings --seed 17 --show           print one of them, and its outcome

The networks are those of tests/fuzz/networks.py. Drawn around them are the loss (what forward returns, or a function),
nested inputs, frozen parameters, dropout, the optimizer and its options, parameter groups, clipping, a schedule, a
smaller last batch, evaluation between steps, and a checkpoint that another plan goes on from.
"""

from __future__ import annotations

import copy
import faulthandler
import fnmatch
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import autoptd
from autoptd.checkpoint.huggingface import ONE
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError
from autoptd.layout.mesh import Mesh
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.listening import LOOPBACK, on_loopback
from autoptd.runtime.comm.processes import connect_processes
from autoptd.runtime.optimizers.named import construct
from autoptd.testing.parity import differences, on_host
from tests.fuzz.networks import SAMPLES, command, loaded, network_text, random_batch, random_fix
from tests.fuzz.pieces import TOKENS, Family
from tests.fuzz.programs import judged, perturbed
from tests.parity.parity_check import bulk

T = TypeVar("T")
_SGD, _ADAM = {"lr": 0.03}, {"lr": 3e-3, "eps": 1e-4}  # less amplifies rounding where gradients are small
_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    ("sgd", {**_SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("sgd", {**_SGD, "momentum": 0.5, "dampening": 0.3}),
    ("adamw", {**_ADAM, "weight_decay": 0.3}),
    ("adamw", {**_ADAM, "betas": (0.5, 0.7), "amsgrad": True}),
    ("lion", {"lr": 1e-3, "weight_decay": 0.1}),
    ("adafactor", {"lr": 1e-2}),
    ("muon", {"lr": 1e-2, "adamw": _ADAM}),
    (torch.optim.Adam, {**_ADAM, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.RMSprop, {**_ADAM, "momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.NAdam, {**_ADAM, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {**_ADAM, "weight_decay": 0.1}),
    (torch.optim.Adamax, {**_ADAM}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.ASGD, {"lr": 0.02, "t0": 1}),
]
_LONGEST_S = 120.0  # seconds that a rank of a plan is waited for
_TENSORS = ("labels", "mask", "targets")  # of a batch, besides what the layers read


@dataclass
class Training:
    """A network's text and the way it is trained. `nested`: labels and mask are in a dict `extra`."""

    text: str
    fixes: list[dict[str, Any]]  # the plan, and the one that goes on from its checkpoint
    optimizer: Any
    optimizer_options: dict[str, Any]
    loss: str = ""  # the function's text; "": forward returns the loss
    targets: tuple[str, ...] = ()  # what the function takes besides outputs; (): the batch
    read: tuple[str, ...] = ()  # outputs that the function reads
    terms: bool = False  # whether it returns another number too
    nested: bool = False
    dropout: bool = False
    frozen: tuple[str, ...] = ()  # patterns of names
    groups: list[dict[str, Any]] = field(default_factory=list)
    clip: float | None = None
    decay: float = 1.0  # of the learning rate, each step
    samples: tuple[int, ...] = (SAMPLES, SAMPLES)  # of each step
    lengths: tuple[int, ...] = ()  # tokens of a sample in each step; (): all
    saved: int = 0  # steps before the checkpoint; 0: none
    evaluated: bool = False
    exported: bool = False  # whether the state is compared as it is exported

    def __str__(self) -> str:
        shown = {n: x for n, x in vars(self).items() if n not in ("text", "loss")}
        return "\n".join([self.text, self.loss, *(f"# {name} = {value}" for name, value in shown.items())])


def draw(rng: random.Random, family: Family = TOKENS) -> Training:
    """Draw a network and its training, which may have no plan."""
    optimizer, given = rng.choice(_OPTIMIZERS)
    text = network_text(rng, family)
    made = Training(text, [random_fix(rng, text, family)], optimizer, dict(given))
    if rng.random() < 0.4:
        _with_loss(made, rng)
    if rng.random() < 0.3:
        _with_nested(made)
    if rng.random() < 0.2:
        made.dropout = True
        made.text = re.sub(
            r"        return (.*), memo\n", r"        return F.dropout(\1, 0.2, self.training), memo\n", made.text
        )
    if rng.random() < 0.5:
        patterns = rng.sample(["*bias", "*.0.*", "*table*", "layers.1.*", "*weight", "head*"], 2)
        made.groups = [{"names": [pattern], "lr": rng.choice([1e-3, 2e-2])} for pattern in patterns]
        if rng.random() < 0.3:
            made.groups[0]["optimizer"] = rng.choice(["sgd", "adamw"])
    if rng.random() < 0.3:
        made.frozen = (rng.choice(["table*", "*.0.*", "*bias", "head*", "layers.1.*"]),)
    made.clip = rng.choice([None, None, 0.05, 1.0])
    made.decay = rng.choice([1.0, 0.5])
    made.samples = (SAMPLES,) * rng.choice([2, 3])
    if rng.random() < 0.3:
        made.samples += (rng.randint(SAMPLES - 2, SAMPLES - 1),)
    if rng.random() < 0.4:
        made.saved = rng.randint(1, len(made.samples) - 1)
        made.fixes.append(random_fix(rng, text, family))
    if family is TOKENS and rng.random() < 0.3:
        made.lengths = (8, *(rng.choice([8, 6, 4, 2]) for _ in made.samples[1:]))  # the first is planned for
    made.evaluated, made.exported = rng.random() < 0.4, rng.random() < 0.3
    return made


def _with_loss(made: Training, rng: random.Random) -> None:
    """Take the loss out of forward, if it reads no module."""
    head, _, returned = made.text.rpartition("        return ")
    if "self." in returned:
        return
    read = [name for name in ("x", "logits", "first", "memo") if re.search(rf"\b{name}\b", returned)]
    made.read = tuple(read)
    made.text = f"{head}        return {{{', '.join(f'{name!r}: {name}' for name in read)}}}\n"
    taken = [name for name in _TENSORS if re.search(rf"\b{name}\b", returned)]
    lines = [f"{name} = out[{name!r}]" for name in read]
    if taken == ["labels"] and rng.random() < 0.7:
        made.targets = ("labels",)
        made.text = made.text.replace(", labels, mask, targets):", ", mask, targets):")
        lines += ["b = labels.shape[0]"]
    else:
        lines += [*(f"{name} = batch[{name!r}]" for name in taken), "b = batch['targets'].shape[0]"]
    made.terms = rng.random() < 0.4
    result = f"{{'loss': {returned.strip()}, 'size': {read[0]}.square().mean()}}" if made.terms else returned.strip()
    body = "".join(f"    {line}\n" for line in [*lines, f"return {result}"])
    made.loss = f"def loss(out, {'labels' if made.targets else 'batch'}):\n{body}"


def _with_nested(made: Training) -> None:
    """Hand labels and mask over in a dict."""
    inside = [name for name in ("labels", "mask") if name not in made.targets]
    given = ", ".join([*inside, "targets"])
    unpacked = "".join(f"        {name} = extra[{name!r}]\n" for name in inside)
    made.text = made.text.replace(f", {given}):\n", f", extra, targets):\n{unpacked}")
    for name in inside:
        made.loss = made.loss.replace(f"batch[{name!r}]", f"batch['extra'][{name!r}]")
    made.nested = True


def _batch(made: Training, rng: random.Random, family: Family, step: int) -> dict[str, Any]:
    whole: dict[str, Any] = {name: x[: made.samples[step]] for name, x in random_batch(rng, family).items()}
    if made.lengths:
        whole = {name: x[:, : made.lengths[step]].contiguous() for name, x in whole.items()}
    if made.nested:
        inside = [name for name in ("labels", "mask") if name not in made.targets]
        whole["extra"] = {name: whole.pop(name) for name in inside}
    return whole


@dataclass
class Ended:
    """The results of a training: losses of the steps, those of evaluations, and tensors by name."""

    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def in_one_process(made: Training, model: nn.Module, batches: Sequence[Any], hidden: Collection[str]) -> Ended:
    """Train as plain PyTorch does."""
    model, loss = copy.deepcopy(model), _function(made.loss)
    optimizers = _optimizers(made, model, hidden)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, made.decay) for o in optimizers]

    def forward(batch: Any) -> Any:
        return model(**{name: x for name, x in batch.items() if name not in made.targets})

    def values(batch: Any) -> tuple[Tensor, list[float]]:
        batch = copy.deepcopy(batch)
        out = forward(batch)
        found = out if loss is None else loss(out, *([batch[n] for n in made.targets] or [batch]))
        return (found["loss"], [float(found["size"].detach())]) if made.terms else (found, [])

    ended = Ended([], [], {}, {})
    for step, batch in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, terms = values(batch)
        total.backward()  # type: ignore[no-untyped-call]
        if made.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), made.clip)
        if step == 0:
            ended.gradients = on_host({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        ended.losses += [float(total.detach()), *terms]
        if made.evaluated:
            model.eval()
            with torch.no_grad():
                ended.evaluated.append(float(values(batch)[0]))
                if made.read:
                    found = _metrics(made)["values"](forward(batch), batch)
                    ended.evaluated += [float(found.mean()), float((found * torch.arange(len(found))).sum())]
            model.train()
    ended.state = on_host(model.state_dict())
    if made.exported:
        ended.state |= {f"{name} as exported": x for name, x in model.state_dict().items()}
    return ended


def _function(text: str) -> Callable[..., Tensor] | None:
    space: dict[str, Any] = {"torch": torch, "F": nn.functional, "W": 16, "V": 12, "s": 8, "p": 4}
    space["__name__"] = "losses"
    exec(compile(text, "<loss>", "exec"), space)
    found: Callable[..., Tensor] | None = space.get("loss")
    return found


def _metrics(made: Training) -> dict[str, Callable[[Any, Any], Tensor]]:
    """Return a metric of the outputs that the loss reads: one value of each sample."""
    return {"values": lambda out, batch: out[made.read[0]].flatten(1).square().mean(1)}


def _optimizers(made: Training, model: nn.Module, hidden: Collection[str]) -> list[torch.optim.Optimizer]:
    """Make plain optimizers: a parameter is in the first group that has a pattern of its name."""
    own, given = dict(made.optimizer_options), dict[str, list[dict[str, Any]]]()
    rest = own.pop("adamw", {})
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        fits = (g for g in made.groups if any(fnmatch.fnmatchcase(name, pattern) for pattern in g["names"]))
        group = next(fits, {})
        by = group.get("optimizer") or ("adamw" if made.optimizer == "muon" and name not in hidden else made.optimizer)
        options = {key: value for key, value in group.items() if key not in ("names", "optimizer")}
        given.setdefault(by, []).append({"params": [p], **options})
    options_of = {"adamw": rest} | {made.optimizer: own}
    return [construct(by, groups, options_of.get(by, {})) for by, groups in given.items()]


def in_parts(made: Training, par: autoptd.Parallel, batches: Sequence[Any], folder: Path, steps: slice) -> Ended:
    """Train some steps on all ranks of a plan, after those of a checkpoint in the folder, if there is one."""
    values, metrics = par.initial_values(), _metrics(made)

    def body(communicators: Communicators) -> Ended:
        mine, ended = copy.copy(par), Ended([], [], {}, {})
        mine.start(communicators, values)
        schedule = torch.optim.lr_scheduler.ExponentialLR(mine.optimizer, made.decay)
        others = {"schedule": schedule}
        assert mine.resume(folder, others=others) == steps.start
        for step, batch in enumerate(batches[steps], steps.start):
            share = share_of(mine.layout.nest.flat(batch), mine.layout.specs, mine.dp_rank, mine.dp_size)
            ended.losses.append(float(mine.train_step(share)))
            ended.losses += [float(mine.losses["size"])] if made.terms else []
            if step == 0:
                ended.gradients = on_host(mine.gradients())
            schedule.step()
            if made.evaluated:
                ended.evaluated.append(float(mine.eval_step(share)))
                if made.read:
                    given = mine.layout.nest.nested(share)
                    ended.evaluated.append(float(mine.evaluate([given], metrics)["values"]))
                    found = mine.predict([given], metrics)["values"]
                    ended.evaluated.append(float((found * torch.arange(len(found))).sum()))
        mine.save(folder, others=others)
        ended.state = on_host(mine.state_dict())
        if made.exported:
            mine.export_weights(out := folder / f"weights-{steps.stop}")
            if mine.rank == 0:
                ended.state |= {f"{name} as exported": x for name, x in load_file(out / ONE).items()}
        return ended

    return _on_forks(par.layout.mesh, body)


def _on_forks(mesh: Mesh, body: Callable[[Communicators], T]) -> T:
    """Run a function on every rank, each a fork of this process; return what rank 0 returns, or raise what one did."""
    context, started = multiprocessing.get_context("fork"), []
    with socket.socket() as held:  # a free port that is not bound may be taken
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        env = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": str(mesh.world)}

        def work(rank: int, pipe: Connection) -> None:
            os.environ.update(env, RANK=str(rank))
            faulthandler.dump_traceback_later(_LONGEST_S - 10, exit=True)
            try:
                with on_loopback():
                    found = body(connect_processes(mesh, torch.device("cpu"), _LONGEST_S))
                pipe.send_bytes(pickle.dumps((True, found)))  # by value: this process ends
            except BaseException as error:  # noqa: BLE001  raised in the parent
                pipe.send_bytes(pickle.dumps((False, error)))

        for rank in range(mesh.world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        try:
            answers: dict[Connection, Any] = dict(_answers([pipe for _, pipe in started]))
        finally:
            for process, _ in started:
                process.terminate()
                process.join()
    first: T = answers[started[0][1]]
    return first


def _answers(pipes: Collection[Connection]) -> Iterator[tuple[Connection, Any]]:
    """Yield what each rank returns; raise the first error of any, since the others may wait for that rank."""
    left = set(pipes)
    while left:
        ready = multiprocessing.connection.wait(left, timeout=_LONGEST_S)
        if not ready:
            raise TimeoutError(f"{len(left)} of {len(pipes)} ranks gave no answer in {_LONGEST_S:.0f} s")
        for pipe in (pipe for pipe in pipes if pipe in ready):
            done, found = pickle.loads(pipe.recv_bytes())
            if not done:
                raise found
            left.remove(pipe)
            yield pipe, found


def outcome(seed: int, folder: Path, family: Family = TOKENS) -> str:
    """Train a network both ways; see `compared`."""
    rng = random.Random(seed)
    made = draw(rng, family)
    batches = [_batch(made, rng, family, step) for step in range(len(made.samples))]
    cluster = Cluster.load("dgx-h100")
    given = bulk(cluster) if rng.random() < 0.8 else cluster
    model = loaded(made.text, folder, seed)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in made.frozen))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    made.groups = [group for group in made.groups if fnmatch.filter(trained, group["names"][0])]
    example = tree_map_only(Tensor, lambda x: x[:2], batches[0])
    inputs = {name: x for name, x in example.items() if name not in made.targets}
    asked: dict[str, Any] = {"inputs": inputs, "batch": SAMPLES, "precision": "fp64", "cluster": given, "seed": seed}
    asked |= {"optimizer": made.optimizer, "optimizer_options": made.optimizer_options, "clip_norm": made.clip}
    asked |= {"parameter_groups": made.groups, "loss": _function(made.loss)}
    asked |= {"targets": {name: example[name] for name in made.targets}} if made.targets else {}

    def planned(fix: Mapping[str, Any]) -> autoptd.Parallel:
        world = math.prod(int(fix.get(axis, 1)) for axis in ("dp", "tp", "pp", "cp"))
        return autoptd.parallelize(model, world=world, fix=fix, **asked)

    def alone(model: nn.Module) -> Ended:
        if made.dropout:  # no one process of plain PyTorch draws alike
            one = {**asked, "fix": {"recompute": "none"}, "world": 1}
            with tempfile.TemporaryDirectory() as empty:
                return in_parts(made, autoptd.parallelize(model, **one), batches, Path(empty), slice(0, len(batches)))
        return in_one_process(made, model, batches, hidden)

    def off() -> dict[str, float]:
        pairs = zip(_parts(made, len(batches)), map(planned, made.fixes), strict=True)
        with tempfile.TemporaryDirectory() as saved:
            parts = [in_parts(made, par, batches, Path(saved), steps) for steps, par in pairs]
        whole = Ended([], [], parts[0].gradients, parts[-1].state)
        for part in parts:
            whole.losses += part.losses
            whole.evaluated += part.evaluated
        return _differences(whole, expected)

    hidden: set[str] = set()
    if made.optimizer == "muon":
        try:
            hidden = {name for name, spec in planned(made.fixes[0]).layout.parameters.items() if spec.hidden}
        except AutoptdError:
            return judged(off, dict)
    try:
        expected = alone(model)
    except (RuntimeError, IndexError) as error:
        return f"no program: {str(error).splitlines()[0][:80]}"
    except AutoptdError as error:
        return f"refused: {error.what.splitlines()[0][:90]}"
    numbers = [*expected.losses, *(float(x.double().sum()) for x in expected.state.values())]
    if not all(abs(x) < 1e12 for x in numbers):  # also true of NaN
        return "no numbers"
    return judged(off, lambda: _differences(alone(perturbed(model)), expected))


def _parts(made: Training, steps: int) -> list[slice]:
    """Return the steps before the checkpoint and after it."""
    return [slice(0, made.saved), slice(made.saved, steps)] if made.saved else [slice(0, steps)]


def _differences(found: Ended, alone: Ended) -> dict[str, float]:
    off = differences(found.gradients, alone.gradients)
    off = {f"the gradient of {name}": error for name, error in off.items()} | differences(found.state, alone.state)
    for what in ("losses", "evaluated"):
        pairs = enumerate(zip(getattr(found, what), getattr(alone, what), strict=True))
        off |= {f"{what} {step}": abs(x - y) / max(abs(y), 1e-12) for step, (x, y) in pairs}
    return off


if __name__ == "__main__":
    sys.exit(command("tests.fuzz.trainings", __doc__.splitlines()[0], draw, outcome))
