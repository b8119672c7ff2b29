"""Pictures of documents: make those of docs/pictures again by the commands that the documents show.

python -m tests.pictures     # rewrite docs/pictures; the picture of a page needs Chromium and Pillow
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from autoptd.cli.main import main
from tests.examples import inside

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
COMMANDS = """
plan llama3-8b --world 64 --cluster dgx-h100 -o plan.json
simulate plan.json --svg timeline.svg
explain plan.json --svg memory.svg
plan llama3-8b --cluster dgx-h100 --sweep world=8,16,32,64,128 --batch 1024 --svg sweep.svg
"""
PAGE = "plan gpt3-175b --world 64 --cluster dgx-h100 --html report.html"


def run(folder: Path, commands: str = COMMANDS) -> list[Path]:
    """Run commands in a folder, and return the pictures that they have written. Raises AssertionError if one fails."""
    with inside(folder):
        for command in commands.split("\n"):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                assert not command or main(command.split()) == 0, said.getvalue()
    return sorted(folder.glob("*.svg"))


def _screenshot(page: Path, picture: Path) -> None:
    from PIL import Image

    given = [f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={page.with_suffix('.png')}"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *given]
    subprocess.run([*command, "--window-size=1280,2300", page.as_uri()], check=True, capture_output=True, timeout=100)
    with Image.open(page.with_suffix(".png")) as found:
        found.resize((768, 1380)).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    os.environ["AUTOPTD_CACHE"] = "off"
    with tempfile.TemporaryDirectory(prefix="autoptd-pictures-") as scratch:
        for made in run(Path(scratch)):
            shutil.copy(made, PICTURES)
        if CHROMIUM is not None:
            run(Path(scratch), PAGE)
            _screenshot(Path(scratch) / "report.html", PICTURES / "report.png")
