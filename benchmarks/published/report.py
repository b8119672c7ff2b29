"""Report of a comparison as text of 120 columns, as Markdown for the documentation, and as JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED
from benchmarks.published.bars import (
    Verdict,
    fitting_verdicts,
    memory_verdicts,
    set_verdicts,
    skip_verdict,
    time_verdicts,
)
from benchmarks.published.compare import Line, Outcome, PlanSet, Report, line_name
from benchmarks.published.rows import Row
from benchmarks.published.statistics import Errors, error

WIDTH = 120
_SHORT = {"none": "", "selective": "sel", "full": "full"}


def text(report: Report, constants: Mapping[str, str] | None = None) -> str:
    """Return the whole report: runs, groups, sets of plans, memory verdicts, skipped runs, constants."""
    parts = (_runs(report), _groups(report), _plan_sets(report), _fits(report), _skips(report), _constants(constants))
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def plan_text(row: Row) -> str:
    """Return `dp8 tp8 pp12×3 mb2 z1 full sp`, without axes of size 1 and features that are off."""
    axes = [f"{name}{n}" for name, n in (("dp", row.dp), ("tp", row.tp), ("cp", row.cp), ("ep", row.ep)) if n > 1]
    chunks = f"×{row.vpp_chunks_per_stage}" if row.vpp_chunks_per_stage > 1 else ""
    axes += [f"pp{row.pp}{chunks}"] if row.pp > 1 else []
    sharding = {"none": "", "zero1": "z1"}.get(row.sharding, "fsdp" if "zero3" in row.sharding else "z2")
    shards = row.fsdp_shard_size if row.fsdp_shard_size not in (None, row.dp) else ""
    words = [*axes, f"mb{row.micro_batch_size_seqs}", f"{sharding}{shards}", _SHORT.get(row.recompute, row.recompute)]
    return " ".join(w for w in [*words, "sp" if row.sequence_parallel else ""] if w)


# --- text ----------------------------------------------------------------------------------------------------------


def _runs(report: Report) -> Iterator[str]:
    by_line = sorted(report.outcomes, key=lambda o: [line.name for line in report.lines].index(line_name(o.row)))
    for name, members in groupby(by_line, key=lambda o: line_name(o.row)):
        yield f"{'' if name == report.lines[0].name else chr(10)}{name}"
        yield (
            f"  {'run':8}{'model':22}{'GPUs':>5}  {'plan':30}{'step s':>9}{'predicted':>10}{'error':>8}"
            f"{'GiB':>7}{'pred':>7}{'error':>8}"
        )
        yield from map(_run, members)


def _run(outcome: Outcome) -> str:
    row = outcome.row
    run = row.id.removeprefix(f"{row.group}:")
    head = f"  {run[:7]:8}{row.model_name[:21]:22}{row.n_gpus or '':>5}  {plan_text(row)[:29]:30}"
    if outcome.prediction is None:
        return f"{head}  skipped: {outcome.reason}"[:WIDTH]
    measured = row.measured_time_s
    seconds = f"{'' if measured is None else _number(measured):>9}{_number(outcome.prediction.step_time_s):>10}"
    seconds += f"{_signed(outcome.time):>8}"
    if row.ran_out_of_memory:
        return f"{head}{seconds}  {row.status}, predicted: {'fits' if outcome.prediction.fits else 'no fit'}"
    if outcome.memory is None:
        return head + seconds
    predicted, seen = outcome.memory
    return f"{head}{seconds}{seen / 2**30:>7.1f}{predicted / 2**30:>7.1f}{_signed(outcome.memory):>8}"


def _groups(report: Report) -> Iterator[str]:
    yield f"{'':30}{'runs':^15}{'  step time: absolute error':38}{'  peak memory: absolute error'}"
    titles = f"{'n':>4}{'median':>7}{'p90':>7}{'mean':>7}"
    yield f"{'group':30}{'all':>5}{'used':>5}{'skip':>5}{titles}{'':13}{titles}"
    for line in (*report.lines, *report.mixtures, report.everything):
        time = f"{_errors(line.time)}{_verdict(time_verdicts(line.name, line.time)[:1]):13}"
        memory = f"{_errors(line.memory)}{_verdict(memory_verdicts(line))}"
        counts = f"{line.rows:>5}{line.used:>5}{line.rows - line.used:>5}"
        yield f"{line.name:30}{counts}{time}{memory}".rstrip()
    for line in (*report.mixtures, report.everything):
        for verdict in time_verdicts(line.name, line.time)[1:]:
            yield f"{line.name}, 90th percentile of the step time: {verdict}"


def _plan_sets(report: Report) -> Iterator[str]:
    if not report.sets:
        return
    yield f"{'plans of one model, GPUs and batch':76}{'plans':>6}{'rank':>7}{'':12}{'regret':>7}"
    for plans in report.sets:
        rank, regret = _set_marks(plans)
        label = f"{plans.line}: {plans.label}"
        label = label if len(label) <= 75 else f"{label[:74]}…"
        yield f"{label:76}{plans.plans:>6}{plans.spearman:>7.2f}{rank:12}{plans.regret * 100:>6.1f}%{regret}".rstrip()


def _set_marks(plans: PlanSet) -> tuple[str, str]:
    verdicts = set_verdicts(plans)
    rank = [v for v in verdicts if v.text.startswith("≥")]
    return _verdict(rank), _verdict([v for v in verdicts if v not in rank])


def _fits(report: Report) -> Iterator[str]:
    fitting, (none, few) = report.fitting, fitting_verdicts(report.fitting)
    surely = f"ran out of memory, predicted to fit with {CONFIDENCE:.0%} confidence"
    yield f"{surely}: {len(fitting.said_to_fit)} of {fitting.out_of_memory}  ({none})"
    yield from _ids(fitting.said_to_fit)
    yield f"ran, predicted not to fit: {len(fitting.said_not_to_fit)} of {fitting.ran}  ({few})"
    yield from _ids(fitting.said_not_to_fit)
    if fitting.most_measured is not None:
        yield (
            f"tensors of {len(fitting.tensors)} runs, measured ÷ predicted: {CONFIDENCE:.0%} are below "
            f"{fitting.most_measured:.3f} (plans count with {MOST_MEASURED})"
        )


def _ids(ids: tuple[str, ...]) -> Iterator[str]:
    line = " "
    for name in ids:
        if len(line) + len(name) + 1 > WIDTH:
            yield line
            line = " "
        line += f" {name}"
    if ids:
        yield line


def _skips(report: Report) -> Iterator[str]:
    rows, used = (sum(getattr(line, name) for line in report.lines) for name in ("rows", "used"))
    bar = skip_verdict(report.mixtures)
    yield f"skipped: {rows - used} of {rows} runs" + (f"; of mixtures that are complete: {bar}" if bar else "")
    for line in report.lines:
        for reason, count in line.skipped.items():
            yield f"  {count:>4}  {line.name}: {reason}"


def _constants(constants: Mapping[str, str] | None) -> Iterator[str]:
    if constants is not None:
        yield f"constants: {len(constants)}, each with its value and the runs it was fitted on"
        yield from (f"  {name}: {origin}" for name, origin in constants.items())


def _errors(found: Errors | None) -> str:
    if found is None:
        return f"{'':>4}{'–':>7}{'':>14}"
    return f"{found.count:>4}{found.median * 100:>6.1f}%{found.p90 * 100:>6.1f}%{found.mean * 100:>+6.1f}%"


def _verdict(verdicts: list[Verdict]) -> str:
    return f"  {verdicts[0]}" if verdicts else ""


def _number(seconds: float) -> str:
    return f"{seconds:.4g}"


def _signed(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{error(*pair) * 100:+.1f}%"


# --- Markdown and JSON ---------------------------------------------------------------------------------------------


def summary(report: Report, constants: Mapping[str, str] | None = None) -> str:
    """Return groups, sets of plans and memory verdicts as Markdown, for `docs/accuracy.md`."""
    lines = [
        "| runs | used of all | step time: median | 90 % | mean | bar | memory: median | 90 % | mean | bar |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_markdown_line(line) for line in (*report.lines, *report.mixtures, report.everything)]
    if report.sets:
        lines += [
            "",
            "| plans of one model, GPUs and batch | plans | Spearman | bar | regret | bar |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_markdown_set(plans) for plans in report.sets]
    lines += ["", *(f"- {line}" for line in _fits(report) if not line.startswith(" "))]
    skipped = [f"{count} {name}: {reason}" for name, reason, count in _reasons(report)]
    lines += ["", f"Skipped: {'; '.join(skipped)}." if skipped else "Nothing was skipped."]
    if bar := skip_verdict(report.mixtures):
        lines += ["", f"Skipped of the mixtures that are complete for time or memory: {bar}."]
    if constants is not None:
        lines += ["", f"Constants: {len(constants)}.", "", *(f"- {name}: {text}" for name, text in constants.items())]
    return "\n".join(lines) + "\n"


def _reasons(report: Report) -> list[tuple[str, str, int]]:
    return [(line.name, reason, count) for line in report.lines for reason, count in line.skipped.items()]


def _markdown_line(line: Line) -> str:
    time, memory = time_verdicts(line.name, line.time), memory_verdicts(line)
    cells = [line.name, f"{line.used} of {line.rows}", *_cells(line.time), _joined(time), *_cells(line.memory)]
    return f"| {' | '.join([*cells, _joined(memory)])} |"


def _markdown_set(plans: PlanSet) -> str:
    rank, regret = (mark.strip() for mark in _set_marks(plans))
    cells = [f"{plans.line}: {plans.label}", str(plans.plans), f"{plans.spearman:.2f}", rank]
    return f"| {' | '.join([*cells, f'{plans.regret:.1%}', regret])} |"


def _cells(found: Errors | None) -> list[str]:
    return ["–"] * 3 if found is None else [f"{found.median:.1%}", f"{found.p90:.1%}", f"{found.mean:+.1%}"]


def _joined(verdicts: list[Verdict]) -> str:
    return ", ".join(map(str, verdicts))


def data(report: Report, constants: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the report as plain JSON data; relative errors and regret are fractions."""
    return {
        "runs": [_run_data(outcome) for outcome in report.outcomes],
        "lines": [_line_data(line) for line in (*report.lines, *report.mixtures, report.everything)],
        "sets": [{**asdict(plans), "bars": _bars(set_verdicts(plans))} for plans in report.sets],
        "fitting": {**asdict(report.fitting), "bars": _bars(fitting_verdicts(report.fitting))},
        "constants": None if constants is None else dict(constants),
    }


def _run_data(outcome: Outcome) -> dict[str, Any]:
    row, time, memory = outcome.row, outcome.time, outcome.memory
    return {
        "id": row.id,
        "line": line_name(row),
        "status": row.status,
        "plan": plan_text(row),
        "skipped": outcome.reason or None,
        "predicted": None if outcome.prediction is None else asdict(outcome.prediction),
        "measured_time_s": row.measured_time_s,
        "time_error": None if time is None else error(*time),
        "measured_bytes": row.measured_bytes,
        "memory_kind": row.peak_memory_kind or None,
        "memory_error": None if memory is None else error(*memory),
    }


def _line_data(line: Line) -> dict[str, Any]:
    return {
        **asdict(line),
        "time_bars": _bars(time_verdicts(line.name, line.time)),
        "memory_bars": _bars(memory_verdicts(line)),
    }


def _bars(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in verdicts]
