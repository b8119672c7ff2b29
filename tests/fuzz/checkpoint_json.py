"""Corrupt the JSON of a checkpoint: its manifest and its index.

    python -m tests.fuzz.checkpoint_json --count 25000 --seed 0

Fields, text and bytes are corrupted. The digests of most files are recomputed afterwards, so that the checks behind
them are reached too. Each must be read and then be consistent, or be refused by one error that names the place, within
a second of processor time and with memory of a few times the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from autoptd.checkpoint import contents, folder
from autoptd.checkpoint.index import SavedTensor
from autoptd.errors import CheckpointError
from tests.fuzz.loading import readable
from tests.fuzz.mutations import spoil_bytes, spoil_data, written
from tests.hostile.checkpoints import running

_LONG_S, _LARGE = 1.0, 200 << 20
_FIT = 0.8  # share of the files whose digests are recomputed
_LARGEST = 40  # bits of a number that is plausible in an index


def nudge_rows(data: Any, rng: random.Random) -> None:
    """Change one number in a row of the index, which is otherwise valid."""
    tensor = data["tensors"][rng.choice(sorted(data["tensors"]))]
    row = rng.choice(tensor["chunks"])
    place = rng.choice([row, row, row[3], row[4], tensor["shape"]])
    at = rng.randrange(len(place)) if place else -1
    if at >= 0 and isinstance(place[at], int):
        small = [0, 1, -1, place[at] + 1, place[at] - 1, place[at] * 2]
        place[at] = rng.choice([*small, 1 << rng.randrange(_LARGEST), 2**63, -(2**31)])
    if rng.random() < 0.2:
        tensor["chunks"].append(json.loads(json.dumps(rng.choice(tensor["chunks"]))))


def spoilt(text: str, is_index: bool, rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        return spoil_bytes(text.encode(), rng)
    data = json.loads(text)
    if is_index and rng.random() < 0.5:
        nudge_rows(data, rng)
    else:
        spoil_data(data, rng)
    return written(data).encode(errors="surrogatepass")


def fitting(raw: bytes) -> bytes:
    """Return a manifest with its own digest recomputed; other data unchanged."""
    try:
        data = json.loads(raw)
        data["sha256"] = folder._own_digest(data)
        return json.dumps(data).encode()
    except (ValueError, TypeError, RecursionError):
        return raw


def listing(manifest: str, index: bytes) -> bytes:
    """Return the manifest with the digest of this index."""
    data = json.loads(manifest)
    data["files"][folder.INDEX] = {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()}
    data["sha256"] = folder._own_digest(data)
    return json.dumps(data).encode()


def holds_all(saved: SavedTensor) -> bool:
    """Return whether the chunks of a tensor cover every element; checked element by element."""
    times = torch.zeros(saved.shape, dtype=torch.int64)
    for chunk in saved.chunks:
        times[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    return bool((times == 1).all())


def read(where: Path) -> str:
    """Read a manifest and the index as every command does, and return the outcome."""
    start = time.process_time()
    try:
        manifest = folder.read_manifest(where)
        index = contents.index_of(where, manifest)
        claimed = sum(math.prod(saved.shape) * saved.dtype.itemsize for saved in index.values())
        most = sum(file["bytes"] for file in manifest["files"].values())
        end = "read" if claimed <= most else "more than there is"
        end = end if all(map(holds_all, index.values())) else "an element twice, or never"
    except CheckpointError as error:
        end = "refused" if error.where and readable(str(error)) else f"said badly: {error}"
    except Exception:  # noqa: BLE001  any other error is what is looked for
        end = "a traceback\n" + "\n".join(traceback.format_exc().splitlines()[-12:])
    took_s = time.process_time() - start
    return f"slow: {took_s:.1f} s" if took_s > _LONG_S else end


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Return counts by outcome, and descriptions of the wrong ones."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        running().save(name)
        where = folder.find(Path(name))
        manifest, index = ((where / file).read_text() for file in (folder.MANIFEST, folder.INDEX))
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        for number in range(count) if only is None else [only]:
            rng = random.Random(f"json {seed} {number}")
            of_index, fit = number % 2 == 1, rng.random() < _FIT
            raw = spoilt(index if of_index else manifest, of_index, rng)
            if of_index:
                (where / folder.INDEX).write_bytes(raw)
                (where / folder.MANIFEST).write_bytes(listing(manifest, raw) if fit else manifest.encode())
            else:
                (where / folder.INDEX).write_text(index)
                (where / folder.MANIFEST).write_bytes(fitting(raw) if fit else raw)
            end = read(where)
            if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - most) > _LARGE:
                end, most = f"large: {grown >> 20} MiB", most + grown
            ends[f"{'index' if of_index else 'manifest'} {end.split(':')[0].splitlines()[0]}"] += 1
            if end not in ("read", "refused"):
                wrong.append(f"--only {number}: {end}")
    return ends, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the file of this number alone")
    arguments = parser.parse_args()
    ends, wrong = run(arguments.count, arguments.seed, arguments.only)
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    print("\n".join(wrong[:20]))
    print(f"{sum(ends.values())} files, {len(wrong)} ended wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
