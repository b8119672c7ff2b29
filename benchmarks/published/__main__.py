"""`python -m benchmarks.published FILE.jsonl`: predicted against measured training runs, per run and per group.

Exit code: 0 whatever the figures are, 2 for a bad file or argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autoptd.errors import AutoptdError, nearest
from autoptd.outputs import refuse_unwritable, write_whole
from benchmarks.published.compare import compare
from benchmarks.published.constants import fitted
from benchmarks.published.report import data, summary, text
from benchmarks.published.rows import BadRuns, Row, read_rows
from benchmarks.published.run import run, show_progress


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    try:
        for path in filter(None, (given.json, given.markdown)):
            refuse_unwritable(path)
        rows = chosen(read_rows(given.file), given.group)
    except AutoptdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report, constants = compare(run(rows, given.jobs, progress=show_progress)), fitted()
    print(text(report, constants))
    if given.json:
        write_whole(given.json, json.dumps(data(report, constants), indent=1, allow_nan=False) + "\n")
    if given.markdown:
        write_whole(given.markdown, summary(report, constants))
    return 0


def chosen(rows: Sequence[Row], groups: Sequence[str]) -> list[Row]:
    """Return the rows of these groups, of all if none are named. Raises BadRuns for an unknown group or no rows."""
    known = {row.group for row in rows}
    if unknown := [group for group in groups if group not in known]:
        raise BadRuns(f"no run belongs to group {unknown[0]!r}", where="--group", fix=nearest(unknown[0], known))
    if not rows:
        raise BadRuns("the file has no runs", fix="give one JSON object per line")
    return [row for row in rows if not groups or row.group in groups]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="runs, one JSON object per line")
    parser.add_argument("--group", nargs="+", default=[], metavar="G", help="only runs of these groups")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the summary there")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="parallel processes (1)")
    return parser.parse_args(arguments)


def at_least_one(text: str) -> int:
    """Parse a number of processes from the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
