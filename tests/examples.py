"""Examples in documents: run the blocks of a page in order, and compare what they print with what the page shows.

    python -m tests.examples docs/tutorials/*.md     # run pages, and rewrite the outputs that are no longer true

Three kinds of fenced blocks are run, in an empty folder and with one Python namespace per page. What is not run is
checked by tests/fragments.py, such as `py`: a fragment that reads names which the page does not define.

- `python`: executed. A block `text` that follows shows its output.
- `python` or `toml` whose first line is a comment with a file's name (`# train.py`): written to that file.
- `console`: each line that begins with `$ ` is a command (`autoptd`, `python`, `torchrun`, or one of the shell), and
  the lines below it are its output. A command that fails must be followed by `$ echo $?`.

In an output that a page shows, `…` stands for any text within a line, and a line `…` for any lines: numbers that differ
between machines, and parts that are too long.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.forked_ranks import run_script

ROOT = Path(__file__).parents[1]

_FENCED = re.compile(r"^```(python|toml|console|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXECUTED = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if re.search(r"^```(?:python|console)$", page.read_text("utf-8"), re.MULTILINE)
]
# pages that take longest
_LONG = "answers.md constraints.md experts.md usage.md tutorials/cluster.md tutorials/megatron.md "
_LONG += "tutorials/mixture.md tutorials/verify.md"
LONG = [ROOT / "docs" / name for name in _LONG.split()]
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
_LIMIT_S = 240


@dataclass(frozen=True)
class Example:
    """A piece of code and the output that the page shows for it: None if it shows none, which is right for any.

    kind: "python", "file" (to be written), or "command". `span`: where the shown output is in the page.
    """

    kind: str
    code: str
    shown: str | None
    span: tuple[int, int]


def examples(page: str) -> Iterator[Example]:
    """Yield the examples of a page, in order."""
    blocks = list(_FENCED.finditer(page))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        kind, code = block.groups()
        if kind == "console":
            yield from _commands(code, block.start(2))
        elif kind in ("python", "toml") and _FILE.match(code):
            yield Example("file", code, None, (0, 0))
        elif kind == "python":
            shows = after and after[1] == "text" and not page[block.end() : after.start()].strip()
            yield Example("python", code, after[2], after.span(2)) if shows else Example("python", code, None, (0, 0))


def _commands(code: str, start: int) -> Iterator[Example]:
    """Yield each command of a console block with the lines up to the next one; `start` is the block's place."""
    for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE):
        yield Example(
            "command", found[1].replace("\\\n", " "), found[2], (start + found.start(2), start + found.end(2))
        )


def agree(shown: str, printed: str) -> bool:
    """Return whether `printed` is what a page shows, apart from spaces at the ends of lines."""
    lines = [re.escape(line.rstrip()).replace("…", ".*") + "\n" for line in shown.splitlines()]
    pattern = "".join("(?:.*\n)*?" if line == ".*\n" else line for line in lines)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


def run(page: Path) -> Iterator[tuple[Example, str]]:
    """Run the examples of a page in an empty folder, and yield each one that prints, with what it printed.

    Raises AssertionError if a command fails and the page does not look at its exit code.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text, code, failed = page.read_text("utf-8"), 0, ""
    with tempfile.TemporaryDirectory(prefix="autoptd-example-") as folder, inside(Path(folder)):
        every = list(examples(text))
        for example, after in zip(every, [*every[1:], None], strict=True):
            looks = example.code == "echo $?"
            assert looks or not failed, f"{page.name} does not expect this to fail: {failed}"
            failed = ""
            if example.kind == "file":
                name = _FILE.match(example.code)
                Path(name[1] if name else "").write_text(example.code, "utf-8")
                continue
            if example.kind == "python":
                said = _python(lambda code=example.code: exec(compile(code, page.name, "exec"), namespace))
            elif looks:
                said = f"{code}\n"
            else:
                expected = after is not None and after.code == "echo $?"
                code, said = _command(shlex.split(example.code), fails=expected)
                failed = f"{example.code}\n{said}" if code else ""
            yield example, said
        assert not failed, f"{page.name} does not expect this to fail: {failed}"


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Make `folder` the working folder, and the place that scripts and `module:callable` are imported from."""
    before, modules = Path.cwd(), set(sys.modules)
    os.chdir(folder)
    try:
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            yield
    finally:
        if torch.distributed.is_initialized():  # of a world of one
            torch.distributed.destroy_process_group()
        os.chdir(before)
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
                del sys.modules[name]  # the next page may have a file of the same name


def _python(call: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        call()
    return said.getvalue()


def _command(words: list[str], *, fails: bool) -> tuple[int, str]:
    """Return a command's exit code and its output; with that of standard error if it fails, or runs in this process.

    torchrun itself is run where a page shows how it fails.
    """
    program, *rest = words
    if program == "autoptd":
        from autoptd.cli.main import main

        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            return main(rest), said.getvalue()
    if program == "python":
        with mock.patch.object(sys, "argv", rest):
            return 0, _python(lambda: runpy.run_path(rest[0], run_name="__main__"))
    if program == "torchrun" and not fails:
        option, ranks, script, *arguments = rest
        assert option == "--nproc-per-node", words
        return run_script(int(ranks), script, *arguments, limit_s=_LIMIT_S)
    if program == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *rest]  # a port of its own
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def refreshed(shown: str, printed: str) -> str:
    """Return `printed` with what `shown` leaves out left out too; all of it if the lines have no counterparts."""
    lines, chosen, at, skipped = printed.splitlines(), [], 0, False
    for line in shown.splitlines():
        if line == "…":
            skipped = True
        elif at < len(lines):
            at = max(range(at, len(lines)), key=lambda i: _alike(line, lines[i])) if skipped else at
            line, at, skipped = line if agree(line, lines[at]) else lines[at], at + 1, False
        chosen.append(line)
    result = "".join(f"{line}\n" for line in chosen)
    return result if agree(result, printed) else printed


def _alike(a: str, b: str) -> float:
    """Return how similar two lines are, apart from numbers."""
    return SequenceMatcher(None, re.sub(r"\d", "", a), re.sub(r"\d", "", b)).ratio()


def rewrite(page: Path) -> bool:
    """Run a page, and put outputs that are no longer true in place of those it shows; return whether any was."""
    text, changed = page.read_text("utf-8"), False
    for example, said in reversed(list(run(page))):
        if example.shown is not None and not agree(example.shown, said):
            start, end = example.span
            text, changed = text[:start] + refreshed(example.shown, said) + text[end:], True
    if changed:
        page.write_text(text, "utf-8")
    return changed


if __name__ == "__main__":
    os.environ["AUTOPTD_CACHE"] = "off"
    for name in sys.argv[1:] or map(str, EXECUTED):
        print(name, "rewritten" if rewrite(Path(name)) else "is true")
