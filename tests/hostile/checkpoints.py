"""A checkpoint, its older form, and attacks on them: every digest is recomputed afterwards."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.checkpoint import folder, progress
from autoptd.checkpoint.torch_files import load
from autoptd.checkpoint.torch_index import METADATA

SHARD = "__0_0.distcp"


def batch() -> dict[str, Tensor]:
    return {"input": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}


@cache
def running() -> autoptd.Parallel:
    """Return a world of one after one training step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), Scaled(), nn.Linear(16, 4))
    model.config = Config()  # type: ignore[assignment]  as models of transformers have
    made = autoptd.parallelize(
        model, world=1, batch=4, inputs=batch(), loss=lambda out: out.square().mean(), precision="fp32", cluster="local"
    )
    made.train_step(batch())
    return made


class Scaled(nn.Module):
    """Module with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tiny"}


def state(parallel: autoptd.Parallel) -> dict[str, Any]:
    """Return everything that a load changes, after one that was refused while it read too."""
    optimizer = parallel.optimizer.state_dict()
    kept = {f"{n} {key}": x for n, each in optimizer["state"].items() for key, x in each.items()}
    found: dict[str, Any] = {name: x.clone() for name, x in parallel._running.state_dict().items()}
    found |= {name: x.clone() if isinstance(x, Tensor) else x for name, x in kept.items()}
    dropout = parallel._running.dropout
    return found | {
        "groups": repr(optimizer["param_groups"]),
        "step": parallel.step,
        "seed": (dropout.seed, dropout.step),
    }


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two states are equal bit by bit."""
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) if isinstance(x, Tensor) else x == b[name] for name, x in a.items()
    )


def sealed(where: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Rewrite the manifest: sizes and digests of the present files, then a change, then its own digest."""
    path = where / folder.MANIFEST
    data = json.loads(path.read_text())
    for name in data["files"]:
        if (where / name).is_file() and not (where / name).is_fifo():
            raw = (where / name).read_bytes()
            data["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    if change is not None:
        change(data)
    if data["format"] == folder.FORMAT:
        data["sha256"] = folder._own_digest(data)
    path.write_text(json.dumps(data))


def aged(where: Path) -> None:
    """Turn the checkpoint into the older form, before there was an index."""
    saved = (where / folder.PROGRESS).read_bytes()
    (where / folder.PROGRESS).write_bytes(saved[:-66] + bytes(2))
    (where / folder.INDEX).unlink()

    def older(data: dict[str, Any]) -> None:
        for name in ("sha256", "buffers"):
            del data[name]
        del data["files"][folder.INDEX]
        data["format"] = folder.OLDER

    sealed(where, older)


def with_index(where: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index."""
    path = where / folder.INDEX
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    sealed(where)


def with_progress(where: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the values that are not tensors."""
    raw = (where / folder.PROGRESS).read_bytes()
    data = load(io.BytesIO(raw), len(raw))
    change(data)
    (where / folder.PROGRESS).write_bytes(progress.to_bytes(data))
    sealed(where)


def call(module: str, name: str, *args: Any, how: str = "GLOBAL") -> bytes:
    """Return the instructions of a pickle that calls a function, by one of the ways that pickles offer."""
    given = pickle.dumps(args, 2)[2:-1]
    spelled = f"{module}\n{name}\n".encode()
    match how:
        case "GLOBAL":
            return b"c" + spelled + given + b"R"
        case "STACK_GLOBAL":
            return pickle.dumps(module, 4)[11:-1] + pickle.dumps(name, 4)[11:-1] + b"\x93" + given + b"R"
        case "NEWOBJ":
            return b"c" + spelled + given + b"\x81"
        case "NEWOBJ_EX":
            return b"c" + spelled + given + b"}\x92"
        case "INST":
            return b"(" + b"".join(pickle.dumps(each, 2)[2:-1] for each in args) + b"i" + spelled
        case "OBJ":
            return b"(c" + spelled + b"".join(pickle.dumps(each, 2)[2:-1] for each in args) + b"o"
        case "BUILD":
            return b"c" + spelled + b")R" + given + b"b"
        case "EXT":
            return b"\x82\x01" + given + b"R"
    raise AssertionError(how)


def a_pickle(instructions: bytes) -> bytes:
    return b"\x80\x04" + instructions + b"."


def archive(pickled: bytes, records: Mapping[str, bytes] = {}, how: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file of `torch.save` with this pickle."""
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", how) as made:
        for name, raw in {"data.pkl": pickled, "byteorder": b"little", **records}.items():
            made.writestr(f"archive/{name}", raw)
    return blob.getvalue()


def digested(raw: bytes) -> bytes:
    """Return an archive with the comment that `progress.pt` ends with."""
    return raw[:-2] + (64).to_bytes(2, "little") + hashlib.sha256(raw).hexdigest().encode()


def metadata_of(where: Path) -> Any:
    """Return torch's index, read by torch's own classes, for tests to change."""
    with (where / METADATA).open("rb") as file:
        return pickle.load(file)


def write_metadata(where: Path, raw: bytes) -> None:
    (where / METADATA).write_bytes(raw)
    sealed(where)
