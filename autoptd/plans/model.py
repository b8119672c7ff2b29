"""`Plan`, the public class: `PlanData` with consistency checks, loading, saving and explanations."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError, model_validator

from autoptd.cost_models.complaints import parse_json, read_text
from autoptd.errors import PlanFileError
from autoptd.explain.compare import compare
from autoptd.explain.costs import AS_STATED, CostQuestion, TrainingCost
from autoptd.explain.plan import brief, explain
from autoptd.outputs import write_whole
from autoptd.plans.checks import Inconsistent, faults
from autoptd.plans.data import PlanData
from autoptd.plans.files import REMAKE, check_head, mistakes, refusal, unique_keys
from autoptd.report.page import framed, plan_page


class ChangedPlanWarning(UserWarning):
    """A plan file has other choices than those that its times and memory were predicted for."""


class Plan(PlanData):
    """All choices for training one model on one cluster. Raises pydantic's ValidationError if fields contradict."""

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if found := list(faults(self)):
            raise Inconsistent(found)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file atomically. Raises PlanFileError if it cannot be written."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanFileError naming the file, the fields and what would be right."""
        return cls.from_json(read_text(Path(path), "plan", PlanFileError, REMAKE), where=str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Plan:
        """Parse the output of `to_json`. `where`: the text's origin, for errors and warnings.

        Raises PlanFileError. Warns (ChangedPlanWarning) of a plan whose choices were changed after it was predicted.
        """
        check_head(parse_json(text, "plan", PlanFileError, where, REMAKE, unique_keys), where)
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            raise refusal(*mistakes(error), where) from None  # the message holds all of the error
        if found.was_changed:
            what = f"the plan {where}".rstrip() + " was changed since it was predicted: its times and memory are of"
            fix = "to have these predicted, plan again with fix= (--fix)"
            warnings.warn(f"{what} other choices; {fix}", ChangedPlanWarning, stacklevel=2)
        return found

    def explain(self, all: bool = False) -> str:
        """Return the plan as text, 100 columns wide; with `all`, every tensor and op as well."""
        return explain(self, all=all)

    def cost(
        self,
        *,
        tokens: float | None = None,
        samples: float | None = None,
        price_per_hour: float | None = None,
        currency: str | None = None,
    ) -> TrainingCost:
        """Return the cost of a step, of a billion tokens (or samples), and of a run of `tokens` or `samples`.

        price_per_hour: of one device, in `currency`; default: those of the cluster. Raises PlanError.
        """
        return CostQuestion(price_per_hour, currency, tokens, samples).of(self)

    def compare(self, other: Plan) -> str:
        """Return a text that compares this plan with another, term by term."""
        return compare(self, other)

    def to_html(
        self,
        reasons: Mapping[str, str] | None = None,
        costs: CostQuestion = AS_STATED,
        constraints: Sequence[tuple[str, str, str, str]] = (),
    ) -> str:
        """Return the report of this plan: one HTML page that asks for nothing else.

        reasons: parameter -> why it is placed as it is, from `answers.op_alternatives.parameter_reasons`. costs: a
        price, and the length of a run, as `cost` takes them. constraints: what each costs, from
        `answers.constraint_costs.pin_rows`."""
        return plan_page(self, reasons, costs, constraints)

    def __repr__(self) -> str:
        return f"<Plan {brief(self)}>"

    __str__ = __repr__  # pydantic's has every field

    def _repr_html_(self) -> str:
        return framed(self.to_html())
