"""What was pinned by names, found in a folded graph: where stages begin, what is not to be cut, what tp leaves whole.

    module             the ops that a module's path made, its children's included; dotted, as in `named_modules()`
    begins segment k   its first op is there, and before it only ops of modules that hold it
    uncut              segment k may begin no stage: a module that is to stay whole has ops in segments k - 1 and k

Pins of cuts leave one way to cut, those of modules fewer places to cut at. Both only take plans away, so that bounds of
all cuts stay bounds.
"""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoptd.errors import PlanError, nearest
from autoptd.fold_names import fold_names
from autoptd.passes.fold import Folded
from autoptd.passes.graph import module_path
from autoptd.search.constraints.options import Constraints, Method
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.partition import even_cuts

_SHOWN = 300  # characters of names that an error lists


@dataclass(frozen=True)
class NamedConstraints:
    """`starts`, `uncut`: as in `options.Method`; `whole`: parameters that tp does not split; `modules`: theirs."""

    starts: tuple[int, ...] = ()
    uncut: frozenset[int] = frozenset()
    whole: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()

    def keeps(self, node: fx.Node) -> bool:
        """Whether an op belongs to a module that is to stay whole."""
        return not self.modules.isdisjoint(_holders(module_path(node)))

    def on(self, method: Method) -> Method:
        """A method with what is pinned of its stages."""
        return replace(method, starts=self.starts, uncut=self.uncut)


def read_named(folded: Folded, constraints: Constraints) -> NamedConstraints:
    """Raises PlanError for names that the model does not have, and for cuts that cannot be."""
    _check_splits(folded, constraints.splits)
    if not constraints.cuts and not constraints.whole:
        return NamedConstraints()
    modules = Modules(folded)
    kept = [name for pattern in constraints.whole for name in modules.called(pattern)]
    starts = tuple(modules.starts(constraints.cuts))
    pins = NamedConstraints(starts, modules.inside(kept), modules.parameters(kept), frozenset(kept))
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
            inside = next(m for m in kept if start in modules.inside([m]))
            raise PlanError(
                f"a stage that begins with {name!r} cuts {inside!r}, which is to stay whole",
                where="fix['cuts']",
                fix=f"cut elsewhere, or leave {inside!r} out of fix['whole']",
            )
    return pins


def allowed(folded: Folded, method: Method, found: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates whose stages can be as pinned. Raises PlanError where none can."""
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


def _reason(folded: Folded, method: Method, count: int) -> PlanError | None:
    """Why so many stages cannot be as pinned."""
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
                f"{count} even stages begin inside of what is to stay whole: {split[0]!r}",
                where="fix['whole']",
                fix="leave stages='even' out, or keep less whole",
            )
    elif count > len(folded.segments) - len(method.uncut):
        return PlanError(
            f"{count} stages are more than the {len(folded.segments) - len(method.uncut)} pieces that are left to cut",
            where="fix['whole']",
            fix="keep less whole, or use fewer stages",
        )
    return None


def _check_splits(folded: Folded, splits: Mapping[str, str]) -> None:
    names, aliases = folded.traced.parameters.values(), folded.traced.aliases
    for pattern in splits:
        if _matching(pattern, names):
            continue
        where = f"fix['splits'][{pattern!r}]"
        if tied := _matching(pattern, aliases):
            meant = aliases[tied[0]]
            raise PlanError(f"{tied[0]} is tied to {meant}", where=where, fix=f"name it {meant!r}: both lie alike")
        raise _unknown(f"no parameter is called {pattern!r}", where, pattern, names)


class Modules:
    """Where the modules of a folded graph lie."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded

    @cached_property
    def segments(self) -> Mapping[str, frozenset[int]]:
        """Path of every module that computes something -> the segments it has ops in."""
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
        """The segments that these modules begin, in order. Raises PlanError."""
        last, before = 0, ""
        for position, name in enumerate(cuts):
            where = f"fix['cuts'][{position}]"
            if name not in self.begins:
                raise self._not_a_cut(name, where)
            start = self.begins[name]
            if start == 0:
                raise PlanError(
                    f"the model begins with {name!r}, and so does the first stage",
                    where=where,
                    fix="leave it out: name where the second stage begins, and those after it",
                )
            if start == last:
                raise PlanError(
                    f"{before!r} and {name!r} begin the same stage", where=where, fix="leave one of them out"
                )
            if start < last:
                ordered = sorted(dict.fromkeys(n for n in cuts if n in self.begins), key=self.begins.__getitem__)
                text = textwrap.shorten(", ".join(map(repr, ordered)), _SHOWN, placeholder=" …")
                raise PlanError(
                    f"{name!r} comes before {before!r} in the model", where=where, fix=f"name them in its order: {text}"
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
            for i, word in ((inside, "before"), (inside + 1, "behind"))
            if i in self._shortest
        ]
        return PlanError(
            f"no stage can begin with {name!r}: it begins inside of {self.folded.segments[inside].name!r}, "
            "which is not cut",
            where=where,
            fix=", or ".join(fixes) or "leave it out",
        )

    @cached_property
    def _shortest(self) -> Mapping[int, str]:
        """Segment that may begin a stage -> the shortest name for that."""
        found: dict[int, str] = {}
        for name in sorted(self.begins, key=lambda n: (len(n), n)):
            if self.begins[name]:
                found.setdefault(self.begins[name], name)
        return dict(sorted(found.items()))

    def called(self, pattern: str) -> list[str]:
        """Modules that a pattern names. Raises PlanError where there is none."""
        names = dict.fromkeys([*self.segments, *self._owners])
        found = _matching(pattern, names)
        if not found:
            raise _unknown(f"no module is called {pattern!r}", "fix['whole']", pattern, names)
        return found

    @cached_property
    def _owners(self) -> Mapping[str, list[str]]:
        """Module -> the parameters in it, tied ones under the name that the graph has for them."""
        traced = self.folded.traced
        found: dict[str, list[str]] = {}
        names = {name: name for name in traced.parameters.values()}
        for name, meant in {**traced.aliases, **names}.items():
            for holder in _holders(name.rpartition(".")[0]):
                found.setdefault(holder, []).append(meant)
        return found

    def inside(self, names: Iterable[str]) -> frozenset[int]:
        """Segments that no stage may begin with, if these modules are to stay whole."""
        return frozenset(i for n in names for i in self.segments.get(n, frozenset()) if i - 1 in self.segments[n])

    def parameters(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these modules."""
        return tuple(sorted({p for name in names for p in self._owners.get(name, ())}))


def _holders(path: str) -> Iterator[str]:
    """`a.b.c` -> a, a.b, a.b.c: a module and all that hold it, but the model."""
    parts = path.split(".") if path else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    matches = re.compile(fnmatch.translate(pattern)).match
    return [name for name in names if matches(name)]


_LAYERS = re.compile(r"(?<=\.)\d+(?=\.|$)")  # numbers that name repetitions


def _unknown(what: str, where: str, name: str, known: Iterable[str]) -> PlanError:
    """With the nearest names, layers named once for all where the name does not say which."""
    names = list(known)
    close = nearest(name, names).partition("known: ")[0] if _LAYERS.search(name) else ""
    if not close:
        close = nearest(_LAYERS.sub("*", name), {_LAYERS.sub("*", n) for n in names}).partition("known: ")[0]
    listed = textwrap.shorten(", ".join(fold_names(names)), _SHOWN, placeholder=" …")
    return PlanError(what, where=where, fix=f"{close}known: {listed}")


def pin_notes(folded: Folded, constraints: Constraints, tp: int) -> list[str]:
    """What a reader of a plan should know of pins that no other part of it shows."""
    notes = []
    if constraints.method.headroom:
        notes.append(f"{100 * constraints.method.headroom:.4g} % of each device's memory is left free (headroom)")
    if constraints.max_tp is not None:
        notes.append(f"no tp above {constraints.max_tp} was considered (max_tp)")
    if constraints.cuts:
        notes.append(f"stages cut by hand, at {', '.join(constraints.cuts)}")
    if constraints.whole:
        notes.append(f"kept whole, by tp and by stages: {', '.join(constraints.whole)}")
    named = {n for p in constraints.splits for n in _matching(p, folded.traced.parameters.values())}
    named |= set(read_named(folded, constraints).whole)
    if tp > 1 and (shared := _alike(folded, named)):
        listed = textwrap.shorten(", ".join(fold_names(shared)), _SHOWN, placeholder=" …")
        notes.append(f"equal layers lie alike, so that what was pinned holds for these as well: {listed}")
    return notes


def _alike(folded: Folded, named: set[str]) -> list[str]:
    """Parameters that lie as others do which were named, being in the same place of an equal segment."""
    slots: dict[tuple[str, int], list[str]] = {}
    for segment in folded.segments:
        for i, node in enumerate(segment.parameters):
            slots.setdefault((segment.kind, i), []).append(folded.traced.parameters[node.name])
    groups = [names for names in slots.values() if not named.isdisjoint(names)]
    return list(dict.fromkeys(n for names in groups for n in names if n not in named))
