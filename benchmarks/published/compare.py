"""Comparison of predicted with measured figures, as data: per run, per group and per set of plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoptd.cost_models.memory import CONFIDENCE
from benchmarks.published.predict import Prediction, counts_tensors
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.statistics import Errors, errors, regret, spearman

_SMALLEST_SET = 3  # plans below which a ranking is meaningless


@dataclass(frozen=True)
class Outcome:
    """A run and its prediction, or the reason why there is none."""

    row: Row
    prediction: Prediction | None
    reason: str = ""

    @property
    def time(self) -> tuple[float, float] | None:
        """(predicted, measured) step seconds; None if either is missing."""
        measured = self.row.measured_time_s
        return None if self.prediction is None or measured is None else (self.prediction.step_time_s, measured)

    @property
    def memory(self) -> tuple[float, float] | None:
        """(predicted, measured) peak bytes of a rank; None if either is missing."""
        measured = self.row.measured_bytes
        if self.prediction is None or measured is None:
            return None
        return self.prediction.bytes_of(self.row.peak_memory_kind), measured

    @property
    def used(self) -> bool:
        return self.prediction is not None


@dataclass(frozen=True)
class Line:
    """One line of the report: counts and errors of a group or of part of one."""

    name: str
    rows: int
    used: int
    skipped: dict[str, int]  # reason -> runs
    time: Errors | None
    memory: Errors | None


@dataclass(frozen=True)
class PlanSet:
    """Rank correlation and regret among plans of one model, on the same GPUs, with the same batch and sequence."""

    line: str
    label: str
    plans: int
    spearman: float
    regret: float


@dataclass(frozen=True)
class Fitting:
    """Runs that ran out of memory and runs that did not, against the prediction of whether they fit.

    `tensors`: measured ÷ predicted bytes of tensors, of the runs whose figure counts nothing else; sorted.
    """

    out_of_memory: int
    said_to_fit: tuple[str, ...]  # surely: ids of out-of-memory runs
    ran: int
    said_not_to_fit: tuple[str, ...]  # as predicted: ids of runs that ran
    tensors: tuple[float, ...] = ()

    @property
    def most_measured(self) -> float | None:
        """The ratio below which `CONFIDENCE` of the tensors are: `MOST_MEASURED` of `cost_models/memory.py`."""
        return float(np.quantile(self.tensors, CONFIDENCE)) if self.tensors else None


@dataclass(frozen=True)
class Report:
    outcomes: tuple[Outcome, ...]
    lines: tuple[Line, ...]
    mixtures: tuple[Line, ...]  # of all groups, by precision
    everything: Line  # of dense models, if there are any
    sets: tuple[PlanSet, ...]
    fitting: Fitting


def outcome_of(row: Row, predict: Callable[[Row], Prediction]) -> Outcome:
    """Predict one run; if it cannot be compared, the outcome holds the reason."""
    if reason := _unfit(row):
        return Outcome(row, None, reason)
    try:
        prediction = predict(row)
        if row.measured_bytes is not None:
            prediction.bytes_of(row.peak_memory_kind)
    except Unsupported as error:
        return Outcome(row, None, str(error))
    return Outcome(row, prediction)


def _unfit(row: Row) -> str:
    if row.status != "ok" and not row.ran_out_of_memory:
        return f"its status is {row.status!r}"
    if row.measured_time_s is None and row.measured_bytes is None and not row.ran_out_of_memory:
        return "neither its time nor its memory is complete"
    measured = (row.measured_time_s, row.measured_bytes)
    return "a measured figure is not positive" if any(m is not None and m <= 0 for m in measured) else ""


def line_name(row: Row) -> str:
    """Return the report line of a run: its group, or a part of the group that is judged separately."""
    if is_mixture(row):
        return f"{row.group} (moe)"
    if row.group == "bloom_prequel":
        return f"{row.group} ({'64' if row.n_heads == 64 else 'other'} heads)"
    if row.group == "dgxc_llmb":
        return f"{row.group} (dense)"
    # torchtitan's reports share hardware and framework, a few runs each
    return "torchtitan" if row.group.startswith("torchtitan") else row.group


def is_mixture(row: Row) -> bool:
    """Return whether a run's model is a mixture of experts."""
    return "moe" in (row.arch or "")


def compare(outcomes: Sequence[Outcome]) -> Report:
    """Return the report of these runs, lines in order of first appearance."""
    lines: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        lines.setdefault(line_name(outcome.row), []).append(outcome)
    dense = [o for o in outcomes if not is_mixture(o.row)]
    fit = [o for o in outcomes if is_mixture(o.row) and (o.used or not _unfit(o.row))]
    by_precision = {word: [o for o in fit if (o.row.precision == "fp8") == (word == "fp8")] for word in ("bf16", "fp8")}
    return Report(
        outcomes=tuple(outcomes),
        lines=tuple(_line(name, members) for name, members in lines.items()),
        mixtures=tuple(_line(f"mixtures in {word}", members) for word, members in by_precision.items() if members),
        everything=_line("all rows", dense) if dense else _line("all mixtures", outcomes),
        sets=tuple(_sets(outcomes)),
        fitting=_fitting(outcomes),
    )


def _line(name: str, outcomes: Sequence[Outcome]) -> Line:
    skipped = Counter(o.reason for o in outcomes if not o.used)
    return Line(
        name=name,
        rows=len(outcomes),
        used=sum(o.used for o in outcomes),
        skipped=dict(skipped.most_common()),
        time=errors([o.time for o in outcomes if o.time]),
        memory=errors([o.memory for o in outcomes if o.memory]),
    )


def _sets(outcomes: Iterable[Outcome]) -> Iterable[PlanSet]:
    timed = [o for o in outcomes if o.time]
    problems: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in timed:
        problems.setdefault(_problem(outcome.row), []).append(outcome)
    for members in problems.values():
        plans = _distinct(members)
        if len(plans) >= _SMALLEST_SET:
            predicted, measured = zip(*plans, strict=True)
            row = members[0].row
            yield PlanSet(
                line_name(row), _label(row), len(plans), spearman(predicted, measured), regret(predicted, measured)
            )


def _problem(row: Row) -> tuple[object, ...]:
    """Return the key of a planning problem: the report line and all that alternative plans have in common."""
    model = (row.model_name, row.arch, row.n_layers, row.hidden_size, row.ffn_hidden_size, row.n_heads, row.vocab_size)
    devices = (row.n_gpus, row.gpu_type, row.gpu_memory_gb, row.inter_node_bw_Gbps_per_gpu)
    return (line_name(row), *model, *devices, row.precision, row.global_batch_size_seqs, row.seq_len_tokens)


def _label(row: Row) -> str:
    heads = f" {row.n_heads} heads" if line_name(row).endswith("(other heads)") else ""
    batch = f"batch {row.global_batch_size_seqs} × {row.seq_len_tokens} {row.precision}"
    return f"{row.model_name}{heads}, {row.n_gpus} GPUs, {batch}"


def _distinct(members: list[Outcome]) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds per plan; repeated measurements of a plan are averaged."""
    by_plan: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for outcome in members:
        assert outcome.time
        by_plan.setdefault(_plan(outcome.row), []).append(outcome.time)
    return [(times[0][0], sum(m for _, m in times) / len(times)) for times in by_plan.values()]


def _plan(row: Row) -> tuple[object, ...]:
    """Return the key of a run's plan within its problem."""
    axes = (row.dp, row.tp, row.pp, row.cp, row.ep, row.vpp_chunks_per_stage, row.micro_batch_size_seqs)
    memory = (row.sharding, row.fsdp_shard_size, row.recompute, row.recompute_detail, row.sequence_parallel)
    return (*axes, *memory, row.dp_comm_overlap, row.tp_comm_overlap, row.torch_compile)


def _fitting(outcomes: Iterable[Outcome]) -> Fitting:
    outcomes = list(outcomes)
    predicted = [(o.row, o.prediction) for o in outcomes if o.prediction is not None]
    tensors = (o.memory for o in outcomes if o.memory and counts_tensors(o.row.peak_memory_kind))
    failed = [(row, p) for row, p in predicted if row.ran_out_of_memory]
    ran = [(row, p) for row, p in predicted if row.ran]
    return Fitting(
        out_of_memory=len(failed),
        said_to_fit=tuple(row.id for row, p in failed if p.surely),
        ran=len(ran),
        said_not_to_fit=tuple(row.id for row, p in ran if not p.fits),
        tensors=tuple(sorted(measured / predicted for predicted, measured in tensors)),
    )
