"""Settings and fixtures for every test: hypothesis, sampled grids, worker pools, groups of tests per process."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The speed and load of a machine are no property of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Large grids and long tests: `make test` runs every n-th of their cases (0: none), `make rest` the others, pytest all.
SAMPLED = {
    "benchmarks/test_ablation.py::test_a_line_for_every_switch": 0,
    "benchmarks/test_calibrate.py::test_present_constants_leave_predictions_as_they_are": 0,
    "benchmarks/test_coverage.py::test_a_head_of_each_sort_trains_in_parallel_at_parity": 5,
    "benchmarks/test_gpu.py::test_a_plan_passes": 2,
    "benchmarks/test_gpu.py::test_a_wrong_gradient_is_a_miss": 0,
    "benchmarks/test_gpu.py::test_steps_and_tokens_of_tiny_models": 0,
    "benchmarks/test_hand_tuned.py::test_a_search_of_every_dimension_is_no_slower_than_of_those_that_were_used": 0,
    "benchmarks/test_hand_tuned.py::test_no_plan_tuned_by_hand_is_predicted_faster": 10,
    "benchmarks/test_hand_tuned.py::test_the_command_takes_up_what_is_done": 0,
    "benchmarks/test_mutated.py::test_a_mutated_model_trains_as_on_one_process_or_is_refused": 3,
    "benchmarks/test_published.py::test_mixtures_of_the_sample": 0,
    "benchmarks/test_published.py::test_processes_agree_with_one": 0,
    "checkpoint/test_experts.py::test_experts_of_any_plan_are_read_by_any_other": 0,
    "checkpoint/test_huggingface.py::test_each_rank_reads_its_own_slices": 0,
    "checkpoint/test_huggingface.py::test_in_a_step_and_out_with_equal_logits": 2,
    "checkpoint/test_huggingface.py::test_weights_of_another_model_are_refused": 0,
    "checkpoint/test_killed.py::test_killed_in_a_save": 0,
    "checkpoint/test_optimizers.py::test_another_plan_goes_on": 0,
    "checkpoint/test_pairs.py::test_every_plan_wrote_the_same_tensors": 0,
    "checkpoint/test_pairs.py::test_what_any_plan_wrote_is_read_to_the_bit": 24,
    "checkpoint/test_ranks_agree.py::test_ranks_that_see_different_checkpoints": 0,
    "checkpoint/test_resume.py::test_a_killed_rank_under_torchrun": 0,
    "checkpoint/test_session.py::test_numbers_become_wider_and_never_narrower": 3,
    "checkpoint/test_session.py::test_what_does_not_fit_is_refused_and_changes_nothing": 3,
    "checkpoint/test_updates.py::test_training_goes_on_under_other_plans": 0,
    "codegen/test_run.py::test_stacks": 4,
    "doctor/test_doctor.py::test_two_processes": 0,
    "export/test_torch_ranks.py::test_gradients_are_those_of_one_process": 0,
    "export/test_torch_ranks.py::test_tensors_that_the_plan_splits_are_split": 0,
    "fuzz/test_fuzz.py::test_a_resumed_training_without_its_optimizer_is_seen": 0,
    "fuzz/test_fuzz.py::test_a_wrong_number_of_a_network_is_seen": 0,
    "fuzz/test_fuzz.py::test_corrupted_plans_and_clusters": 0,
    "fuzz/test_fuzz.py::test_random_compiled_networks_train_as_on_one_process_or_are_refused": 0,
    "fuzz/test_fuzz.py::test_random_losses_train_as_on_one_process_or_are_refused": 0,
    "fuzz/test_fuzz.py::test_random_networks_train_as_on_one_process_or_are_refused": 0,
    "fuzz/test_fuzz.py::test_random_programs_train_as_on_one_process_or_are_refused": 0,
    "fuzz/test_fuzz.py::test_random_trainings_end_as_in_one_process_or_are_refused": 0,
    "hostile/test_clusters.py::test_a_cluster_file_is_refused_at_once": 4,
    "hostile/test_clusters.py::test_implausible_worlds_and_batches": 0,
    "hostile/test_clusters.py::test_wiring_is_answered_soon_or_refused": 0,
    "hostile/test_export.py::test_modules_of_a_torch_program_are_literals": 5,
    "hostile/test_hf.py::test_a_configuration_is_refused_at_once": 3,
    "hostile/test_plans.py::test_a_plan_costs_no_more_than_it_may": 24,
    "hostile/test_plans.py::test_a_plan_is_refused_at_once": 4,
    "hostile/test_plans.py::test_with_its_model_it_costs_no_more": 0,
    "hostile/test_source.py::test_a_name_is_never_run": 5,
    "hostile/test_source.py::test_any_names_at_once": 0,
    "layout/test_state_bytes.py::test_a_plan_s_state_is_what_processes_hold": 16,
    "models/test_hub.py::test_a_cached_model_is_planned_and_trained": 0,
    "models/test_load.py::test_inputs_are_separate_and_give_a_loss": 9,
    "models/test_published_sizes.py::test_a_family_is_planned_on_meta_with_the_splits_of_megatron": 4,
    "parity/test_parity.py::test_a_plan_trains_like_one_process": 40,
    "parity/test_parity.py::test_every_way_of_communicating_occurs": 0,
    "parity/test_parity.py::test_mixtures_and_encoder_decoders": 2,
    "parity/test_parity_activations.py::test_masks_of_dropout_come_back": 0,
    "parity/test_parity_balance.py::test_a_router_whose_gradient_is_not_summed_is_seen": 0,
    "parity/test_parity_balance.py::test_balanced_as_on_one_process": 10,
    "parity/test_parity_balance.py::test_evaluation_with_unequal_shares": 0,
    "parity/test_parity_balance.py::test_experts_chosen_anew_are_seen": 0,
    "parity/test_parity_balance.py::test_plan_and_program_name_the_averaging": 0,
    "parity/test_parity_balance.py::test_recomputation_keeps_routes": 0,
    "parity/test_parity_balance.py::test_the_balance_loss_of_transformers": 0,
    "parity/test_parity_compiled.py::test_a_class_is_compiled_once_and_a_ragged_microbatch_once_more": 0,
    "parity/test_parity_compiled.py::test_compiled_blocks_drop_over_cut_tokens": 0,
    "parity/test_parity_compiled.py::test_compiled_blocks_find_gathered_parameters": 0,
    "parity/test_parity_compiled.py::test_compiled_blocks_over_cut_tokens": 0,
    "parity/test_parity_compiled.py::test_what_compiled_blocks_save_goes_to_the_host": 0,
    "parity/test_parity_context.py::test_cut_sequences_train_like_one_process": 10,
    "parity/test_parity_contrastive.py::test_a_slow_copy_updates_its_running_statistics_without_gradients": 0,
    "parity/test_parity_contrastive.py::test_over_ragged_microbatches": 2,
    "parity/test_parity_custom.py::test_compiled_blocks_call_them": 0,
    "parity/test_parity_custom.py::test_gradient_checkpointing_of_transformers_is_left_to_the_plan": 0,
    "parity/test_parity_custom.py::test_kept": 6,
    "parity/test_parity_dropout.py::test_a_planted_fault_is_seen": 12,
    "parity/test_parity_dropout.py::test_a_run_repeats_to_the_bit_and_recompute_replays_it": 0,
    "parity/test_parity_dropout.py::test_an_edited_place_is_seen": 10,
    "parity/test_parity_dropout.py::test_an_edited_place_of_tokens_is_seen": 0,
    "parity/test_parity_dropout.py::test_backward_in_two_halves_plays_no_part": 0,
    "parity/test_parity_dropout.py::test_cut_tokens_play_no_part": 12,
    "parity/test_parity_dropout.py::test_every_mesh_drops_what_one_process_drops": 10,
    "parity/test_parity_dropout.py::test_seed_and_dropout_matter": 0,
    "parity/test_parity_dropout.py::test_the_schedule_plays_no_part": 2,
    "parity/test_parity_expert_loops.py::test_trains_as_one_process": 9,
    "parity/test_parity_expert_loops.py::test_turns_without_rows_that_change_something_are_refused": 6,
    "parity/test_parity_expert_tp.py::test_experts_train_like_one_process": 18,
    "parity/test_parity_expert_tp.py::test_rows_sent_by_every_tp_rank_are_refused": 0,
    "parity/test_parity_expert_tp.py::test_verify_runs_such_a_plan": 0,
    "parity/test_parity_experts.py::test_evaluation_with_unequal_shares": 0,
    "parity/test_parity_experts.py::test_experts_train_like_one_process": 8,
    "parity/test_parity_experts.py::test_families_train_like_one_process": 18,
    "parity/test_parity_experts.py::test_few_experts_take_all_rows": 0,
    "parity/test_parity_experts.py::test_sequences_of_different_lengths_are_refused": 0,
    "parity/test_parity_experts.py::test_verify_sees_what_training_would": 0,
    "parity/test_parity_experts.py::test_wirings_train_like_one_process": 40,
    "parity/test_parity_front.py::test_targets_are_planned_traced_and_verified": 0,
    "parity/test_parity_gathers.py::test_an_edited_gather_is_seen_in_bytes": 2,
    "parity/test_parity_gathers.py::test_gathering_again_changes_no_number": 6,
    "parity/test_parity_gathers.py::test_kept_bytes_are_those_predicted": 0,
    "parity/test_parity_gathers.py::test_what_is_not_done_again_drops_the_same": 0,
    "parity/test_parity_given.py::test_verify_leaves_out_layers_and_keeps_the_modes_of_the_others": 0,
    "parity/test_parity_hybrids.py::test_a_hybrid_trains_as_one_process": 0,
    "parity/test_parity_hybrids.py::test_a_wrong_gate_is_found": 0,
    "parity/test_parity_libraries.py::test_a_mask_that_is_compared_with_the_causal_one": 0,
    "parity/test_parity_logits.py::test_no_reader_of_logits_finds_them_overwritten": 24,
    "parity/test_parity_loss.py::test_a_loss_in_place_changes_no_number": 5,
    "parity/test_parity_loss_loops.py::test_turns_of_some_samples_or_their_places_are_refused": 28,
    "parity/test_parity_losses.py::test_as_on_one_process": 24,
    "parity/test_parity_losses.py::test_over_schedules_and_zero": 32,
    "parity/test_parity_losses.py::test_recomputed": 2,
    "parity/test_parity_losses.py::test_the_search_weighs_gpipe_against_forward_passes_ahead": 0,
    "parity/test_parity_metrics.py::test_means_over_tokens_that_cp_cuts": 0,
    "parity/test_parity_metrics.py::test_metrics_of_a_model_in_training_are_seen": 0,
    "parity/test_parity_metrics.py::test_over_every_mesh": 28,
    "parity/test_parity_metrics.py::test_over_schedules_experts_and_cut_tokens": 0,
    "parity/test_parity_narrow.py::test_as_near_the_truth_as_one_process": 6,
    "parity/test_parity_offload.py::test_the_host_changes_no_bit": 28,
    "parity/test_parity_optimizers.py::test_as_one_process": 5,
    "parity/test_parity_optimizers.py::test_each_group_has_its_optimizer": 0,
    "parity/test_parity_optimizers.py::test_narrow_gradients": 0,
    "parity/test_parity_optimizers.py::test_values_not_sent_back": 0,
    "parity/test_parity_overlap.py::test_overlap_changes_no_number": 16,
    "parity/test_parity_pictures.py::test_as_on_one_process": 6,
    "parity/test_parity_pictures.py::test_notes_name_what_is_fixed_and_what_is_left_out": 0,
    "parity/test_parity_pictures.py::test_other_numbers_of_rows_are_refused_by_the_step": 0,
    "parity/test_parity_pictures.py::test_pictures_of_another_size_are_refused_by_the_step": 0,
    "parity/test_parity_pictures.py::test_planted_order_of_patches_is_found": 0,
    "parity/test_parity_pictures.py::test_planted_rows_of_another_picture_are_refused": 0,
    "parity/test_parity_placed_rows.py::test_features_without_their_padding_are_as_on_one_process": 8,
    "parity/test_parity_planted.py::test_an_edited_line_is_seen": 6,
    "parity/test_parity_planted_rest.py::test_experts_that_another_rank_counts_too_are_caught": 0,
    "parity/test_parity_random.py::test_a_planted_fault_is_seen": 12,
    "parity/test_parity_random.py::test_an_edited_key_is_seen": 10,
    "parity/test_parity_random.py::test_an_edited_place_of_tokens_is_seen": 0,
    "parity/test_parity_random.py::test_an_update_of_a_skipped_layer_is_seen": 0,
    "parity/test_parity_random.py::test_evaluation_drops_no_sample": 0,
    "parity/test_parity_random.py::test_every_place_of_samples_is_met": 0,
    "parity/test_parity_random.py::test_every_plan_draws_what_the_plain_model_draws": 15,
    "parity/test_parity_ranks.py::test_processes_are_one_process": 32,
    "parity/test_parity_recompute.py::test_a_policy_changes_no_number": 9,
    "parity/test_parity_recompute.py::test_kept_bytes_are_those_predicted": 28,
    "parity/test_parity_recompute.py::test_what_runs_again_drops_the_same": 0,
    "parity/test_parity_row_dropout.py::test_calls_that_cannot_be_told_apart_are_compared_without_dropout": 0,
    "parity/test_parity_row_dropout.py::test_every_mesh_drops_what_one_process_drops": 0,
    "parity/test_parity_row_dropout.py::test_masks_of_other_rows_are_seen": 0,
    "parity/test_parity_row_dropout.py::test_the_model_itself_drops_these": 0,
    "parity/test_parity_schedules.py::test_a_schedule_trains_like_one_process": 14,
    "parity/test_parity_schedules.py::test_mixtures_and_encoder_decoders": 6,
    "parity/test_parity_schedules.py::test_most_of_the_weights_come_later": 0,
    "parity/test_parity_schedules.py::test_partial_gradients_are_not_sent_by_scatter_gather": 0,
    "parity/test_parity_schedules.py::test_what_a_backward_pass_holds_for_its_second_half_is_predicted": 4,
    "parity/test_parity_shared_inputs.py::test_an_input_that_is_said_to_be_shared_is": 28,
    "parity/test_parity_sizes.py::test_loops_that_treat_all_samples_alike": 0,
    "parity/test_parity_statistics.py::test_normalised_as_on_one_process": 12,
    "parity/test_parity_statistics.py::test_statistics_are_in_float32_at_least_and_blocks_compile": 0,
    "parity/test_parity_statistics.py::test_verify_agrees": 0,
    "parity/test_parity_statistics.py::test_verify_finds_gradients_of_a_rank": 0,
    "parity/test_parity_terms.py::test_verify_compares_terms": 0,
    "parity/test_parity_uneven.py::test_the_padding_is_weighed": 0,
    "parity/test_parity_updates.py::test_a_planted_fault_is_seen": 10,
    "parity/test_parity_updates.py::test_buffers_as_on_one_process": 12,
    "parity/test_parity_updates.py::test_verify_compares_updated_buffers": 0,
    "parity/test_parity_updates.py::test_without_a_fault_nothing_is_seen": 0,
    "parity/test_parity_whole_batch.py::test_as_on_one_process": 12,
    "parity/test_parity_whole_batch.py::test_behind_statistics_of_the_batch": 28,
    "parity/test_parity_whole_batch.py::test_over_schedules_and_zero": 36,
    "parity/test_parity_whole_batch.py::test_over_tokens_and_widths_that_are_cut": 0,
    "parity/test_parity_without_rows.py::test_a_step_reports_no_gradient_of_parameters_without_rows": 0,
    "parity/test_parity_without_rows.py::test_parameters_without_rows_are_not_updated": 8,
    "parity/test_parity_written_inputs.py::test_a_written_input_that_is_strided_is_refused": 0,
    "parity/test_parity_written_inputs.py::test_a_written_input_that_shares_its_memory_is_refused": 2,
    "parity/test_parity_zero.py::test_sharded_parameters_train_like_one_process": 6,
    "passes/analysis/test_activations.py::test_a_run_saves_as_much": 18,
    "passes/analysis/test_fused_flow.py::test_the_peak_is_that_of_a_gpu": 2,
    "passes/batch/test_expert_groups.py::test_every_op_of_a_mixture_has_a_row": 2,
    "passes/batch/test_index_moves.py::test_all_of_it_trains_as_on_one_process": 0,
    "passes/known/test_flex_attention.py::test_trains_as_one_process": 10,
    "passes/known/test_one_type.py::test_near_float64": 18,
    "passes/losses/test_reduce_loss.py::test_a_function_of_sums_is_exact": 10,
    "passes/losses/test_reduce_loss.py::test_a_sum_over_what_inputs_give_is_exact": 10,
    "passes/losses/test_reduce_loss.py::test_exact": 6,
    "passes/losses/test_reduce_loss.py::test_functions_of_the_whole_batch": 6,
    "passes/normalise/test_masks.py::test_hugging_face_causal_mask": 2,
    "passes/sharding/test_megatron_splits.py::test_columns_and_rows": 18,
    "passes/sharding/test_megatron_splits.py::test_compressed_projections_are_noticed": 0,
    "passes/sharding/test_megatron_splits.py::test_of_tables_only_the_vocabulary_is_split": 0,
    "passes/sharding/test_token_rows.py::test_rows_of_single_tokens_train_as_one_process": 0,
    "passes/sharding/test_token_rows.py::test_zeros_for_rows_of_own_tokens_of_a_tp_rank": 2,
    "passes/test_fold.py::test_a_long_chain_without_gradient_folds": 0,
    "passes/trace/test_packed_sequences.py::test_layers_that_share_an_entry_of_the_cache": 0,
    "passes/trace/test_packed_sequences.py::test_trains_as_one_process": 4,
    "passes/trace/test_recurrent.py::test_trains_as_one_process": 20,
    "passes/trace/test_repeats.py::test_a_containers_items": 0,
    "passes/trace/test_repeats.py::test_hugging_face_models": 0,
    "passes/trace/test_repeats.py::test_in_any_precision": 0,
    "passes/trace/test_repeats.py::test_what_the_parent_does_with_blocks": 0,
    "profile/test_profile.py::test_interrupted_it_writes_nothing": 0,
    "profile/test_profile.py::test_noise_and_outliers_do_not_move_it": 0,
    "profile/test_profile.py::test_other_constants_give_other_answers": 0,
    "profile/test_profile.py::test_rates_of_the_host_are_those_of_the_largest_cases": 0,
    "profile/test_profile.py::test_starts_of_attention_are_found": 0,
    "profile/test_profile.py::test_the_fit_finds_the_constants_that_made_the_points": 0,
    "profile/test_profile.py::test_the_memory_of_a_node_is_read_from_the_machine": 0,
    "profile/test_profile.py::test_two_processes_measure_and_the_file_plans": 0,
    "report/test_page.py::test_a_browser_opens_it": 5,
    "report/test_page.py::test_activations_on_the_host_are_not_said_to_be_computed_again": 0,
    "report/test_page.py::test_choices_without_effect_do_not_differ": 0,
    "report/test_page.py::test_every_rank_holds_what_the_page_says": 4,
    "report/test_page.py::test_every_term_of_the_first_lines_is_said_in_words": 4,
    "report/test_page.py::test_it_asks_for_nothing_and_is_small": 4,
    "report/test_page.py::test_it_says_what_each_constraint_costs": 0,
    "report/test_page.py::test_it_says_what_other_placements_would_cost": 0,
    "report/test_page.py::test_its_numbers_are_those_of_the_plan": 8,
    "report/test_page.py::test_of_a_long_step_the_start_and_the_end_are_drawn": 0,
    "report/test_page.py::test_text_of_a_plan_file_cannot_become_markup": 0,
    "report/test_page.py::test_the_timeline_is_the_simulated_step": 4,
    "report/test_page.py::test_two_plans_side_by_side_say_all_that_compare_says": 0,
    "report/test_pictures.py::test_pictures_of_the_documents_are_those_of_the_commands": 0,
    "runtime/comm/test_startup.py::test_a_save_asks_no_more_of_a_rank_in_a_large_world": 1,
    "runtime/comm/test_startup.py::test_groups_of_all_ranks_fit_together": 4,
    "runtime/fake_device/test_metrics.py::test_metrics_of_each_sample": 0,
    "runtime/fake_device/test_planted_devices.py::test_a_constant_of_the_host_in_forward": 1,
    "runtime/fake_device/test_planted_devices.py::test_a_wait_in_forward": 3,
    "runtime/fake_device/test_steps.py::test_each_way_of_training": 12,
    "runtime/fake_device/test_steps.py::test_models_by_many_ways": 0,
    "runtime/fake_device/test_steps.py::test_other_optimizers": 0,
    "runtime/fake_device/test_steps.py::test_the_numbers_are_those_of_ranks_on_the_host": 6,
    "runtime/fake_device/test_waits.py::test_every_listed_wait_happens": 0,
    "runtime/faults/test_many_ranks.py::test_a_slow_rank_of_many_is_named_with_few_requests": 0,
    "runtime/faults/test_watchdog.py::test_one_fault_of_each_kind_is_met": 0,
    "runtime/optimizers/test_whole_tensors.py::test_parity": 7,
    "runtime/test_interrupted_step.py::test_a_step_is_taken_again_or_refused_wherever_it_was_interrupted": 0,
    "runtime/test_stopping.py::test_nodes_that_come_and_go_lose_nothing_beyond_the_last_save": 0,
    "search/constraints/test_options.py::test_a_pin_leaves_the_best_of_the_plans_that_obey_it": 8,
    "search/constraints/test_options.py::test_each_pin_is_dropped_alone_and_all_together": 0,
    "search/pipeline/test_lower_bounds.py::test_planted_bugs_are_caught": 0,
    "search/pipeline/test_partition.py::test_planted_bugs_are_caught": 0,
    "search/sharding/test_build.py::test_without_sequence_parallelism_no_tensor_is_split_along_the_sequence": 0,
    "search/test_cut_program.py::test_cuts_of_random_tasks_are_equally_good": 0,
    "search/test_cut_program.py::test_plans_of_shipped_models_are_equal": 0,
    "search/test_host_memory.py::test_a_host_without_room_leaves_other_plans": 0,
    "search/test_known_answers.py::test_a_heavy_head_leaves_its_stage_fewer_layers": 0,
    "search/test_known_answers.py::test_a_model_that_fills_its_nodes_takes_all_of_each": 0,
    "search/test_known_answers.py::test_data_parallel_models_that_are_tight_shard_more": 0,
    "search/test_known_answers.py::test_experts_are_spread_within_a_node_and_not_beyond": 0,
    "search/test_known_answers.py::test_more_memory_or_bandwidth_never_make_it_slower": 0,
    "search/test_known_answers.py::test_no_tp_across_slow_links": 0,
    "search/test_known_answers.py::test_small_models_on_fast_links_are_data_parallel": 2,
    "search/test_known_answers.py::test_wide_models_take_tp_inside_a_node_and_pp_across": 0,
    "search/test_masks_and_buffers.py::test_blocks_hold_what_all_receive_once": 0,
    "search/test_offload.py::test_where_there_is_room_nothing_is_offloaded": 0,
    "search/test_optimal.py::test_a_candidate_closed_by_one_cut_is_caught": 0,
    "search/test_optimal.py::test_a_gap_counts_recomputation_that_was_not_looked_for": 0,
    "search/test_optimal.py::test_a_gap_is_never_smaller_than_the_true_one": 0,
    "search/test_optimal.py::test_a_host_without_limit_is_caught": 0,
    "search/test_optimal.py::test_every_dimension_counts": 0,
    "search/test_optimal.py::test_the_search_finds_the_best_of_all_plans": 0,
    "search/test_optimal.py::test_the_search_finds_the_best_where_every_dimension_counts": 0,
    "search/test_optimal.py::test_the_tasks_are_of_all_kinds": 0,
    "search/test_planner.py::test_more_memory_or_faster_links_never_make_it_slower": 0,
    "search/test_planner.py::test_no_candidate_is_better_or_below_its_bounds": 4,
    "search/test_pools.py::test_no_plan_is_better": 0,
    "search/test_predictions.py::test_a_plan_says_which_kernel_does_its_attention": 2,
    "search/test_predictions.py::test_a_tied_embedding_is_summed_over_its_stages": 0,
    "search/test_predictions.py::test_scores_of_a_cp_rank_have_all_columns": 0,
    "search/test_predictions.py::test_what_is_kept_is_never_of_another_question": 0,
    "search/test_random_plans.py::test_any_plan_trains_as_one_process": 0,
    "search/test_vee_plans.py::test_a_search_weighs_every_schedule": 0,
    "test_api.py::test_a_layer_communicates_as_megatron_does": 2,
    "test_api.py::test_plans_and_programs_are_the_same_in_every_process": 0,
    "test_bad_input.py::test_a_model_that_does_not_fit": 0,
    "test_bad_input.py::test_constraints_without_effect_that_do_no_harm": 2,
    "test_bad_input.py::test_what_cannot_be_fixed": 2,
    "test_boundary.py::test_four_ranks_that_cannot_trace_the_model": 0,
    "test_documents.py::test_examples_of_long_pages_print_what_the_page_shows": 0,
    "test_documents.py::test_examples_print_what_the_page_shows": 2,
    "test_examples.py::test_finetuning_goes_on_under_another_plan": 0,
    "test_examples.py::test_uneven_batches_are_those_of_one_process": 0,
    "test_out_of_memory.py::test_a_step_that_runs_out_says_what_and_the_way_out": 3,
    "test_out_of_memory.py::test_the_first_change_that_frees_enough": 3,
    "testing/test_process_pool.py::test_a_failed_rank_is_named_and_the_pool_recovers": 0,
    "testing/test_process_pool.py::test_collectives_agree": 2,
    "testing/test_process_pool.py::test_overlap_and_repetition_change_no_bit": 0,
    "testing/test_process_pool.py::test_training_agrees_with_one_process": 8,
    "trace_cache/test_commands.py::test_explanations_of_a_plan_need_no_trace": 0,
    "trace_cache/test_commands.py::test_other_questions_about_a_model_need_no_trace": 0,
    "trace_cache/test_commands.py::test_processes": 0,
    "trace_cache/test_commands.py::test_switched_off": 0,
    "trace_cache/test_commands.py::test_what_is_traced_otherwise_is_traced": 0,
    "trace_cache/test_models.py::test_a_kept_trace_gives_the_same_plan": 24,
    "verification/test_depth.py::test_a_stage_equal_to_an_earlier_one_runs_one_layer": 0,
    "verification/test_everyday.py::test_a_right_plan_is_verified": 24,
    "verification/test_optimizers.py::test_a_fault_of_the_exchange_is_found": 0,
    "verification/test_optimizers.py::test_a_plan_is_verified": 3,
    "verification/test_planted_plans.py::test_a_right_plan_is_verified_and_no_line_of_it_is_blamed": 6,
    "verification/test_planted_plans.py::test_a_wrong_line_is_found": 6,
    "verification/test_planted_plans.py::test_more_than_twenty_faults_are_planted": 0,
    "verification/test_planted_plans.py::test_wrong_code_is_found": 6,
    "verification/test_verify.py::test_a_certificate_is_made_kept_and_looked_at": 0,
    "verification/test_verify.py::test_a_mixture_whose_products_are_grouped": 0,
    "verification/test_verify.py::test_the_command_stores_the_certificate": 0,
}
_FEW = 2
# Folder -> the same for its other tests with more cases than a few.
FOLDERS = {
    "parity": 14,
    **dict.fromkeys(("checkpoint", "hostile", "passes", "runtime", "search", "verification"), 9),
    **dict.fromkeys(("codegen", "layout", "cost_models", "benchmarks", "models"), 3),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("all", "sample", "rest"), default="all", help="of the grids in tests/conftest.py"
    )
    parser.addoption("--part", default="0/1", help="with --cases rest: k/n for the k-th of n equal parts, from 0")
    parser.addoption("--device", default="cpu", help="where parity is tested: cpu, or cuda for all ranks on one GPU")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["AUTOPTD_CACHE"] = "off"  # also for the processes that tests start: none writes to the user's home
    if (device := config.getoption("--device")) != "cpu":
        import torch

        from autoptd.testing import parity

        parity.DEVICE = torch.device(device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, seen = config.getoption("--cases"), Counter[str]()
    if wanted == "all":
        return
    names = [item.nodeid.removeprefix("tests/").partition("[")[0] for item in items]
    cases, chosen, left = Counter(names), list[pytest.Item](), list[pytest.Item]()
    for name, item in zip(names, items, strict=True):
        nth = SAMPLED.get(name, FOLDERS.get(name.partition("/")[0], 1) if cases[name] > _FEW else 1)
        in_sample = nth > 0 and seen[name] % nth == 0
        seen[name] += 1
        (chosen if in_sample == (wanted == "sample") else left).append(item)
    if wanted == "rest":
        part, parts = map(int, config.getoption("--part").split("/"))
        left += [item for i, item in enumerate(chosen) if i % parts != part % parts]
        chosen = chosen[part % parts :: parts]
    if gone := [name for name in SAMPLED if not cases[name]]:
        raise pytest.UsageError(f"--cases is for the whole suite, and no test is called {', '.join(gone)}")
    items[:] = sorted(chosen, key=lambda item: shares(item.nodeid) not in LONGEST)
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection: of 14 s of codegen/test_run.py it took 2.1 s, now 1.4 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that runs tests with equal `shares` in one process, so that they share traces and pools."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTrace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shares(nodeid)

    return ByTrace(config, log)


POOLED = (
    "checkpoint/test_experts.py",
    "checkpoint/test_pairs.py",
    "parity/test_parity_ranks.py",
    "layout/test_state_bytes.py",
    "testing/test_process_pool.py",
)


# Groups of `shares` that take longest, first: at the end no process waits for another.
LONGEST = (
    "on the pool",
    "parity of ",
    *(f"parity of {model}" for model in ("gpt2", "mixtral")),
    *(f"tests/{name}.py" for name in ("search/test_planner", "test_api", "test_bad_input")),
    *(f"tests/{name}.py" for name in ("passes/trace/test_repeats", "verification/test_planted_plans")),
)


def shares(nodeid: str) -> str:
    """Return a test's group: its file, the group of the files in `POOLED`, or the model of a parity test in this
    process, since tracing a model takes longer than its tests.

    The model comes first in the test's parameters: `tests/parity/test_parity.py::test_a_plan[gpt2-dp8 × tp1 × pp1]`.
    """
    file, _, test = nodeid.partition("::")
    if file.removeprefix("tests/") in POOLED:
        return "on the pool"
    if test.startswith("test_examples_"):
        return nodeid  # pages share nothing, and take long
    if not file.startswith("tests/parity/"):
        return file
    return f"parity of {test.partition('[')[2].partition('-')[0].rstrip(']')}"


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Pool of eight gloo processes for all tests of the files in `POOLED`."""
    from autoptd.testing.process_pool import ProcessPool

    with ProcessPool(8) as running:
        yield running


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A world of one may start a process group in this process: the next test must not find it."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pin this process to one core for ranks that are threads: they take turns, and lose time whenever they move to
    another core. Ranks that are processes are not pinned."""
    if request.node.get_closest_marker("ranks") is not None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, {sorted(cores)[mine]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
