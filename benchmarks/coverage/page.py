"""docs/coverage.md from the results of a sweep: counts per family, models that train, and reasons of the others."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Result = Mapping[str, Any]
WIDTH = 100
FAMILIES = ("decoder", "encoder", "encoder-decoder", "vision", "audio", "vision-language", "classifier")
HEAD = """# Models that train in parallel

Heads of the installed transformers, each as a tiny model of its own configuration class and with
the loss of its task where it has none, and models of other libraries: traced, planned and run on
all ranks beside one process, in float64 and in training mode with their dropout. The loss, every
gradient and every parameter after two optimizer steps are compared. Models whose own code does not
train in float64 are traced in float32. A row stands until its model is run again, so rows may be of
several days.
Written by `python -m benchmarks.coverage --page docs/coverage.md` from
`benchmarks/data/coverage.jsonl`: {made}.

- **trained**: all ranks agree with the one process.
- **refused**: an error of autoptd at tracing or planning, with its way out; nothing was run.
- **crashed, differs**: a defect of autoptd.
- **not built**: the library itself cannot train the tiny model, it needs a package that is not
  installed, or the sweep gives it a wrong configuration or batch. The share that trained is of all
  that were tried, these included.
"""


def page(results: Iterable[Result], made: str, others: Mapping[str, Sequence[Result]] | None = None) -> str:
    """Return the document. `made`: date, versions and mesh of the sweep, in words. `others`: the same -> results on
    another mesh."""
    families: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: r["name"].lower()):
        families[result["family"]].append(result)
    names = sorted(families, key=lambda f: (FAMILIES.index(f) if f in FAMILIES else len(FAMILIES), f))
    parts = [_wrapped_head(made), table({f: families[f] for f in names})]
    for family in names:
        parts.append(f"## {family.capitalize()}\n\n" + trained(families[family]))
    everything = [r for f in names for r in families[f]]
    parts += [
        grouped("Refused", everything, ("refused",), _refusal),
        grouped("Crashed or differs", everything, ("crashed", "differs"), _defect),
        grouped("Not built", everything, ("not built",), _unbuilt),
    ]
    parts += [_on_mesh(*other) for other in (others or {}).items()]
    return "\n\n".join(p.rstrip() for p in parts if p) + "\n"


def _wrapped_head(made: str) -> str:
    """Return the head of the page; its line of date and versions is as long as they are."""
    start, end = "`benchmarks/data/coverage.jsonl`: ", "{made}."
    before, after = HEAD.split(start + end)
    return before + wrapped(start + made + ".") + after


def _on_mesh(made: str, results: Sequence[Result]) -> str:
    """Return the section about another mesh: counts, the largest difference, and the reasons of refusals."""
    mesh = made.rpartition(", ")[2]
    built = [r for r in results if r["result"] != "not built" and r["step"] != "trace"]
    long = [r for r in built if r.get("tokens")]
    good = [r["difference"] for r in long if r["result"] == "trained"]
    said = f"Of {len(built)} models that can be traced, {len(long)} have a sequence whose length their code leaves open"
    trains = f"; {len(good)} of these train" + (f", and the largest difference is {max(good):.1e}." if good else ".")
    groups = [
        grouped("Refused", long, ("refused",), _refusal, 3),
        grouped("Crashed or differs", built, ("crashed", "differs"), _defect, 3),
        grouped("Without such a sequence", [r for r in built if not r.get("tokens")], ("refused",), _refusal, 3),
    ]
    return "\n\n".join([f"## {mesh}", wrapped(f"{said}{trains} Results: {made}."), *filter(None, groups)])


def table(families: Mapping[str, Sequence[Result]]) -> str:
    """Return the counts of each family, and of all."""
    lines = [
        "| family | tried | trained | refused | crashed or differs | not built | share trained |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    every = [r for results in families.values() for r in results]
    for family, results in (*families.items(), ("all", every)):
        n = Counter(r["result"] for r in results)
        share = f"{n['trained'] / len(results):.1%}"
        counts = (len(results), n["trained"], n["refused"], n["crashed"] + n["differs"], n["not built"])
        lines.append(f"| {family} | {' | '.join(map(str, counts))} | {share} |")
    return "\n".join(lines)


def trained(results: Sequence[Result]) -> str:
    """Return the models of a family that train, with the largest difference and what tp splits."""
    good = [r for r in results if r["result"] == "trained"]
    if not good:
        return "None trains."
    worst = max(r["difference"] for r in good)
    said = (
        f"{len(good)} train; the largest difference is {worst:.1e}, and tp splits "
        f"{median(r['split'] for r in good):.0%} of the parameters in the median."
    )
    kinds = Counter(r["experts"] for r in good if r.get("experts"))
    if kinds:
        said += " Experts: " + ", ".join(f"{how} in {n}" for how, n in sorted(kinds.items())) + "."
    return f"{wrapped(said)}\n\n{wrapped(listed(r['name'] for r in good))}"


def grouped(
    title: str, results: Sequence[Result], which: Sequence[str], reason: Callable[[Result], str], level: int = 2
) -> str:
    """Return the models with one of these results, by reason, the most frequent first, below a title."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result["result"] in which:
            groups[reason(result)].append(result)
    if not groups:
        return ""
    parts = [f"{'#' * level} {title}"]
    for why, members in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        fix = next((plain(r["fix"]) for r in members if r.get("fix")), "")
        lines = [wrapped(f"- **{len(members)}: {why}**", "  ")]
        lines += [wrapped(f"  Way out: {fix}.", "  ")] if fix else []
        parts.append("\n".join([*lines, wrapped("  " + listed(r["name"] for r in members), "  ")]))
    return "\n\n".join(parts)


def _refusal(result: Result) -> str:
    """Return the error without names and sizes of the one model."""
    return re.sub(r"'[^']*'|\b\d+\b", "…", plain(result["what"]))


def _defect(result: Result) -> str:
    said = f"{result['result']}: {_refusal(result)}"
    return (
        f"{said} ({result['where'].partition(',')[0]})" if result["result"] == "crashed" and result["where"] else said
    )


def _unbuilt(result: Result) -> str:
    return re.sub(r"\b[A-Z]\w+(?:For|With|Output)\w+", "…", plain(result["what"]))


def plain(text: str) -> str:
    """Return the first sentence of an error on one line, without what Markdown would read as its own."""
    line = " ".join(text.split())
    line = re.split(r"(?<=[\w)`'])\. ", line)[0].rstrip(".")
    return re.sub(r"([*_<>|])", r"\\\1", textwrap.shorten(line, 240, placeholder=" …"))


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def wrapped(text: str, indent: str = "") -> str:
    options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    head = re.match(r" *", text)
    lead = head.group() if head else ""
    return textwrap.fill(text.strip(), WIDTH, initial_indent=lead, **options)  # type: ignore[arg-type]
