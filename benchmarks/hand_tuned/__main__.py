"""`python -m benchmarks.hand_tuned FILE.jsonl`: no hand-tuned plan may be predicted faster than the search's plan.

With `--json OUT`, each comparison is appended to OUT as soon as it is done, one JSON object per line; runs that OUT
already has are not searched again. Exit code: 0 without a loss, 1 with one, 2 for a bad file or argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from autoptd.errors import AutoptdError
from autoptd.outputs import refuse_unwritable
from benchmarks.hand_tuned.report import lines_of, text
from benchmarks.hand_tuned.search import Comparison, compare
from benchmarks.published.__main__ import at_least_one, chosen
from benchmarks.published.rows import BadRuns, Row, read_rows
from benchmarks.published.run import batches, each


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    try:
        rows = [row for row in chosen(read_rows(given.file), given.group) if row.measured_time_s is not None]
        if given.json:
            refuse_unwritable(given.json)
        done = read_done(given.json)
    except AutoptdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = [row for row in rows if row.id not in done or (done[row.id].free is None and not given.only_used)]
    work = partial(_work, out=given.json, limit_s=given.limit, only_used=given.only_used)
    for found in each(work, batches(left), given.jobs):
        done |= {c.id: c for c in found}
    comparisons = [done[row.id] for row in rows]
    print(text(comparisons))
    return int(any(c.losses for c in comparisons))


def read_done(path: Path | None) -> dict[str, Comparison]:
    """Read the comparisons of an earlier invocation, by run id. Raises BadRuns for a line that is not one."""
    if path is None or not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            comparison = Comparison.model_validate_json(line)
        except ValidationError as error:
            raise BadRuns("not a comparison", where=f"{path}:{number}", fix="name a new file") from error
        found[comparison.id] = comparison
    return found


def _work(rows: list[Row], out: Path | None, limit_s: float, only_used: bool) -> list[Comparison]:
    """Compare runs of one model; append each at once, as one write per line, so that processes may share `out`."""
    found = []
    for comparison in compare(rows, limit_s, only_used):
        found.append(comparison)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(comparison.model_dump_json() + "\n")
            print("\n".join(lines_of(comparison)), file=sys.stderr, flush=True)
    return found


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hand_tuned", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="published runs, see benchmarks/README.md")
    parser.add_argument("--group", nargs="+", default=[], metavar="G", help="only runs of these groups")
    parser.add_argument("--json", type=Path, metavar="OUT", help="append comparisons there; skip runs it has")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="parallel searches (1)")
    parser.add_argument("--only-used", action="store_true", help="search only dimensions that the own plan uses")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds per search, once it found a plan")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
