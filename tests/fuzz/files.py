"""Corrupt files by number (reproducible from the seed), and check that reading each treats it as data.

    python -m tests.fuzz.files --count 75000 --seed 0

    a plan           read, then explained, compared, simulated or exported
    a cluster file   read, described, a group's path looked up
    a config.json    read, the model made on meta
    an index         read, with the files that it names

Each must be read or refused by one printable error of autoptd, within ten seconds and two gigabytes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.paths import crossings
from autoptd.errors import AutoptdError
from autoptd.plans.model import Plan
from tests.fuzz.bases import BASES, planned
from tests.fuzz.mutations import spoil_bytes, spoil_data, spoil_lines, spoil_path, spoil_tokens, written

CLUSTERS = Cluster.names()
_BYTES, _PATHS = 0.08, 0.01  # shares of the files whose bytes are corrupted, and of paths that are not files
_LONGEST_S, _MOST_BYTES, _LONGEST = 10.0, 2 * 10**9, 10_000

_SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_LONGER = {"intermediate_size": 32, "max_position_embeddings": 16}
_GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_EXPERTS = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_theta": 10000.0, "rope_scaling": None, "num_key_value_heads": 1, "hidden_act": "silu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **_GPT2, "activation_function": "gelu_new"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SMALL, **_LONGER, **_ROPE},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_SMALL, **_LONGER, **_EXPERTS},
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", **_SMALL, **_LONGER, "hidden_act": "gelu"},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", **_T5, "dtype": "bfloat16"},
}
_PARTS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = {"metadata": {"total_size": 32}, "weight_map": {"a.weight": _PARTS[0], "b.weight": _PARTS[1]}}


def spoilt(folder: Path, seed: int, number: int) -> tuple[str, Path]:
    """Return (name of the base, path); two of three are plans, which take turns."""
    rng = random.Random(f"{seed} {number}")
    kind = CLUSTERS[number // 3 % len(CLUSTERS)] if number % 3 == 2 else list(BASES)[number * 2 // 3 % len(BASES)]
    path = folder / ("cluster.toml" if kind in CLUSTERS else "plan.json")
    _remove(path)
    text = _text(kind)
    how = rng.random()
    if how < _BYTES:
        path.write_bytes(spoil_bytes(text.encode(), rng))
    else:
        _write(path, _by_structure(kind, text, rng))
    if how > 1 - _PATHS:
        spoil_path(path, rng)
    return kind, path


def spoilt_any(folder: Path, seed: int, number: int) -> tuple[str, Path]:
    """Return (plan, cluster, config or index; path), corrupted by structure, by tokens or by bytes."""
    rng = random.Random(f"any {seed} {number}")
    sort = ("plan", "cluster", "config", "index")[number % 4]
    bases = {"plan": list(BASES)[:1], "cluster": list(CLUSTERS), "config": list(CONFIGS), "index": [""]}[sort]
    kind = rng.choice(bases)
    names = {"plan": "plan.json", "cluster": "cluster.toml", "config": "config.json"}
    path = folder / names.get(sort, "model.safetensors.index.json")
    _remove(path)
    text = _text(kind)
    how = rng.choice(["structure", "tokens", "bytes"])
    if how == "bytes":
        path.write_bytes(spoil_bytes(text.encode(), rng))
    else:
        _write(path, spoil_tokens(text, rng) if how == "tokens" else _by_structure(kind, text, rng))
    if rng.random() < _PATHS:
        spoil_path(path, rng)
    return sort, path


def _by_structure(kind: str, text: str, rng: random.Random) -> str:
    if kind in CLUSTERS:
        return spoil_lines(text, rng)
    data = json.loads(text)
    spoil_data(data, rng)
    return written(data)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8", errors="surrogatepass")


def _text(kind: str) -> str:
    if kind in CLUSTERS:
        return cluster_text(kind)
    return planned(kind).to_json() if kind in BASES else json.dumps(CONFIGS.get(kind, INDEX), indent=1)


@cache
def cluster_text(name: str) -> str:
    return (files("autoptd.cost_models.clusters") / f"{name}.toml").read_text("utf-8")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- many of them -------------------------------------------------------------------------------------------------


def read(sort: str, path: Path, number: int) -> None:
    """Read the file and use its contents as far as that needs no training."""
    if sort == "plan":
        _read_plan(path, number)
    elif sort == "cluster":
        cluster = Cluster.load(path)
        cluster.describe()
        crossings(cluster, 4, 2, 16)
    elif sort == "config":
        from autoptd.models.load import load_model

        load_model(str(path.parent))
    else:
        _read_index(path)


def _read_plan(path: Path, number: int) -> None:
    from autoptd.explain.timeline import report, simulate_plan, summary
    from autoptd.export.mapping import mapping
    from autoptd.export.megatron import megatron

    plan, how = Plan.load(path), number // 4 % 4
    if how == 0:
        plan.explain(all=True)
    elif how == 1:
        plan.compare(planned("dense"))
    elif how == 2:
        schedule, timeline = simulate_plan(plan)
        report(plan, schedule, timeline, plan.schedule.kind, 100)
        summary(plan, schedule, timeline)
    else:
        mapping(plan)
        megatron(plan).to_text()


def _read_index(path: Path) -> None:
    import torch

    from autoptd.checkpoint.huggingface import Weights

    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("a", "b")})
    weights = Weights(path.parent, model)
    weights.check(["a.weight", "b.weight"])
    for name in weights:
        weights[name].read(())


def judged(sort: str, path: Path, number: int) -> tuple[str, str]:
    """Return (`read`, `refused` or what is wrong; the error's text)."""
    start = time.process_time()
    try:
        read(sort, path, number)
        end, text = "read", ""
    except AutoptdError as error:
        end, text = "refused", str(error)
        if len(text) > _LONGEST or not all(c.isprintable() or c == "\n" for c in text):
            end = "unreadable"
    except Exception:  # noqa: BLE001  any other error is what is looked for
        end, text = "a traceback", "\n".join(traceback.format_exc().splitlines()[-14:])
    if (took_s := time.process_time() - start) > _LONGEST_S:
        return "slow", f"{took_s:.0f} s: {text}"
    return end, text


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Return counts by outcome, and descriptions of the wrong ones."""
    import torch
    from safetensors.torch import save_file
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        for part, tensor in zip(_PARTS, ("a.weight", "b.weight"), strict=True):
            save_file({tensor: torch.ones(2, 2)}, folder / part)
        for number in range(count) if only is None else [only]:
            sort, path = spoilt_any(folder, seed, number)
            end, text = judged(sort, path, number)
            ends[f"{sort} {end}"] += 1
            if end not in ("read", "refused"):
                wrong.append(f"--only {number}: {end}: {sort}: {text}")
            if number % 5000 == 4999:
                print(f"{number + 1} files, {len(wrong)} ended wrongly", file=sys.stderr)
    return ends, wrong


def main() -> int:
    """Print counts by outcome, and every wrong outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the file of this number alone")
    arguments = parser.parse_args()
    start = time.monotonic()
    planned("dense")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MOST_BYTES,) * 2)  # a file that takes more ends in a traceback
    ends, wrong = run(arguments.count, arguments.seed, arguments.only)
    for text in wrong:
        print(f"{text}\n", file=sys.stderr)
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    took_s = time.monotonic() - start
    print(f"{sum(ends.values())} files in {took_s:.0f} s, {peak:.2f} GB at most, {len(wrong)} ended wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
