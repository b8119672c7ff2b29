"""The plan as a user meets it: `PlanData` that is consistent, is read from and saved to files, and shows itself."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError, model_validator

from autoptd.cost_models.complaints import parse_json, read_text
from autoptd.errors import PlanFileError
from autoptd.explain.compare import compare
from autoptd.explain.plan import explain, explain_html
from autoptd.outputs import write_whole
from autoptd.plans.checks import Inconsistent, faults
from autoptd.plans.data import PlanData
from autoptd.plans.files import REMAKE, check_head, mistakes, no_twins, refusal


class Plan(PlanData):
    """All choices for training one model on one cluster. Raises pydantic's ValidationError when built inconsistent."""

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if found := list(faults(self)):
            raise Inconsistent(found)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan whole or not at all. Raises PlanFileError where that cannot be done."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanFileError naming the file, the field and what would be right."""
        return cls.from_json(read_text(Path(path), "plan", PlanFileError, REMAKE), where=str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Plan:
        """Read back what `to_json` wrote. Raises PlanFileError; `where` names the text's origin."""
        check_head(parse_json(text, "plan", PlanFileError, where, REMAKE, no_twins), where)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise refusal(*mistakes(error), where) from None  # which tells all of it

    def explain(self, all: bool = False) -> str:
        """The plan as text, 100 columns wide; with `all`, every tensor and op as well."""
        return explain(self, all=all)

    def compare(self, other: Plan) -> str:
        """This plan beside another, term by term."""
        return compare(self, other)

    def _repr_html_(self) -> str:
        return explain_html(self)
