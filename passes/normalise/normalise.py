"""Bring a traced graph into the form that every later pass may assume.

After `normalise`, each node is a placeholder (parameter, buffer, constant, input, or a global loss count), a
functional ATen op or an op of `autoptd.ops.library`; sizes in arguments are ints or sympy expressions of b, s …;
`meta["info"]` holds global shape, dtype and whether a gradient flows; every node contributes to the loss; views are
`reshape` with the whole output shape. Passes run in the order of `PREPARE`, a list for the loss, and `FINISH`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autoptd.errors import TraceError
from autoptd.passes.batch.batch_independence import refuse_mixed_samples
from autoptd.passes.custom_grad.calls import write_own_calls
from autoptd.passes.custom_grad.proof import prove_own
from autoptd.passes.graph import drop_unread, source_line
from autoptd.passes.loops.same_program import drop_unread_constants
from autoptd.passes.loops.write_joined import write_joined_pieces
from autoptd.passes.losses.batch_counts import drop_unread_counts, take_counts_over_batch
from autoptd.passes.losses.batch_statistics import sum_statistics_over_batch
from autoptd.passes.losses.buffer_updates import refuse_reads_of_updates, rewrite_updates, separate_sums
from autoptd.passes.losses.loss_spellings import write_sums_over_samples
from autoptd.passes.losses.reduce_loss import check_loss, rewrite_loss
from autoptd.passes.losses.row_losses import write_row_losses
from autoptd.passes.losses.whole_batch import mark_whole_batch
from autoptd.passes.normalise.annotate import annotate, forget_unreached, note_trained, refuse_untrained
from autoptd.passes.normalise.canonicalize import (
    merge_reshapes,
    write_addmm_as_linear,
    write_bincount_as_sum,
    write_casts_with_their_type,
    write_convolution_padding_as_numbers,
    write_copy_as_source,
    write_equal_bags_as_embedding,
    write_equal_splits_as_chunk,
    write_grouped_mm,
    write_masked_put_as_where,
    write_native_dropout_as_dropout,
    write_slices_of_samples_as_chunk,
    write_starts_of_slices,
    write_sums_by_index,
    write_tile_as_repeat,
    write_views_as_reshape,
)
from autoptd.passes.normalise.drop import drop_asserts, drop_devices, drop_identities, share_repeated
from autoptd.passes.normalise.float_types import refuse_mixed_types, write_frozen_batch_norm_in_one_type
from autoptd.passes.normalise.functionalize import remove_mutation
from autoptd.passes.normalise.inline_regions import inline_regions as _inline
from autoptd.passes.normalise.masks import name_causal_masks
from autoptd.passes.normalise.refuse import refuse_random, refuse_sparse, refuse_sparse_tensors
from autoptd.passes.normalise.scalar_types import settle_scalar_types
from autoptd.passes.normalise.sizes import fold_sizes
from autoptd.passes.random.draws import forget_likes, number_calls, write_random_as_draws
from autoptd.passes.random.drop_path import write_drop_path_as_mask
from autoptd.passes.recognise.grouped_attention import share_copied_keys
from autoptd.passes.recognise.norms import write_norms
from autoptd.passes.rewrites.batch_norm import write_batch_norms_as_sums
from autoptd.passes.rewrites.ctc_labels import write_ctc_labels_by_sample
from autoptd.passes.rewrites.einsums import write_einsums_as_products
from autoptd.passes.rewrites.equal_selections import write_equal_selections
from autoptd.passes.rewrites.expanded import write_broadcasts_as_expand, write_parts_of_expanded
from autoptd.passes.rewrites.masked_rows import follow_masked_rows
from autoptd.passes.rewrites.part_projections import cut_projections
from autoptd.passes.rewrites.placed_rows import write_placed_rows
from autoptd.passes.rewrites.rejoined_rows import write_rejoined_rows
from autoptd.passes.rewrites.row_selections import mark_masked_rows, name_masked_sizes
from autoptd.passes.rewrites.sample_convolutions import write_convolutions_by_sample
from autoptd.passes.rewrites.sparse_sums import write_sparse_sums
from autoptd.passes.rewrites.strided_views import write_strided_views
from autoptd.passes.trace.traced import Traced

Pass = Callable[[fx.Graph, Traced], None]


def normalise(traced: Traced, *, check_each: bool = False) -> Traced:
    """Run every pass over the graph and check the result. Changes `traced.graph` in place.

    With `check_each`, which tests set, the graph is checked after each pass, which takes a third of the time.
    """
    graph = traced.graph.graph
    run_passes(traced, [*PREPARE, *LOSS, *FINISH], check_each=check_each)
    graph.lint()
    _check(graph)
    return traced


def run_passes(traced: Traced, passes: Sequence[Pass], *, check_each: bool = False) -> None:
    """Run some passes over the graph, and remove after each what nothing reads."""
    graph = traced.graph.graph
    for step in passes:
        step(graph, traced)
        drop_unread(graph)
        if check_each:
            graph.lint()


def inline_regions(graph: fx.Graph, traced: Traced) -> None:
    """Replace `with torch.no_grad()` regions by their bodies."""
    _inline(graph, traced.graph, traced.buffers)


def write_own(graph: fx.Graph, traced: Traced) -> None:
    """Write calls of user-defined backward passes with the functions themselves as targets."""
    write_own_calls(graph, traced.own)


def _check(graph: fx.Graph) -> None:
    """Raise TraceError unless every node has the form that later passes assume."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise TraceError(f"{node.op} {node.target} is left in the graph", where=source_line(node))
        assert "info" in node.meta, node.name


PREPARE: list[Pass] = [
    number_calls,
    inline_regions,
    write_own,
    drop_asserts,
    write_sparse_sums,
    write_rejoined_rows,
    write_equal_selections,
    name_masked_sizes,
    fold_sizes,
    drop_asserts,
    refuse_sparse_tensors,
    remove_mutation,
    write_broadcasts_as_expand,
    annotate,
    note_trained,
    drop_devices,
    write_strided_views,
    mark_masked_rows,
    write_batch_norms_as_sums,
    write_native_dropout_as_dropout,
    write_copy_as_source,
    write_placed_rows,
    write_masked_put_as_where,
    write_sums_by_index,
    write_bincount_as_sum,
    write_casts_with_their_type,
    write_tile_as_repeat,
    write_convolution_padding_as_numbers,
    write_convolutions_by_sample,
    write_equal_bags_as_embedding,
    write_starts_of_slices,
    drop_identities,
    write_parts_of_expanded,
    write_views_as_reshape,
    write_joined_pieces,
    write_equal_splits_as_chunk,
    write_slices_of_samples_as_chunk,
    write_addmm_as_linear,
    write_einsums_as_products,
    write_grouped_mm,
    merge_reshapes,
    drop_identities,
    cut_projections,
    write_drop_path_as_mask,
    write_random_as_draws,
    write_frozen_batch_norm_in_one_type,
    refuse_mixed_types,
    name_causal_masks,
    share_copied_keys,
    write_norms,
    prove_own,
    write_ctc_labels_by_sample,
    follow_masked_rows,
    check_loss,
    refuse_sparse,
    refuse_untrained,
]
LOSS: list[Pass] = [
    mark_whole_batch,
    write_sums_over_samples,
    take_counts_over_batch,
    refuse_reads_of_updates,
    refuse_mixed_samples,
    sum_statistics_over_batch,
    rewrite_updates,
    rewrite_loss,
    drop_unread_counts,
    write_row_losses,
]
FINISH: list[Pass] = [
    settle_scalar_types,
    share_repeated,
    separate_sums,
    forget_unreached,
    forget_likes,
    refuse_random,
    drop_unread_constants,
]
