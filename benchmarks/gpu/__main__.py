"""Everything that one GPU can show.

    python -m benchmarks.gpu [-o FOLDER] [--only parity,profile,…] [--device cpu]
    python -m benchmarks.gpu --page docs/gpu.md [-o FOLDER]

`parity`: all kinds of plans against one process, all ranks on this GPU. `profile`: `autoptd profile`. `steps`:
predicted and measured time and memory of training steps, with the cluster of `profile` where it has run. `tokens`:
tokens per second against the plain model, both compiled. Each case runs in a process of its own, so that no failure and
no memory reaches the next; rows are written to FOLDER/rows.jsonl as they are found. `--device cpu` tries everything out
with tiny models. `--page` writes a page from the rows, without measuring.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.page import page
from benchmarks.gpu.rows import Row, table

SECTIONS = ("parity", "profile", "steps", "tokens")
CHOSEN = {"cuda": ("gpt2-124m", "llama-1b", "mixture-0.7b"), "cpu": ("gpt2-tiny", "llama-tiny", "mixture-tiny")}
LIMIT_S, PROFILE_S = 240, 60


def jobs(section: str, device: str, models: Sequence[str]) -> list[str]:
    """Return the names of a section's cases, each of which is a process."""
    match section:
        case "parity":
            return ["decoder", "mixture", "small"]
        case "profile":
            return ["device"]
        case "steps":
            return [f"{name},{mode}" for name in models for mode in ("eager", "compiled")]
    return [name for name in models if not name.startswith("mixture")]


def run(section: str, job: str, device: str, folder: Path) -> Iterator[Row]:
    """Measure one case in this process."""
    cases = {case.name: case for case in CASES[device]}
    if section == "parity":
        from benchmarks.gpu import parity

        yield from parity.run(job, device)
    elif section == "profile":
        from autoptd.cli.profile import profile

        cluster, seconds = folder / "cluster.toml", PROFILE_S if device == "cuda" else 10
        found = profile(cluster, points=folder / "points.json", limit_s=seconds, processes=1, show=False)
        assert found is not None
        for row in found[2]:
            figures = {"points": str(row.points), "best measured": row.measured, "predicted": row.predicted}
            yield Row("profile", row.name, {**figures, "median error": f"{row.median_error:.0%}"})
    elif section == "steps":
        from benchmarks.gpu.steps import measure

        name, mode = job.split(",")
        cluster = folder / "cluster.toml"
        yield measure(cases[name], mode, str(cluster) if cluster.exists() else known_cluster(device), device)
    else:
        from benchmarks.gpu.tokens import by_turns

        yield by_turns(cases[job], device)


def known_cluster(device: str) -> str:
    """Return the name of the shipped cluster with this GPU, `dgx-h100` for any other."""
    if device == "cpu":
        return "local"
    import torch

    from autoptd.profile.fit import shipped_with

    known = shipped_with(torch.cuda.get_device_name())
    return known.name if known else "dgx-h100"


def in_process(section: str, job: str, device: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of one case, measured in a process of its own."""
    words = ["-m", "benchmarks.gpu", "--one", section, job, "--device", device, "-o", str(folder)]
    problem, out = "", ""
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        out = done.stdout
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line and not line.startswith((" ", "["))]
            problem = errors[-1] if errors else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"not ended after {LIMIT_S} s"
    for line in out.splitlines():
        if line.startswith("{"):
            yield Row(**json.loads(line))
    if problem:
        yield Row(section, job, passed=False, problem=problem)


def head(device: str) -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "device": name, "torch": torch.__version__}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--out", metavar="FOLDER", default="benchmarks/data/gpu", help="results (%(default)s)")
    parser.add_argument("--only", metavar="NAMES", default=",".join(SECTIONS), help="sections (%(default)s)")
    parser.add_argument("--models", metavar="NAMES", help="models of steps and tokens")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--page", metavar="FILE", help="write a page about the results; measures nothing")
    parser.add_argument("--one", nargs=2, metavar=("SECTION", "CASE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    folder = Path(chosen.out)
    rows_file = folder / "rows.jsonl"
    if chosen.page:
        from autoptd.outputs import write_whole

        about, *rows = map(json.loads, rows_file.read_text("utf-8").splitlines())
        write_whole(Path(chosen.page), page(about, [Row(**row) for row in rows]))
        return 0
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device found: nothing was measured (--device cpu tries the command out)", file=sys.stderr)
        return 1
    if chosen.one:
        for row in run(*chosen.one, chosen.device, folder):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    sections = chosen.only.split(",")
    models = chosen.models.split(",") if chosen.models else list(CHOSEN[chosen.device])
    known = [case.name for case in CASES[chosen.device]]
    if unknown := [name for name in sections if name not in SECTIONS] + [name for name in models if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; sections: {', '.join(SECTIONS)}; models: {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    about = head(chosen.device)
    print(", ".join(about.values()), flush=True)
    failed = 0
    with rows_file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(about) + "\n")
        for section in sections:
            found = []
            for job in jobs(section, chosen.device, models):
                for row in in_process(section, job, chosen.device, folder):
                    found.append(row)
                    out.write(json.dumps(asdict(row)) + "\n")
                    out.flush()
            failed += sum(row.passed is False for row in found)
            print(f"\n{section}\n\n{table(found)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
