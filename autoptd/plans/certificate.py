"""The certificate of a verified plan: made by `autoptd verify`, looked at whenever a plan file is run or emitted.

A plan that was changed since is refused, and so is one that now gives another program: its certificate says something
that is not so. Another version of autoptd or torch is a warning: the program is what it was, but nobody has verified
what runs it. Digests tell that nothing was changed by accident; who made a certificate only a signature tells
(`autoptd.plans.signing`), which is checked where a public key is given.
"""

from __future__ import annotations

import hashlib
import warnings
from importlib.metadata import version
from pathlib import Path

from autoptd.codegen.emit import Program
from autoptd.errors import PlanFileError
from autoptd.plans.model import Plan
from autoptd.plans.signing import check_signature
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


def recheck(plan: Plan, program: Program, signed_by: Path | None = None) -> None:
    """Hold a plan and its program to its certificate, if it has one; a warning where other versions made it.

    signed_by: a public key that must have signed it. Raises PlanFileError, SigningError.
    """
    plan.check_certificate()
    if signed_by is not None:
        check_signature(plan.certificate, signed_by)
    held = plan.certificate
    if held is None:
        return
    others = [f"{n} {held.versions.get(n)}, this is {v}" for n, v in versions().items() if held.versions.get(n) != v]
    if held.program != (now := program_digest(program)):
        raise PlanFileError(
            f"the plan gives another program than the one that was verified: {now}, its certificate has {held.program}"
            + "".join(f"; it was verified with {text}" for text in others),
            where="certificate.program",
            fix="verify it again (autoptd verify PLAN), or take the field `certificate` out",
        )
    if others:
        found = printable("; ".join(others), keep="")
        warnings.warn(
            f"the plan was verified with {found}: verify it again (autoptd verify PLAN)",
            UnverifiedWarning,
            stacklevel=3,
        )
