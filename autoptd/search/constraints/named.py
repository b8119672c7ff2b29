"""Resolve constraints by name in a folded graph: the first segments of stages, and modules that are not split or cut.

    module             a dotted path as in `named_modules()`: the ops of the module and of its children
    begins segment k   the module's first op is in segment k, preceded there only by ops of modules that contain it
    uncut              segments that no stage may begin with: a `whole` module has ops in segments k - 1 and k

`cuts` leaves one possible cut, `whole` leaves fewer. Both only remove plans, so lower bounds over all cuts still hold.
"""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoptd.errors import PlanError, nearest
from autoptd.passes.fold import Folded
from autoptd.passes.graph import module_path
from autoptd.passes.layer_stack import layer_stack
from autoptd.passes.sharding.megatron_splits import MEGATRON, megatron_splits
from autoptd.search.constraints.options import Constraints, SearchOptions
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.partition import even_cuts
from autoptd.text import fold_names

_SHOWN = 300  # characters of names that an error lists


@dataclass(frozen=True)
class NamedConstraints:
    """Resolved constraints by name.

    `starts`, `uncut`: as in `options.SearchOptions`; `modules`: those that stay whole; `whole`: their parameters.
    """

    starts: tuple[int, ...] = ()
    uncut: frozenset[int] = frozenset()
    whole: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()

    def keeps(self, node: fx.Node) -> bool:
        """Return whether an op belongs to a module that stays whole."""
        return not self.modules.isdisjoint(_holders(module_path(node)))

    def on(self, method: SearchOptions) -> SearchOptions:
        """Return `method` with the constraints on its stages."""
        return replace(method, starts=self.starts, uncut=self.uncut)


def read_named(folded: Folded, constraints: Constraints) -> NamedConstraints:
    """Resolve the names. Raises PlanError for names that the model does not have and for impossible cuts."""
    _check_splits(folded, constraints.splits)
    if MEGATRON in constraints.splits.values():
        with _of_system(constraints, "splits"):
            megatron_splits(folded)  # raises PlanError for a model that Megatron-LM could not split
    layered = frozenset[int]()
    if constraints.method.stages == "layers":
        with _of_system(constraints, "stages"):
            layered = _inside_layers(folded)
    if not constraints.cuts and not constraints.whole:
        return NamedConstraints(uncut=layered)
    modules = Modules(folded)
    whole = [name for pattern in constraints.whole for name in modules.called(pattern)]
    starts = tuple(modules.starts(constraints.cuts))
    pins = NamedConstraints(starts, modules.inside(whole) | layered, modules.parameters(whole), frozenset(whole))
    for pattern, placement in constraints.splits.items():
        both = _matching(pattern, pins.whole)
        if both and placement.startswith("S"):
            raise PlanError(
                f"{both[0]} cannot be split as {placement} and stay whole",
                where=f"fix['splits'][{pattern!r}], fix['whole']",
                fix="leave one of them out, or name fewer modules in fix['whole']",
            )
    for name, start in zip(constraints.cuts, starts, strict=True):
        if start in pins.uncut:
            inside = next((m for m in whole if start in modules.inside([m])), "")
            if not inside:
                raise PlanError(
                    f"a stage that begins with {name!r} cuts a layer",
                    where="fix['cuts'], fix['stages']",
                    fix="cut between layers, or leave stages='layers' out",
                )
            raise PlanError(
                f"a stage that begins with {name!r} cuts {inside!r}, which must stay whole",
                where="fix['cuts']",
                fix=f"cut elsewhere, or leave {inside!r} out of fix['whole']",
            )
    return pins


def allowed(folded: Folded, method: SearchOptions, found: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the candidates that have a cut within the constraints. Raises PlanError if none has."""
    if not method.starts and not method.uncut and method.stages != "even":
        return found
    reasons: dict[int, PlanError | None] = {}
    kept = []
    for c in found:
        count = c.pp * c.virtual
        if count not in reasons:
            reasons[count] = _reason(folded, method, count)
        if reasons[count] is None:
            kept.append(c)
    if kept:
        return kept
    if method.starts:
        possible = ", ".join(map(str, sorted(reasons)))
        raise PlanError(
            f"cuts at {len(method.starts)} of its modules make {len(method.starts) + 1} stages of the model, "
            f"but pp × virtual can only be {possible}",
            where="fix['cuts']",
            fix="name one module fewer than there are stages, or use another world or pp",
        )
    error = reasons[min(reasons)]
    assert error is not None
    raise error


def _reason(folded: Folded, method: SearchOptions, count: int) -> PlanError | None:
    """Return the error if no cut into `count` stages meets the constraints."""
    if method.starts:
        wrong = count != len(method.starts) + 1
        return PlanError(f"{count} stages, {len(method.starts)} cuts", where="fix['cuts']") if wrong else None
    if method.stages == "even":
        try:
            cuts = even_cuts(folded, count)
        except PlanError as error:
            return error
        if split := [folded.segments[first].name for first, _ in cuts if first in method.uncut]:
            return PlanError(
                f"{count} even stages cut a module that must stay whole, at {split[0]!r}",
                where="fix['whole']",
                fix="leave stages='even' out, or keep less whole",
            )
    elif count > len(folded.segments) - len(method.uncut):
        layers = method.stages == "layers"
        return PlanError(
            f"{count} stages are more than the {len(folded.segments) - len(method.uncut)} pieces left to cut",
            where="fix['stages']" if layers else "fix['whole']",
            fix=f"{'cut inside layers' if layers else 'keep less whole'}, or use fewer stages",
        )
    return None


def _inside_layers(folded: Folded) -> frozenset[int]:
    """Return the segments that continue a layer, or what is before or after all layers."""
    names = [segment.name for segment in folded.segments]
    return layer_stack(names, "the model", "fix['stages']", "leave out stages='layers'").inside


@contextmanager
def _of_system(constraints: Constraints, name: str) -> Iterator[None]:
    """Replace the way out of an error about a choice that is not the user's, but that of the system in `as_`."""
    try:
        yield
    except PlanError as error:
        if constraints.given is None or name in constraints.given:
            raise
        where = "as_" if error.where == f"fix[{name!r}]" else error.where
        raise PlanError(
            error.what, where=where, fix=f"leave as_ out: such a model has no plans as {constraints.system}"
        ) from error


def _check_splits(folded: Folded, splits: Mapping[str, str]) -> None:
    names, aliases = folded.traced.parameters.values(), folded.traced.aliases
    for pattern in splits:
        if _matching(pattern, names):
            continue
        where = f"fix['splits'][{pattern!r}]"
        if tied := _matching(pattern, aliases):
            meant = aliases[tied[0]]
            raise PlanError(f"{tied[0]} is tied to {meant}", where=where, fix=f"name {meant!r}: they share a placement")
        raise _unknown(f"no parameter is called {pattern!r}", where, pattern, names)


class Modules:
    """The modules of a folded graph, with their segments and parameters."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded

    @cached_property
    def segments(self) -> Mapping[str, frozenset[int]]:
        """Path of every module with ops -> the segments of these."""
        found: dict[str, set[int]] = {}
        for segment in self.folded.segments:
            for path in dict.fromkeys(module_path(node) for node in segment.nodes):
                for holder in _holders(path):
                    found.setdefault(holder, set()).add(segment.index)
        return {name: frozenset(indices) for name, indices in found.items()}

    @cached_property
    def begins(self) -> Mapping[str, int]:
        """Module, or name of a segment -> the segment that it begins."""
        found: dict[str, int] = {}
        seen: set[str] = set()
        for segment in self.folded.segments:
            before: set[str] = set()  # paths of this segment's ops up to here
            for node in segment.nodes:
                path = module_path(node)
                for name in _holders(path):
                    if name not in seen and before <= {"", *_holders(name.rpartition(".")[0])}:
                        found[name] = segment.index
                    seen.add(name)
                before.add(path)
        for segment in self.folded.segments:
            found.setdefault(segment.name, segment.index)
        return found

    def starts(self, cuts: Sequence[str]) -> Iterator[int]:
        """Yield the segment that each of these modules begins. Raises PlanError for an unknown name or wrong order."""
        last, before = 0, ""
        for position, name in enumerate(cuts):
            where = f"fix['cuts'][{position}]"
            if name not in self.begins:
                raise self._not_a_cut(name, where)
            start = self.begins[name]
            if start == 0:
                raise PlanError(
                    f"the first stage always begins with {name!r}, as the model does",
                    where=where,
                    fix="leave it out: cuts name the first modules of the second stage and of those after it",
                )
            if start == last:
                raise PlanError(
                    f"{before!r} and {name!r} begin the same stage", where=where, fix="leave one of them out"
                )
            if start < last:
                ordered = sorted(dict.fromkeys(n for n in cuts if n in self.begins), key=self.begins.__getitem__)
                text = textwrap.shorten(", ".join(map(repr, ordered)), _SHOWN, placeholder=" …")
                raise PlanError(
                    f"{name!r} comes before {before!r} in the model", where=where, fix=f"use the model's order: {text}"
                )
            last, before = start, name
            yield start

    def _not_a_cut(self, name: str, where: str) -> PlanError:
        places = self.segments.get(name)
        if places is None:
            return _unknown(f"no module is called {name!r}", where, name, self._shortest.values())
        inside = min(places)
        fixes = [
            f"cut {word} it, at {self._shortest[i]!r}"
            for i, word in ((inside, "before"), (inside + 1, "after"))
            if i in self._shortest
        ]
        return PlanError(
            f"no stage can begin with {name!r}: it begins inside {self.folded.segments[inside].name!r}, "
            "which cannot be cut",
            where=where,
            fix=", or ".join(fixes) or "leave it out",
        )

    @cached_property
    def _shortest(self) -> Mapping[int, str]:
        """Segment that may begin a stage -> the shortest name of a module that begins it."""
        found: dict[int, str] = {}
        for name in sorted(self.begins, key=lambda n: (len(n), n)):
            if self.begins[name]:
                found.setdefault(self.begins[name], name)
        return dict(sorted(found.items()))

    def called(self, pattern: str) -> list[str]:
        """Return the modules that match a pattern. Raises PlanError if none does."""
        names = dict.fromkeys([*self.segments, *self._owners])
        found = _matching(pattern, names)
        if not found:
            raise _unknown(f"no module is called {pattern!r}", "fix['whole']", pattern, names)
        return found

    @cached_property
    def _owners(self) -> Mapping[str, list[str]]:
        """Module -> the parameters in it, tied ones by their name in the graph."""
        traced = self.folded.traced
        found: dict[str, list[str]] = {}
        names = {name: name for name in traced.parameters.values()}
        for name, meant in {**traced.aliases, **names}.items():
            for holder in _holders(name.rpartition(".")[0]):
                found.setdefault(holder, []).append(meant)
        return found

    def inside(self, names: Iterable[str]) -> frozenset[int]:
        """Return the segments that no stage may begin with if these modules must stay whole."""
        return frozenset(i for n in names for i in self.segments.get(n, frozenset()) if i - 1 in self.segments[n])

    def parameters(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the parameters of these modules, sorted by name."""
        return tuple(sorted({p for name in names for p in self._owners.get(name, ())}))


def _holders(path: str) -> Iterator[str]:
    """Return `a`, `a.b`, `a.b.c` for `a.b.c`: a module and those that contain it, except the model."""
    parts = path.split(".") if path else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    matches = re.compile(fnmatch.translate(pattern)).match
    return [name for name in names if matches(name)]


_LAYERS = re.compile(r"(?<=\.)\d+(?=\.|$)")  # layer numbers in a name


def _unknown(what: str, where: str, name: str, known: Iterable[str]) -> PlanError:
    """Return the error for an unknown name, with the nearest names; layers are folded unless `name` has a number."""
    names = list(known)
    close = nearest(name, names).partition("known: ")[0] if _LAYERS.search(name) else ""
    if not close:
        close = nearest(_LAYERS.sub("*", name), {_LAYERS.sub("*", n) for n in names}).partition("known: ")[0]
    listed = textwrap.shorten(", ".join(fold_names(names)), _SHOWN, placeholder=" …")
    return PlanError(what, where=where, fix=f"{close}known: {listed}")


def pin_notes(folded: Folded, constraints: Constraints, tp: int) -> list[str]:
    """Return the plan's notes on constraints that no other part of the plan shows."""
    notes = []
    if "headroom" in constraints.fixed and constraints.method.headroom:
        notes.append(f"{100 * constraints.method.headroom:.4g} % of each device's memory is left free (headroom)")
    if constraints.max_tp is not None:
        notes.append(f"no tp above {constraints.max_tp} was considered (max_tp)")
    if constraints.cuts:
        notes.append(f"stages cut by hand, at {', '.join(constraints.cuts)}")
    if constraints.whole:
        notes.append(f"kept whole, not split by tp or cut by stages: {', '.join(constraints.whole)}")
    named = {n for p in constraints.splits for n in _matching(p, folded.traced.parameters.values())}
    named |= set(read_named(folded, constraints).whole)
    if tp > 1 and (shared := _alike(folded, named)):
        listed = textwrap.shorten(", ".join(fold_names(shared)), _SHOWN, placeholder=" …")
        notes.append(f"equal layers share their placements, so the constraints also apply to: {listed}")
    return notes


def _alike(folded: Folded, named: set[str]) -> list[str]:
    """Return the unnamed parameters that share a placement with named ones: same position, equal segment."""
    slots: dict[tuple[str, int], list[str]] = {}
    for segment in folded.segments:
        for i, node in enumerate(segment.parameters):
            slots.setdefault((segment.kind, i), []).append(folded.traced.parameters[node.name])
    groups = [names for names in slots.values() if not named.isdisjoint(names)]
    return list(dict.fromkeys(n for names in groups for n in names if n not in named))
