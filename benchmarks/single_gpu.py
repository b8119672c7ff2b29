"""Predicted and measured training steps on one GPU: time, and peak memory, eager and compiled.

    python -m benchmarks.single_gpu --cluster cluster.toml [-o results.json] [--only gpt2-124m,…] [--device cpu]

Each case is planned and run by `autoptd.parallelize(model, world=1)` in its own process, in bf16 with fp32 main
parameters and AdamW, on random tokens or pixels. Step time is the median of several steps after a warm-up. Memory is
the peak that torch's allocator reserved plus the memory of driver and kernels, as nvidia-smi shows it. `--device cpu`
runs tiny shapes to try the command out: gloo, fp32, and no memory figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODES = ("eager", "compiled")
WARM_UP, STEPS = 3, 10
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A Hugging Face model class, fields of its configuration, and the batch of a step (one microbatch)."""

    name: str
    model: str
    config: Mapping[str, Any]
    batch: int
    seq: int | None


def _gpt2(name: str, width: int, layers: int, heads: int, batch: int, seq: int = 1024, **more: Any) -> Case:
    """Return a GPT-2 (shapes: Radford et al. 2019, table 2) without dropout, as it is trained today."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": seq, **none, **more}
    return Case(name, "GPT2LMHeadModel", config, batch, seq)


def _llama(name: str, width: int, layers: int, heads: int, kv_heads: int, inner: int, batch: int, **more: Any) -> Case:
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **more,
    }
    return Case(name, "LlamaForCausalLM", config, batch, min(4096, config["max_position_embeddings"]))


def _encoder(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**sizes, "intermediate_size": 4 * width, **none}


CASES = {
    "cuda": (
        _gpt2("gpt2-124m", 768, 12, 12, 16),
        _gpt2("gpt2-350m", 1024, 24, 16, 16),
        _gpt2("gpt2-774m", 1280, 36, 20, 8),
        _gpt2("gpt2-1.5b", 1600, 48, 25, 8),
        # Llama 3.2 1B and 3B, shapes of Meta's released configurations (quoted from memory)
        _llama("llama-1b", 2048, 16, 32, 8, 8192, 2),
        _llama("llama-3b", 3072, 28, 24, 8, 8192, 1),
        # Devlin et al. 2019, section 3; Dosovitskiy et al. 2021, table 1
        Case("bert-large", "BertForMaskedLM", _encoder(1024, 24, 16), 32, 512),
        Case("vit-large", "ViTForImageClassification", {**_encoder(1024, 24, 16), "num_labels": 1000}, 64, None),
    ),
    "cpu": (
        _gpt2("gpt2-tiny", 64, 2, 4, 2, seq=32, vocab_size=512),
        _llama("llama-tiny", 64, 2, 4, 2, 128, 2, vocab_size=512, max_position_embeddings=32),
        Case("bert-tiny", "BertForMaskedLM", {**_encoder(64, 2, 4), "vocab_size": 512}, 2, 32),
        Case(
            "vit-tiny", "ViTForImageClassification", {**_encoder(64, 2, 4), "image_size": 32, "num_labels": 10}, 2, None
        ),
    ),
}


@dataclass(frozen=True)
class Result:
    """Predicted and measured step time and peak memory; None where not measured; `problem`: why a case failed."""

    name: str
    mode: str
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    allocated_bytes: int | None = None
    spread: float | None = None  # (slowest − fastest step) / median
    loss: float | None = None
    problem: str = ""

    @property
    def time_error(self) -> float | None:
        return _error(self.predicted_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_bytes, self.measured_bytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


# --- one case, in this process ------------------------------------------------------------------------------------


def measure(case: Case, mode: str, cluster: str, device: str, steps: int = STEPS) -> Result:
    """Plan and run one case. Raises whatever planning or training raises, ArithmeticError for a loss not finite."""
    import torch

    import autoptd

    model = make_model(case)
    constraints: dict[str, Any] = {"world": 1, "cluster": cluster, "batch": case.batch, "seq": case.seq}
    constraints["precision"] = "bf16" if device == "cuda" else "fp32"
    fix = {"micro": case.batch, "recompute": "none", "kernels": mode}
    parallel = autoptd.parallelize(model, **constraints, fix=fix)
    predicted = parallel.plan.predicted
    batch = random_batch(model, case, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, taken = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        losses.append(float(parallel.train_step(batch)))  # waits for the device
        _wait(device)
        taken.append(time.perf_counter() - start)
    if not math.isfinite(losses[-1]):
        raise ArithmeticError(f"the loss is {losses[-1]} after {len(losses)} steps")
    taken = taken[WARM_UP:]
    seconds = statistics.median(taken)
    reserved, allocated = _peak_bytes(device)
    return Result(
        case.name,
        mode,
        predicted_s=predicted.step_time_s,
        measured_s=seconds,
        predicted_bytes=predicted.memory_bytes,
        measured_bytes=reserved,
        allocated_bytes=allocated,
        spread=(max(taken) - min(taken)) / seconds,
        loss=losses[-1],
    )


def make_model(case: Case) -> Any:
    """Return the model on meta, in training mode."""
    import torch
    import transformers

    model_class = getattr(transformers, case.model)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**case.config)).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the default of transformers, which warns about it
    return model


def random_batch(model: Any, case: Case, device: str) -> dict[str, Any]:
    """Return random tokens, labels or pixels in the shapes of the model's example inputs; nothing is masked."""
    import torch

    from autoptd.models.inputs import example_inputs

    torch.manual_seed(0)
    config = model.config
    batch = {}
    for name, like in example_inputs(model, case.batch, case.seq).items():
        if like.is_floating_point():
            batch[name] = torch.randn(like.shape, dtype=like.dtype, device=device)
        elif "mask" in name:
            batch[name] = torch.ones(like.shape, dtype=like.dtype, device=device)
        else:
            values = getattr(config, "vocab_size", None) or config.num_labels
            batch[name] = torch.randint(values, like.shape, dtype=like.dtype, device=device)
    return batch


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _peak_bytes(device: str) -> tuple[int | None, int | None]:
    """Return peak bytes (reserved plus those outside torch's allocator, allocated); None on a CPU."""
    import torch

    if device != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + outside, torch.cuda.max_memory_allocated()


# --- all cases ----------------------------------------------------------------------------------------------------


def run_all(cases: Sequence[Case], modes: Sequence[str], cluster: str, device: str, steps: int) -> Iterator[Result]:
    """Run each case and mode in its own process, so that neither memory nor a failure affects the next."""
    for case in cases:
        for mode in modes:
            words = ["--one", case.name, mode, "--cluster", cluster, "--device", device, "--steps", str(steps)]
            command = [sys.executable, "-m", "benchmarks.single_gpu", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                yield Result(**json.loads(done.stdout.splitlines()[-1]))
            else:
                errors = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
                yield Result(case.name, mode, problem=errors[-1] if errors else f"exit code {done.returncode}")


def line(result: Result) -> str:
    """Return `gpt2-124m  eager  52.1 ms  50.3 ms  +3.6%  …`: predicted, measured, error."""
    head = f"{result.name:12} {result.mode:9}"
    if result.problem:
        return f"{head} {result.problem}"
    assert result.predicted_s is not None
    assert result.measured_s is not None
    assert result.time_error is not None
    words = f"{result.predicted_s * 1e3:9.1f} ms {result.measured_s * 1e3:9.1f} ms {result.time_error:+7.1%}"
    if result.memory_error is not None and result.predicted_bytes and result.measured_bytes:
        sizes = f"{result.predicted_bytes / GIB:9.2f} GiB {result.measured_bytes / GIB:7.2f} GiB"
        words += f" {sizes} {result.memory_error:+7.1%}"
    return f"{head} {words}"


def summary(results: Sequence[Result]) -> str:
    """Return the median absolute errors per mode, and how many cases failed."""
    lines = []
    for mode in MODES:
        done = [result for result in results if result.mode == mode and not result.problem]
        for what in ("time", "memory"):
            errors = [abs(e) for e in (getattr(result, f"{what}_error") for result in done) if e is not None]
            if errors:
                lines.append(f"{mode}: {what} off by {statistics.median(errors):.1%} (median of {len(errors)})")
    failed = sum(bool(result.problem) for result in results)
    return "\n".join([*lines, *([f"{failed} of {len(results)} did not run"] if failed else [])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", required=True, metavar="FILE", help="a file of `autoptd profile`, or a name")
    parser.add_argument("-o", "--out", metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default %(default)s")
    parser.add_argument("--only", metavar="NAMES", help="cases, separated by commas (all)")
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each case (default %(default)s)")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device found; --device cpu tries the command out on tiny shapes", file=sys.stderr)
        return 1
    cases = {case.name: case for case in CASES[arguments.device]}
    if arguments.one:
        name, mode = arguments.one
        print(json.dumps(asdict(measure(cases[name], mode, arguments.cluster, arguments.device, arguments.steps))))
        return 0
    names, modes = (arguments.only or ",".join(cases)).split(","), arguments.modes.split(",")
    unknown = [name for name in names if name not in cases] + [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; cases: {', '.join(cases)}; modes: {', '.join(MODES)}")
    print(f"{'':22} {'predicted':>12} {'measured':>12} {'off':>7} {'predicted':>13} {'measured':>11} {'off':>7}")
    results = []
    for result in run_all([cases[name] for name in names], modes, arguments.cluster, arguments.device, arguments.steps):
        results.append(result)
        print(line(result), flush=True)
    print(summary(results))
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        head = {"date": _today(), "device": device, "torch": torch.__version__, "cluster": arguments.cluster}
        rows = [{key: value for key, value in asdict(result).items() if value not in (None, "")} for result in results]
        from autoptd.outputs import write_whole

        write_whole(Path(arguments.out), json.dumps({**head, "results": rows}, indent=1) + "\n")
    return 0 if any(not result.problem for result in results) else 1


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
