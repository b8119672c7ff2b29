"""The certificate of a verified plan: made by `autoptd verify`, looked at whenever a plan file is run.

A plan that was changed since is refused: its certificate says something that is not so. Another version of autoptd or
torch, or another emitted program, is a warning: the plan is what it was, but nobody has verified what it is run by.
"""

from __future__ import annotations

import hashlib
import warnings
from importlib.metadata import version

from autoptd.codegen.emit import Program
from autoptd.plans import Plan
from autoptd.printable import printable


class UnverifiedWarning(UserWarning):
    """A plan with a certificate is run by something else than what was verified."""


def versions() -> dict[str, str]:
    """Of what turns a plan into a running program."""
    return {name: version(name) for name in ("autoptd", "torch")}


def program_digest(program: Program) -> str:
    """Of the emitted files, the plan among them left out."""
    files = sorted((name, text) for name, text in program.files.items() if name != "plan.json")
    return f"sha256:{hashlib.sha256(chr(0).join(part for file in files for part in file).encode()).hexdigest()}"


def recheck(plan: Plan, program: Program) -> None:
    """Warn where a verified plan is run by another program or other versions. Raises PlanFileError for another plan."""
    plan.check_certificate()
    held = plan.certificate
    if held is None:
        return
    others = [f"{n} {held.versions.get(n)}, this is {v}" for n, v in versions().items() if held.versions.get(n) != v]
    if held.program != program_digest(program):
        others.append("the program that it emitted is another one now")
    if others:
        found = printable("; ".join(others), keep="")
        warnings.warn(
            f"the plan was verified with {found}: verify it again (autoptd verify PLAN)",
            UnverifiedWarning,
            stacklevel=3,
        )
