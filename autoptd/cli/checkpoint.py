"""`autoptd checkpoint inspect | check | export FOLDER`: show a checkpoint, verify its files, export its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cli.output import print_json, show, width

if TYPE_CHECKING:
    from rich.console import RenderableType

DONE, NO = 0, 1
TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autoptd checkpoint`."""
    parser.add_argument(
        "what", choices=["inspect", "check", "export"], help="show it; verify its files; write its weights"
    )
    parser.add_argument("folder", metavar="FOLDER", help="one checkpoint, or a folder of several (the latest is used)")
    parser.add_argument("-o", "--out", metavar="FOLDER", help="export: the new folder, for from_pretrained")
    parser.add_argument("--precision", choices=sorted(TYPES), help="export: type of the weights (default: as trained)")


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Run the command; exit code 1 means that `check` found damage. Raises CheckpointError."""
    from autoptd.cli.arguments import UsageError

    if (arguments.out is None) == (arguments.what == "export"):
        what = "export needs a folder to write to" if arguments.out is None else f"{arguments.what} writes nothing"
        raise UsageError(what, fix="give --out FOLDER with export, and only with it")
    return {"inspect": _inspect, "check": _check, "export": _export}[arguments.what](arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    from autoptd.checkpoint import contents, folder
    from autoptd.explain.tables import render

    where = folder.find(Path(arguments.folder))
    manifest = folder.read_manifest(where)
    tensors = {
        key: {"shape": list(saved.shape), "dtype": str(saved.dtype).removeprefix("torch.")}
        for key, saved in sorted(contents.index_of(where, manifest).items())
    }
    whole = [path.name for path in folder.checkpoints(where.parent)]
    beside = {"checkpoints": whole, "unverified": contents.unverified(manifest)}
    data = {**manifest, "folder": str(where), "contents": tensors, **beside}
    if arguments.json:
        print_json(data)
    else:
        show(render(_shown(data), width()))
    return DONE


def _shown(data: dict[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    from autoptd.explain.tables import GIB, columns, section
    from autoptd.text import printable

    total = sum(file["bytes"] for file in data["files"].values())
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    facts = columns("", "")
    facts.show_header = False
    facts.add_row("step", f"{data['step']:,}")
    facts.add_row("optimizer", data["optimizer"])
    facts.add_row("files", f"{len(data['files'])}, {total / GIB:.3g} GiB")
    facts.add_row("written by", versions)
    facts.add_row("in this folder", ", ".join(data["checkpoints"]))
    facts.add_row("verified", data["unverified"] or "manifest and index; `check` verifies the rest")
    table = columns("parameter", "shape", "type", "optimizer state")
    kept: dict[str, list[str]] = {}
    for key in data["contents"]:
        kind, _, rest = key.partition(".")
        if kind != "model":
            name, _, leaf = rest.rpartition(".")
            kept.setdefault(name, []).append(leaf)
    for key, found in data["contents"].items():
        kind, _, name = key.partition(".")
        if kind == "model":
            shape = " × ".join(map(str, found["shape"])) or "1"
            table.add_row(name, shape, found["dtype"], ", ".join(sorted(kept.get(name, ()))) or "none")
    return [
        Text(printable(f"{data['model']} in {data['folder']}", keep="")),
        *section("", facts)[2:],
        *section("tensors", table),
    ]


def _check(arguments: argparse.Namespace) -> int:
    from autoptd.checkpoint import contents, folder

    where = folder.find(Path(arguments.folder))
    found = contents.examine(where)
    if arguments.json:
        other = {"not_finite": found.not_finite, "unverified": found.unverified}
        print_json({"folder": str(where), "files": found.files, "damage": found.damage, **other})
    else:
        for text in (*found.damage, *found.not_finite, *filter(None, [found.unverified])):
            show(text)
        show(f"{where}: {found.files} files, {len(found.damage) or 'none'} damaged")
    return NO if found.damage else DONE


def _export(arguments: argparse.Namespace) -> int:
    import torch

    from autoptd.checkpoint.huggingface import export

    dtype: torch.dtype | None = getattr(torch, TYPES[arguments.precision]) if arguments.precision else None
    found = export(Path(arguments.folder), Path(arguments.out), dtype)
    if arguments.json:
        print_json({**found, "folder": arguments.out})
    else:
        kind = found["dtype"].removeprefix("torch.")
        files = ", ".join(found["files"])
        show(f"{arguments.out}: {found['tensors']} tensors of step {found['step']}, {kind}: {files}")
    return DONE
