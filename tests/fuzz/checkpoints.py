"""A small checkpoint, corrupted file by file; each is inspected, checked, exported and loaded as a user does."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import traceback
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import torch

import autoptd
import autoptd.cli.main as cli
from autoptd.checkpoint import folder
from autoptd.errors import CheckpointError
from tests.fuzz.bases import SEQ, nanogpt
from tests.fuzz.loading import Outcome, readable
from tests.fuzz.mutations import spoil_bytes, spoil_data, spoil_path, written


@cache
def running() -> autoptd.Parallel:
    """Return a world of one in this process after one training step."""
    torch.manual_seed(0)
    made = autoptd.parallelize(nanogpt(), world=1, cluster="dgx-h100", batch=2, seq=SEQ, precision="fp32")
    ids = torch.zeros(2, SEQ, dtype=torch.int64)
    made.train_step({"idx": ids, "targets": ids})
    return made


def pristine(root: Path) -> Path:
    """Return a folder with one checkpoint; written once."""
    if not root.exists():
        running().save(root)
    return root


def spoilt_checkpoint(good: Path, at: Path, seed: int, number: int) -> str:
    """Copy the checkpoint and corrupt one file, every other time with a matching digest; return its name."""
    rng = random.Random(f"checkpoint {seed} {number}")
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(good, at)
    step = folder.find(at)
    names = [folder.MANIFEST, *sorted(path.name for path in step.iterdir()), folder.LATEST]
    path = step / names[number % len(names)] if names[number % len(names)] != folder.LATEST else at / folder.LATEST
    how = rng.random()
    if how < 0.05:
        spoil_path(path, rng)
    elif path.name == folder.MANIFEST and how < 0.85:
        data = json.loads(path.read_text())
        spoil_data(data, rng)
        path.write_text(written(data), errors="surrogatepass")
    else:
        path.write_bytes(_spoilt_bytes(path.read_bytes(), rng))
        if path.parent == step and path.name != folder.MANIFEST and rng.random() < 0.7:
            _signed(step, path)
    return path.name


def _spoilt_bytes(raw: bytes, rng: random.Random) -> bytes:
    try:
        return spoil_bytes(raw, rng)
    except UnicodeDecodeError:  # binary files have no other text encoding
        return raw[::-1]


def _signed(step: Path, path: Path) -> None:
    manifest = json.loads((step / folder.MANIFEST).read_text())
    raw = path.read_bytes()
    manifest["files"][path.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (step / folder.MANIFEST).write_text(json.dumps(manifest))


def load_checkpoint(root: Path) -> Outcome:
    """Inspect, check and export the checkpoint, then resume from it."""
    for words in (["inspect"], ["check"], ["export", "--out", str(root.parent / "exported")]):
        out, err = io.StringIO(), io.StringIO()
        shutil.rmtree(root.parent / "exported", ignore_errors=True)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = cli.main(["checkpoint", words[0], str(root), *words[1:]])
        except Exception:  # noqa: BLE001  any other error is what is looked for
            return Outcome("a traceback", f"{words}\n" + "\n".join(traceback.format_exc().splitlines()[-12:]))
        if code == 2 and not ("where" in err.getvalue() and readable(err.getvalue())):
            return Outcome("no place", f"{words}: {err.getvalue()[:500]!r}")
    try:
        running().load(root)
    except CheckpointError as error:
        good = error.where and readable(str(error))
        return Outcome("refused" if good else "no place", str(error))
    except Exception:  # noqa: BLE001  any other error is what is looked for
        return Outcome("a traceback", "\n".join(traceback.format_exc().splitlines()[-12:]))
    values = running().state_dict().values()
    finite = all(x.shape is not None for x in values)
    return Outcome("loaded" if finite and running().step >= 0 else "nonsense")
