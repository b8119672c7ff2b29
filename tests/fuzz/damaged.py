"""Damage a checkpoint at random; checking and loading must both find it, or it must prove harmless.

    python -m tests.fuzz.damaged --count 1000 --seed 0

Two processes write the checkpoint. One thing is done to it each time: bits flipped, bytes overwritten, cut off, added
or moved, a file removed, emptied, renamed, replaced by another one, by that of another step or by no file at all, two
files swapped, a field of a JSON file changed, a file added. Digests are left as they are: this is chance, not an
attacker. Harmless means that it is loaded with the same bits of parameters, buffers and moments, and the same options,
step and seed. A refused load must leave the running model as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.checkpoint import contents, dcp, folder
from autoptd.errors import CheckpointError
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import Made, session_of, trainer_of
from tests.fuzz.bases import SEQ, nanogpt
from tests.fuzz.checkpoints import running
from tests.fuzz.mutations import spoil_data, spoil_path, written
from tests.hostile.checkpoints import same, state

STEPS = (3, 4)  # the checkpoint is that of the last; files of the first take their places


# --- writing ------------------------------------------------------------------------------------------------------


def write(c: Communicators, job: Made, root: str) -> None:
    """A worker's part: train and save."""
    trainer = trainer_of(c, job)
    session = session_of(trainer, job.plan)
    ids = torch.arange(2 * SEQ).view(2, SEQ).tensor_split(2)[c.dp.rank] % 64
    for step in range(1, STEPS[-1] + 1):
        trainer.train_step({"idx": ids, "targets": ids})
        if step in STEPS:
            session.save(Path(root), step, {}, None)
    session.wait()


def by_two_processes(root: Path) -> None:
    torch.manual_seed(0)
    fix = {"dp": 2, "tp": 1, "pp": 1, "micro": 1, "zero": 1}
    made = autoptd.parallelize(
        nanogpt(), world=2, cluster="dgx-h100", batch=2, seq=SEQ, precision="fp32", fix=fix, optimizer="adamw"
    )
    job = Made(made.plan, made.layout, made.program, made.initial_values())
    with ProcessPool(2) as pool:
        pool.run(Mesh(2, 1, 1), write, job, str(root))


def by_one_process(root: Path) -> None:
    """To several files all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.dcp, "FileSystemWriter", partial(dcp.dcp.FileSystemWriter, thread_count=2))
        running().save(root)
        ids = torch.ones(2, SEQ, dtype=torch.int64)
        running().train_step({"idx": ids, "targets": ids})
        running().save(root)


# --- damaging -----------------------------------------------------------------------------------------------------


def _rewrite(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(path: Path, rng: random.Random, other: Path) -> None:
    def change(data: bytearray) -> None:
        for _ in range(rng.choice([1, 1, 1, 2, 9])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    _rewrite(path, change)


def overwrite(path: Path, rng: random.Random, other: Path) -> None:
    def change(data: bytearray) -> None:
        at = rng.randrange(len(data))
        run = data[at : at + rng.randrange(1, 300)]
        data[at : at + len(run)] = rng.choice([bytes(len(run)), rng.randbytes(len(run)), run[::-1]])

    _rewrite(path, change)


def cut(path: Path, rng: random.Random, other: Path) -> None:
    os.truncate(path, rng.choice([0, rng.randrange(path.stat().st_size), path.stat().st_size - 1]))


def add(path: Path, rng: random.Random, other: Path) -> None:
    def change(data: bytearray) -> None:
        at = rng.choice([0, len(data), rng.randrange(len(data))])
        data[at:at] = rng.choice([b"\0", b" ", b"\n", rng.randbytes(50), bytes(data[:100])])

    _rewrite(path, change)


def leave_out(path: Path, rng: random.Random, other: Path) -> None:
    def change(data: bytearray) -> None:
        at = rng.randrange(len(data))
        del data[at : at + rng.randrange(1, 200)]

    _rewrite(path, change)


def move(path: Path, rng: random.Random, other: Path) -> None:
    """Two runs of equal length change places."""

    def change(data: bytearray) -> None:
        n = rng.randrange(1, max(2, min(500, len(data) // 2)))
        a, b = rng.randrange(len(data) // 2 - n + 1), len(data) // 2 + rng.randrange(len(data) // 2 - n + 1)
        data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]

    _rewrite(path, change)


def remove(path: Path, rng: random.Random, other: Path) -> None:
    path.unlink()


def rename(path: Path, rng: random.Random, other: Path) -> None:
    path.rename(path.with_name(rng.choice([path.name + "~", path.name.upper() + "_", "." + path.name])))


def no_file(path: Path, rng: random.Random, other: Path) -> None:
    spoil_path(path, rng)


def a_fifo(path: Path, rng: random.Random, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_another_step(path: Path, rng: random.Random, other: Path) -> None:
    shutil.copy(other / path.name, path)


def copied_over(path: Path, rng: random.Random, other: Path) -> None:
    shutil.copy(rng.choice([each for each in sorted(path.parent.iterdir()) if each != path]), path)


def swapped(path: Path, rng: random.Random, other: Path) -> None:
    """Two files change names; of shards, those of two ranks."""
    shards = sorted(path.parent.glob("__*"))
    one, two = rng.sample(shards if rng.random() < 0.6 else sorted(path.parent.iterdir()), 2)
    between = path.with_name("between")
    one.rename(between)
    two.rename(one)
    between.rename(two)


def added(path: Path, rng: random.Random, other: Path) -> None:
    path.with_name(rng.choice(["__9_0.distcp", "notes.txt", ".metadata.tmp", ".nfs0001"])).write_bytes(b"x" * 50)


def edited(path: Path, rng: random.Random, other: Path) -> None:
    """A JSON file: another value of a field, or another spelling of the same."""
    path = path.with_name(rng.choice([folder.MANIFEST, folder.MANIFEST, folder.INDEX, folder.PLAN]))
    data = json.loads(path.read_text())
    if rng.random() < 0.15:
        text = json.dumps(data, indent=rng.choice([None, 3]), sort_keys=rng.random() < 0.5)
    else:
        spoil_data(data, rng)
        text = written(data)
    path.write_text(text, errors="surrogatepass")


def other_step(path: Path, rng: random.Random, other: Path) -> None:
    """The folder has another number."""
    step = path.parent
    step.rename(step.with_name("step-00000099"))
    (step.parent / folder.LATEST).write_text("step-00000099")


def pointer(path: Path, rng: random.Random, other: Path) -> None:
    harm = rng.choice([flip, cut, add, remove, no_file, a_fifo])
    harm(path.parent.parent / folder.LATEST, rng, other)


KINDS = [flip, flip, flip, overwrite, cut, add, leave_out, move, remove, rename, no_file, a_fifo, of_another_step]
KINDS += [copied_over, swapped, swapped, added, edited, edited, edited, other_step, pointer]


def damaged(good: Path, at: Path, seed: int, number: int) -> str:
    """A copy of the last checkpoint with one thing done to it, which is returned."""
    rng = random.Random(f"damage {seed} {number}")
    shutil.rmtree(at, ignore_errors=True)
    first, last = folder.checkpoints(good)
    shutil.copytree(last, at / last.name)
    (at / folder.LATEST).write_text(last.name)
    harm = KINDS[number % len(KINDS)]
    path = rng.choice(sorted((at / last.name).iterdir()))
    harm(path, rng, first)
    return f"{harm.__name__}"


# --- judging ------------------------------------------------------------------------------------------------------


def found(do: Callable[[], Any]) -> bool:
    try:
        do()
    except CheckpointError as error:
        assert error.where, error
        return True
    return False


def check(root: Path) -> None:
    where = folder.find(root)
    if damage := contents.examine(where).damage:
        raise CheckpointError(damage[0], where=str(where))


def judge(root: Path, expected: dict[str, Any]) -> str:
    """`found`, `harmless`, or what is wrong."""
    parallel = running()
    zeros = {name: torch.zeros_like(x) for name, x in parallel.state_dict().items()}
    parallel._running.load_parameters(zeros)
    for kept in parallel.optimizer.state.values():
        for x in kept.values():
            x.zero_()
    before = state(parallel)
    try:
        by_check, by_load = found(partial(check, root)), found(partial(parallel.load, root))
    except Exception:  # noqa: BLE001  any other error is what is looked for
        return "a traceback\n" + "\n".join(traceback.format_exc().splitlines()[-12:])
    now = state(parallel)
    if by_load and not same(now, before):
        return "refused, and yet the model is another"
    if by_check and by_load:
        return "found"
    if by_check != by_load:
        return "found by check alone" if by_check else "found by load alone"
    return "harmless" if same(now, expected) else "NOT FOUND"


def run(count: int, seed: int, make: Callable[[Path], None], only: int | None = None) -> tuple[Counter[str], list[str]]:
    """How many ended how, and what went wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        good, at = Path(name) / "good", Path(name) / "damaged"
        make(good)
        running().load(good)
        expected = state(running())
        for number in range(count) if only is None else [only]:
            kind = damaged(good, at, seed, number)
            end = judge(at, expected)
            ends[f"{kind} {end.splitlines()[0]}"] += 1
            if end not in ("found", "harmless"):
                wrong.append(f"--only {number}: {kind}: {end}")
    return ends, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the damage of this number alone")
    arguments = parser.parse_args()
    ends, wrong = run(arguments.count, arguments.seed, by_two_processes, arguments.only)
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    print("\n".join(wrong))
    good = {end: sum(n for name, n in ends.items() if name.endswith(f" {end}")) for end in ("found", "harmless")}
    print(f"{sum(ends.values())} damages: {good['found']} found, {good['harmless']} harmless, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
