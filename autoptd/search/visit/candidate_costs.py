"""The costs of the candidates of a task: their splits, stages and bounds, worked out on demand and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from autoptd.errors import AutoptdError, PlanError
from autoptd.search.constraints.named import read_named
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.block_cost import BlockCosts
from autoptd.search.pipeline.lower_bounds import CandidateBounds
from autoptd.search.pipeline.stages import Stages
from autoptd.search.sharding.cache import ShardingCache
from autoptd.search.sharding.solve import Splitter
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.task import Task, candidate_space
from autoptd.search.variants import Variants

Alike = Callable[[Candidate], Sequence[Candidate]]  # of a candidate, those that differ in their microbatch only


class CandidateCosts:
    """The costs of the candidates of one task."""

    def __init__(self, task: Task, known: ShardingCache) -> None:
        """`known`: what was worked out about the graph, which serves further tasks of it."""
        self.task, self.known = task, known
        named = read_named(task.folded, task.constraints)
        self.method = named.on(task.constraints.method)
        self.memory = MemoryFilter(task.folded, task.cluster, task.precision, task.optimizer, self.method.headroom)
        self.splitter = Splitter(task, known, named, self.method)
        self.bounds = CandidateBounds(task, known, self.method, self.memory)
        self.variants = Variants(task, self.memory)
        self._whole: dict[Hashable, Sequence[Sharded]] = {}
        self._blocks: dict[Hashable, dict[int, BlockCosts]] = {}

    def candidates(self) -> Sequence[Candidate]:
        """Return every candidate that the constraints leave open, with the fastest splits.

        A tp that cannot split the heads of attention is left out, unless no mesh of the world has another. Raises
        PlanError where the constraints leave nothing else.
        """
        found = self._space(self.task)
        whole = {tp: self.splitter.whole_attention(tp) for tp in {c.tp for c in found}}
        split = [c for c in found if whole[c.tp] is None]
        tp, node = next(((tp, node) for tp, node in sorted(whole.items()) if node is not None), (1, None))
        if split or node is None:
            return split
        free = replace(self.task, constraints=replace(self.task.constraints, mesh={}))
        if any(self.splitter.whole_attention(tp) is None for tp in {c.tp for c in self._space(free)}):
            raise self.splitter.heads_error(tp, node)
        return found

    def _space(self, task: Task) -> Sequence[Candidate]:
        return candidate_space(task, self.method, self.known.facts.has_attention)

    def solved(self, c: Candidate, alike: Alike | None = None) -> Sharded | AutoptdError:
        """Return the split tensors of a candidate, or why they cannot be split.

        `alike`: those whose tensors are split with its own. Raises errors that concern every candidate."""
        if (error := self._context_error(c)) is not None:
            return error
        if (key := self.splitter.key_of(c)) not in self.splitter.sharded:
            self.splitter.solve_between((c,) if alike is None else alike(c))
        return self.splitter.sharded[key]

    def _context_error(self, c: Candidate) -> PlanError | None:
        """Return why the runtime does not split tokens or experts so; None if they are fixed, for a prediction."""
        contexts, fixed = self.splitter.contexts, self.task.constraints.fixed
        errors = [self.splitter.context_error(c, context, c.ep) for context in contexts]
        if not all(errors):
            return None
        alone = "ep" in fixed or all(self.splitter.context_error(c, context, 1) for context in contexts)
        return None if "cp" in fixed and alone else errors[0]

    def refusal(self) -> AutoptdError:
        """Return why no candidate can be split as asked."""
        return next(filter(None, map(self._context_error, self.candidates())), None) or self.splitter.refusal()

    def on_one_rank(self, c: Candidate, alike: Alike) -> Sequence[Sharded]:
        """Return the model's work for a candidate's microbatch if one rank of its tp axis did all of it, in each
        context that may be; nothing if it cannot be known."""
        if (key := (c.micro, c.cp, c.ep, c.etp)) not in self._whole:
            alone = c._replace(tp=1, memory_saving=False)
            known = isinstance(self.solved(alone, alike), Sharded)
            self._whole[key] = self.splitter.in_every_context(alone) if known else ()
        return self._whole[key]

    def tensors(self, c: Candidate) -> Tensors:
        """Return the tensor-level problem of a candidate whose tensors are split."""
        return self.splitter.tensors[self.splitter.key_of(c)]

    def stages(self, c: Candidate) -> Stages:
        """Return the stage-level problem of a candidate whose tensors are split."""
        task, key = self.task, self.splitter.key_of(c)
        sharded = self.splitter.sharded[key]
        assert isinstance(sharded, Sharded)
        chosen = {name: getattr(c, name) for name in ("cp", "ep", "etp", "schedule", "virtual", "shards")}
        blocks = self._blocks.setdefault((key, c.ep, c.etp, c.recompute), {})
        chosen |= {"context": sharded.context} if c.cp > 1 else {}
        method = replace(self.method, **chosen)
        return Stages(self.tensors(c), sharded, c, method, task.precision, task.optimizer, task.cluster, blocks)
