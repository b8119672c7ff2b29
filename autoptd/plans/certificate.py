"""The certificate of a verified plan: made by `autoptd verify`, checked whenever a plan file is run or emitted.

A plan that was changed since, or that now yields another program, is refused, because its certificate is false. Another
version of autoptd or torch causes a warning: the program is the same, but it was not verified with this version.
Digests detect accidental changes. Only a signature proves who made a certificate (`autoptd.plans.signing`); it is
checked if a public key is given.
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
from autoptd.text import printable


class UnverifiedWarning(UserWarning):
    """A plan with a certificate runs on other versions of autoptd or torch than it was verified with."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that turn a plan into a running program."""
    return {name: version(name) for name in ("autoptd", "torch")}


def program_digest(program: Program) -> str:
    """Return the digest of the emitted files without plan.json."""
    files = sorted((name, text) for name, text in program.files.items() if name != "plan.json")
    return f"sha256:{hashlib.sha256(chr(0).join(part for file in files for part in file).encode()).hexdigest()}"


def recheck(plan: Plan, program: Program, signed_by: Path | None = None) -> None:
    """Check a plan and its program against the plan's certificate, if any; warn if other versions made it.

    signed_by: file of the public key that must have signed it. Raises PlanFileError, SigningError.
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
            f"the plan yields another program than the verified one: {now}, but its certificate has {held.program}"
            + "".join(f"; it was verified with {text}" for text in others),
            where="certificate.program",
            fix="verify it again (autoptd verify PLAN), or remove the field `certificate`",
        )
    if others:
        found = printable("; ".join(others), keep="")
        warnings.warn(
            f"the plan was verified with {found}: verify it again (autoptd verify PLAN)",
            UnverifiedWarning,
            stacklevel=3,
        )
