"""Pages of the site: those of the repository, with links between them adapted, and generated ones.

The table of README.md says how pages are grouped; it is the navigation of the site too. All of this needs no generator,
so that tests can check it without one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from docs.generator.reference import api, command_line

ROOT = Path(__file__).parents[2]
INDEX, PICTURES = "docs/index.md", "docs/pictures"
REFERENCE = {"reference/api.md": api, "reference/commands.md": command_line}

_LINK = re.compile(r"\]\(([^()\s]*)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\| ([^|]+) \| (\[.*) \|$", re.MULTILINE)


class BrokenLinkError(ValueError):
    """A link of a page of the site to a file that is no page of it."""


def groups() -> dict[str, list[str]]:
    """Return the pages that README.md lists, by what a reader wants: paths in the repository."""
    table = (ROOT / "README.md").read_text("utf-8").partition("## Documentation\n")[2].partition("\n## ")[0]
    return {want: _LINK.findall(links) for want, links in _ROW.findall(table)}


def addresses() -> dict[str, str]:
    """Return the path of each page in the site, by its path in the repository. The README's is that of the index."""
    pages = [INDEX, *(page for group in groups().values() for page in group)]
    return {page: _address(page) for page in pages} | {"README.md": _address(INDEX)}


def _address(page: str) -> str:
    """Return the path in the site of a page or picture."""
    if page.startswith("docs/"):
        return page.removeprefix("docs/")
    return page.removesuffix("/README.md").removesuffix(".md").lower() + ".md"


def adapted(text: str, page: str, found: dict[str, str]) -> str:
    """Return the text of a page with its links to other pages as they are in the site. Raises BrokenLinkError."""

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or "://" in target:
            return match[0]
        path = os.path.normpath(Path(page).parent / target)
        if path.startswith(f"{PICTURES}/") and (ROOT / path).is_file():
            return f"]({os.path.relpath(_address(path), Path(found[page]).parent)})"
        if path not in found:
            raise BrokenLinkError(f"{page}: {match[1]} is no page of the site: list it in README.md, or do not link it")
        relative = os.path.relpath(found[path], Path(found[page]).parent)
        return f"]({relative}#{anchor})" if anchor else f"]({relative})"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def contents() -> str:
    """Return the navigation, as directives for the end of the index page."""
    found = addresses()
    listed = {want: [found[page] for page in pages] for want, pages in groups().items()}
    first, *others = listed
    ordered = {first: listed[first], "look up a name or an option": list(REFERENCE)}
    ordered |= {want: listed[want] for want in others}
    trees = []
    for want, pages in ordered.items():
        names = "\n".join(f"/{page.removesuffix('.md')}" for page in pages)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {want[:1].upper()}{want[1:]}\n\n{names}\n```\n")
    return "\n".join(trees)


def collect(folder: Path) -> None:
    """Write all pages and pictures of the site into a folder."""
    shutil.copytree(ROOT / PICTURES, folder / _address(PICTURES))
    found = addresses()
    made = {address: generate() for address, generate in REFERENCE.items()}
    for page, address in found.items():
        if page != "README.md":
            made[address] = adapted((ROOT / page).read_text("utf-8"), page, found)
    made[found[INDEX]] += "\n" + contents()
    for address, text in made.items():
        (folder / address).parent.mkdir(parents=True, exist_ok=True)
        (folder / address).write_text(text, "utf-8")
