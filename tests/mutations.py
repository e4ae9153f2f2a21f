"""Mistakes that are put into the source on purpose, one at a time: does a test find each of them?

    python -m tests.mutations                      # all of them: about ten minutes on two cores
    python -m tests.mutations --only dpo-sign      # one; may be given several times
    python -m tests.mutations --list

The tree is copied, a mutation put into the copy, and the tests that are expected to fail are run there. A mutation that
none of them finds has SURVIVED: a test has lost its bite, or never had it, and the exit status is 1.

A mutation is found by what the code says, and its tests by their names, so both survive a move to another file. Where a
place is not found any more, the code says something else now: write the mutation anew for it.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("tuningfork", "tests", "demo", "bench", "docs", "recipes", "pyproject.toml")
SECONDS = 600  # for the tests of one mutation
LIBRARIES = [
    *("pytest", "hypothesis", "tyro", "datasets", "safetensors.torch", "torch.distributed.checkpoint"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
]

# Its processes are forked from one that has imported these: most of a test run's time would go into that.
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Mutation:
    """A mistake: `old` stands once in the source, or once in the function or class `within`, and becomes `new`.

    `tests` are names of test functions, with the id of one of their cases in brackets where one is enough.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    within: str = ""


class NotFound(Exception):
    """The source, or the tests, have not what a mutation names."""


MUTATIONS = (
    # --- the losses
    Mutation(
        "dpo-sign",
        "-(1 - label_smoothing) * logsigmoid(margins)",
        "-(1 - label_smoothing) * logsigmoid(-margins)",
        ("test_hand_computed_table", "test_a_step_is_that_of_a_plain_trainer[dpo]"),
    ),
    Mutation(
        "label-smoothing-sign",
        "loss - label_smoothing * logsigmoid(-margins)",
        "loss + label_smoothing * logsigmoid(-margins)",
        ("test_label_smoothing_has_its_minimum_where_the_label_is_right_that_often",),
    ),
    Mutation(
        "ipo-target",
        "(margins / beta - 1 / (2 * beta)) ** 2",
        "(margins / beta - 1 / beta) ** 2",
        ("test_hand_computed_table", "test_a_step_is_that_of_a_plain_trainer[ipo]"),
    ),
    Mutation(
        "simpo-margin-sign",
        "-logsigmoid(margins - gamma)",
        "-logsigmoid(margins + gamma)",
        ("test_hand_computed_table", "test_a_step_is_that_of_a_plain_trainer[simpo]"),
    ),
    Mutation(
        "chosen-and-rejected-swapped",
        "self.margin_losses(chosen - rejected - answers.margins)",
        "self.margin_losses(rejected - chosen - answers.margins)",
        ("test_hand_computed_table", "test_gradients_by_hand_push_chosen_up_and_rejected_down"),
    ),
    Mutation(
        "log-ratios-not-per-token",
        "ratios / answers.lengths if self.per_token else ratios",
        "ratios",
        ("test_hand_computed_table", "test_doubled_lengths_at_the_same_log_ratio_per_token"),
        within="LogRatioObjective",
    ),
    Mutation(
        "simpo-not-per-token",
        "self.beta * logps / answers.lengths",
        "self.beta * logps",
        ("test_hand_computed_table", "test_a_step_is_that_of_a_plain_trainer[simpo]"),
    ),
    Mutation(
        "sft-denominator",
        ".sum() / totals.tokens",
        ".sum() / totals.examples",
        ("test_the_sft_term_is_a_mean_over_the_tokens_of_the_batch", "test_a_step_is_that_of_a_plain_trainer[dpo]"),
        within="PairObjective",
    ),
    Mutation(
        "tokens-of-the-chunk",
        ".sum() / totals.tokens",
        ".sum() / answers.lengths.sum()",
        ("test_a_step_is_that_of_a_plain_trainer_however_the_batch_is_cut",),
        within="SFT",
    ),
    Mutation(
        "nll-as-a-mean-of-means",
        '"nll/token": PerToken(-logps, answers.lengths),\n            "logps/answer"',
        '"nll/token": -logps / answers.lengths,\n            "logps/answer"',
        ("test_an_evaluation_is_a_mean_over_all_held_out_examples_and_not_over_packs",),
    ),
    Mutation(
        "mean-of-the-pack",
        "self.example_losses(logps, answers).sum() / totals.examples",
        "self.example_losses(logps, answers).mean()",
        ("test_shares_of_a_batch_add_up_however_it_is_cut", "test_a_batch_cut_in_any_way_gives_the_same_step"),
    ),
    Mutation(
        "chosen-tokens-of-the-rejected",
        "sum(example.answer_tokens(0) for example in examples)",
        "sum(example.answer_tokens(1) for example in examples)",
        ("test_totals_count_what_counts", "test_a_step_is_that_of_a_plain_trainer[dpo]"),
        within="PairObjective",
    ),
    Mutation(
        "weight-forgotten",
        "answers.weights * self.margin_losses",
        "self.margin_losses",
        (
            "test_a_rows_weight_multiplies_its_loss_and_its_margin_is_an_offset",
            "test_weights_and_margins_find_their_pairs",
        ),
    ),
    Mutation(
        "weight-forgotten-by-the-sft-term",
        "(answers.weights * logps.view(-1, 2)[:, 0])",
        "logps.view(-1, 2)[:, 0]",
        ("test_a_rows_weight_multiplies_its_loss_and_its_margin_is_an_offset",),
    ),
    Mutation(
        "weight-of-another-pair",
        "self.weights[examples]",
        "self.weights[: examples.stop - examples.start]",
        ("test_a_chunk_has_its_own_answers_and_examples", "test_weights_and_margins_find_their_pairs"),
    ),
    Mutation(
        "reference-of-another-pair",
        "else self.reference[answers]",
        "else self.reference[: answers.stop - answers.start]",
        ("test_a_chunk_has_its_own_answers_and_examples", "test_a_batch_cut_in_any_way_gives_the_same_step"),
    ),
    Mutation(
        "margin-of-a-row-added",
        "chosen - rejected - answers.margins",
        "chosen - rejected + answers.margins",
        ("test_a_rows_weight_multiplies_its_loss_and_its_margin_is_an_offset",),
    ),
    # --- the head
    Mutation(
        "softcap-forgotten",
        "transform.softcap * (z / transform.softcap).tanh()",
        "z",
        ("test_values_and_gradient_are_those_of_log_softmax", "test_float64_packed_equals_alone[gemma2-shared]"),
        within="transformed",
    ),
    Mutation(
        "softcap-gradient",
        "1 - (z / transform.softcap) ** 2",
        "1 + (z / transform.softcap) ** 2",
        ("test_values_and_gradient_are_those_of_log_softmax", "test_float64_packed_equals_alone[gemma2-shared]"),
        within="logits_gradient",
    ),
    Mutation(
        "gradient-scale",
        "gradient *= grad_logps[:, None] * transform.scale",
        "gradient *= grad_logps[:, None]",
        ("test_values_and_gradient_are_those_of_log_softmax", "test_float64_packed_equals_alone[granite-shared]"),
    ),
    Mutation(
        "head-gradient-doubled",
        "d_weight.add_outer(d_logits, rows[piece.rows])",
        "d_weight.add_outer(2 * d_logits, rows[piece.rows])",
        ("test_value_and_gradients_are_autograds", "test_float64_packed_equals_alone[granite-shared]"),
    ),
    Mutation(
        "head-apart-from-the-embedding",
        "return self.model.get_output_embeddings().weight",
        "return nn.Parameter(self.model.get_output_embeddings().weight)",
        ("test_a_tied_weight_gets_both_gradients[granite]", "test_float64_packed_equals_alone[granite-shared]"),
    ),
    Mutation(
        "gradient-of-the-last-pack-alone",
        "weight.grad = total if weight.grad is None else weight.grad.add_(total)",
        "weight.grad = total",
        ("test_gradients_of_several_packs_add_up",),
    ),
    Mutation(
        "fixed-point-too-coarse",
        "_FIXED_POINT = 2.0**34",
        "_FIXED_POINT = 2.0**10",
        ("test_sum_by_answer_has_the_same_bits_in_any_order", "test_float64_packed_equals_alone[llama-shared]"),
    ),
    Mutation(
        "sum-in-any-order",
        "sums = zeros.long().index_add_(0, answer_of_token, fixed)",
        "sums = zeros.float().index_add_(0, answer_of_token, exact.float() * _FIXED_POINT)",
        ("test_sum_by_answer_has_the_same_bits_in_any_order",),
    ),
    Mutation(
        "share-of-one-answer-lost",
        "sum_by_place(d_counted, self._row_of_counted(batch), _size(self.rows))",
        "sum_by_place(d_counted[:-1], self._row_of_counted(batch)[:-1], _size(self.rows))",
        ("test_a_steps_loss_and_gradient_do_not_depend_on_sharing",),
    ),
    Mutation(
        "gradient-of-the-last-answer-alone",
        "sum_by_place(d_counted, self._row_of_counted(batch), _size(self.rows))",
        "d_counted.new_zeros(_size(self.rows)).index_copy_(0, self._row_of_counted(batch), d_counted)",
        ("test_a_steps_loss_and_gradient_do_not_depend_on_sharing",),
    ),
    Mutation(
        "picked-rows-overwrite-each-other",
        "return total.index_add_(0, places, values)",
        "return total.index_copy_(0, places, values)",
        ("test_sum_by_place_adds_up_one_after_the_other", "test_a_steps_loss_and_gradient_do_not_depend_on_sharing"),
    ),
    Mutation(
        "group-one-row-too-large-for-a-chunk",
        "rows + more_rows - cuts[-1][1] > limit",
        "rows + more_rows - cuts[-1][1] >= limit",
        ("test_chunks_are_whole_groups_and_only_a_larger_one_is_cut",),
    ),
    Mutation(
        "group-ends-one-row-early",
        "np.maximum.accumulate(np.concatenate([[-1], logit_row_of_counted])) + 1",
        "np.maximum.accumulate(np.concatenate([[-1], logit_row_of_counted]))",
        (
            "test_the_shared_answers_are_laid_as_the_tests_need_them",
            "test_log_probs_have_the_same_bits_however_answers_are_shared",
        ),
    ),
    # --- layout and attention
    Mutation(
        "answer-one-position-late",
        "np.arange(first_position, first_position + len(ids))",
        "np.arange(first_position, first_position + len(ids)) + (parent != ROOT)",
        ("test_positions_are_places_in_the_path", "test_float64_packed_equals_alone[llama-shared]"),
    ),
    Mutation(
        "parent-off-by-one",
        "parent = int(place[parent])",
        "parent = int(place[parent]) - 1",
        ("test_every_sequence_is_its_paths_tokens_and_nodes_lie_depth_first",),
    ),
    Mutation(
        "first-position-off-by-one",
        "[entry]\n        return segment.first_position + segment.end - segment.start",
        "[entry]\n        return segment.first_position + segment.end - segment.start - 1",
        ("test_positions_are_places_in_the_path", "test_float64_packed_equals_alone[llama-shared]"),
    ),
    Mutation(
        "subtree-ends-one-row-early",
        "self.segments[entry]._replace(subtree_end=end)",
        "self.segments[entry]._replace(subtree_end=end - 1)",
        ("test_a_subtree_ends_right_where_its_root_is_seen_no_more",),
    ),
    Mutation(
        "seam-shifted-by-one",
        "np.arange(seam, seam + GRID)",
        "np.arange(seam + 1, seam + GRID + 1)",
        ("test_steps_lie_on_the_grid_of_positions_whatever_the_cuts", "test_steps_of_a_prompt_by_hand"),
    ),
    Mutation(
        "seam-of-another-segment",
        "np.append(steps, -1 - entry)",
        "np.append(steps, -entry)",
        ("test_steps_lie_on_the_grid_of_positions_whatever_the_cuts", "test_steps_of_a_prompt_by_hand"),
    ),
    Mutation(
        "an-ancestors-steps-lost",
        "np.concatenate([self.steps[segment.parent][: seam // GRID], own])",
        "own",
        (
            "test_steps_lie_on_the_grid_of_positions_whatever_the_cuts",
            "test_steps_over_several_cuts_by_hand",
        ),
    ),
    Mutation(
        "first-token-from-another-row",
        "rows_at(leaf, counted + p - 1)",
        "rows_at(leaf, np.maximum(counted + p - 1, p))",
        (
            "test_each_counted_token_has_its_row_and_no_logit_is_computed_twice",
            "test_float64_packed_equals_alone[llama-shared]",
        ),
    ),
    Mutation(
        "answer-predicts-itself",
        "rows_at(leaf, counted + p - 1)",
        "rows_at(leaf, counted + p)",
        (
            "test_each_counted_token_has_its_row_and_no_logit_is_computed_twice",
            "test_float64_packed_equals_alone[llama-shared]",
        ),
    ),
    Mutation(
        "a-group-ends-within-an-example",
        "ends = np.cumsum(self._answers)",
        "ends = np.arange(len(self.lengths)) + 1",
        ("test_groups_share_logit_rows_with_no_other_and_are_as_small_as_can_be",),
    ),
    Mutation(
        "padding-counted",
        "return sum(own for _, own in self.spans)",
        "return len(self.input_ids)",
        ("test_a_forests_nodes_are_the_first_segments_in_their_order", "test_a_batch_has_the_tokens_counted_by_hand"),
        within="PackedBatch",
    ),
    Mutation(
        "no-cut-where-answers-of-one-example-part",
        "if found} - {*needed}",
        "if found}",
        (
            "test_the_answers_of_one_example_share_their_prompt_however_short",
            "test_more_sharing_never_takes_more_rows",
        ),
    ),
    Mutation(
        "a-stem-saves-its-own-rows-too",
        "(nodes[n].end - starts[n]) * (branches[n] - 1)",
        "(nodes[n].end - starts[n]) * branches[n]",
        (
            "test_a_stem_is_shared_from_that_many_rows_on",
            "test_a_cut_saves_enough_or_answers_of_one_example_part_there",
        ),
    ),
    Mutation(
        "what-is-passed-over-is-no-branch",
        "branches[parent] += branches[n] - 1",
        "pass",
        ("test_what_is_passed_over_is_a_branch_more_for_what_stays",),
    ),
    Mutation(
        "some-of-a-tree-have-the-tokens-of-others",
        "ranks[np.searchsorted(ranks, self.low[used])]",
        "np.maximum(ranks[np.searchsorted(ranks, self.low[used])] - 1, 0)",
        ("test_every_sequence_is_its_paths_tokens_and_nodes_lie_depth_first",),
    ),
    Mutation(
        "trees-not-tied-together",
        "one, other = sorted((find(example), find(owner.setdefault(top[leaf], example))))",
        "one, other = example, example",
        ("test_a_portion_is_a_whole_tree_where_it_fits", "test_answers_of_two_trees_tie_these_together"),
    ),
    Mutation(
        "a-cut-pack-is-never-quite-full",
        "rows[: last + 1] <= capacity",
        "(rows[: last + 1] < capacity) | (np.arange(last + 1) == last)",
        ("test_a_cut_in_path_order_is_the_best_of_all_cuts",),
    ),
    Mutation(
        "a-parted-pack-is-never-quite-full",
        "rows[part] <= capacity",
        "rows[part] < capacity or part == first",
        ("test_few_examples_have_the_rows_of_the_best_of_all_ways_to_part_them",),
    ),
    Mutation(
        "shared-rows-added-by-everyone",
        "before[again] = users[again - 1]",
        "before[again] = -1",
        ("test_a_cut_in_path_order_is_the_best_of_all_cuts",),
    ),
    Mutation(
        "one-row-ahead",
        "visible = j <= i",
        "visible = j <= i + 1",
        (
            "test_values_and_gradients_are_those_of_a_dense_masked_softmax",
            "test_float64_packed_equals_alone[mistral-shared]",
        ),
    ),
    Mutation(
        "first-row-of-a-segment-not-seen",
        "np.concatenate([paths[segment.parent], np.arange(segment.start, segment.end)])",
        "np.concatenate([paths[segment.parent], np.arange(segment.start, segment.end) + 1])",
        (
            "test_values_and_gradients_are_those_of_a_dense_masked_softmax",
            "test_float64_packed_equals_alone[llama-shared]",
        ),
    ),
    Mutation(
        "window-off-by-one",
        "visible &= j > i - how.window",
        "visible &= j >= i - how.window",
        (
            "test_values_and_gradients_are_those_of_a_dense_masked_softmax",
            "test_float64_packed_equals_alone[mistral-shared]",
        ),
    ),
    Mutation(
        "window-of-flops",
        "w * (w + 1) // 2",
        "w * (w - 1) // 2",
        ("test_attention_pairs_are_the_visible_entries_of_the_mask", "test_a_pair_on_a_tiny_llama_by_hand"),
    ),
    # --- data
    Mutation(
        "boundary-token-in-the-prompt",
        "np.flatnonzero(self.stops > boundary)",
        "np.flatnonzero(self.starts >= boundary)",
        ("test_a_merge_that_both_answers_share_still_belongs_to_them",),
    ),
    Mutation(
        "span-counts-one-more",
        "(self.starts < stop) & (self.stops > start)",
        "(self.starts <= stop) & (self.stops > start)",
        ("test_chatml_ids_equal_the_joint_encoding_and_the_mask_is_the_assistants",),
    ),
    Mutation(
        "dropped-row-not-counted",
        "report.dropped_rows += (DroppedRow(table, row, reason, detail) for row, reason, detail in account.dropped)",
        "report.rows_read -= len(account.dropped)",
        ("test_the_limit_holds_for_the_longer_of_the_answers_and_to_the_token", "test_the_report_is_plain_data"),
    ),
    Mutation(
        "equal-answers-kept",
        "    _check_distinct(parts, answers)\n",
        "",
        ("test_a_bad_row_is_dropped_and_listed[equal]", "test_plain_text_rows_are_dropped_alike[equal]"),
        within="check_example",
    ),
    Mutation(
        "document-compared-with-no-prompt",
        "answers[0] if parts.document else prompt",
        "prompt",
        ("test_what_the_prompt_holds_may_stand_beside_it",),
        within="check_example",
    ),
    Mutation(
        "document-with-a-prompts-fields",
        "beside = {} if parts.document else {key: value for key, value in row.items() if key not in format.keys}",
        "beside = {key: value for key, value in row.items() if key not in format.keys}",
        ("test_a_document_has_nothing_beside_it_but_its_weight",),
    ),
    Mutation(
        "history-as-another-answer",
        "if at == len(sequence):",
        "if False:",
        ("test_other_answers_to_the_same_prompt_are_no_history", "test_the_longest_conversation_counts"),
        within="_nearest",
    ),
    Mutation(
        "history-told-by-its-beginning",
        "if len(rest) >= FEWEST and np.array_equal(rest, history[: len(rest)]):",
        "if len(rest) >= FEWEST and np.array_equal(rest[:FEWEST], history[:FEWEST]):",
        ("test_what_an_answer_is_known_by",),
    ),
    Mutation(
        "common-to-one",
        "common = nodes[n], first[n] != last[n]",
        "common = nodes[n], True",
        ("test_trees_by_hand", "test_a_common_answer_of_one_example_is_its_first_ones"),
    ),
    Mutation(
        "every-epoch-in-one-order",
        "self._epoch(n // self.examples)",
        "self._epoch(0)",
        ("test_epochs_differ_in_order", "test_each_epoch_has_an_order_of_its_own"),
    ),
    Mutation(
        "a-longer-run-goes-on-elsewhere",
        "return self.done_examples + (step - self.done_steps) * self.examples_per_step",
        "return step * self.examples_per_step",
        ("test_a_run_that_is_made_longer_loses_no_example_and_sees_none_twice",),
    ),
    Mutation(
        "groups-are-not-cut",
        "_runs(place % self.most == 0)",
        "_runs(place == 0)",
        ("test_no_piece_is_larger_than_asked", "test_each_epoch_is_whole_and_as_defined_and_each_step_exact"),
    ),
    Mutation(
        "all-without-a-group-are-one",
        "np.where(keys == 0, np.arange(len(keys)), first[key])",
        "first[key]",
        ("test_each_epoch_is_whole_and_as_defined_and_each_step_exact",),
    ),
    Mutation(
        "groups-of-before-for-another-key",
        '"group_by": group_by,',
        "",
        ("test_whatever_decides_a_token_makes_another_entry",),
    ),
    Mutation(
        "rows-may-change-their-groups",
        'if (group := column(examples, "group")).any():',
        "if False:",
        ("test_the_group_changes_the_digest_of_what_is_trained_on_and_only_where_it_is_asked_for",),
    ),
    Mutation(
        "full-pack-of-any-size",
        "full = _round_up(self.tokens, self.quantum)",
        "full = self.tokens",
        ("test_rows_hold_the_content_and_are_a_multiple_of_the_quantum_in_a_full_pack_too",),
    ),
    # --- the reference
    Mutation(
        "reference-of-another-answer",
        "np.searchsorted(self.contents, contents)",
        'np.maximum(np.searchsorted(self.contents, contents, side="right") - 1, 0)',
        ("test_round_trip_to_the_last_bit", "test_columns_and_lists_are_looked_up_alike"),
    ),
    Mutation(
        "mask-no-part-of-the-content",
        'digest.update(np.ascontiguousarray(counts, dtype="?").data)',
        "pass",
        ("test_a_changed_mask_is_scored_anew", "test_the_digest_sees_ids_masks_cuts_and_order_and_nothing_else"),
    ),
    Mutation(
        "damaged-shard-taken",
        'or path.name != f"rows-{_digest(raw.data, origin)}.bin"',
        "",
        ("test_every_flipped_byte_is_noticed", "test_a_shard_of_another_cache_is_refused"),
    ),
    Mutation(
        "step-0-check-skipped",
        "if wrong:",
        "if False:",
        ("test_a_single_last_bit_is_found_and_its_answer_named", "test_a_policy_that_has_moved_is_not_the_reference"),
        within="check_start",
    ),
    Mutation(
        "first-step-check-skipped",
        "if starting:",
        "if False:",
        ("test_a_first_step_whose_log_probs_are_not_the_cached_ones_moves_nothing",),
        within="train_step",
    ),
    # --- a step
    Mutation(
        "step-with-no-number",
        "    _check_finite(loss, 0.0 if skipped else grad_norm, logps, batch)\n",
        "",
        ("test_a_number_that_is_none_names_its_example_and_moves_nothing",),
        within="train_step",
    ),
    Mutation(
        "clipping-the-wrong-way",
        "max_grad_norm / (norm + 1e-6)",
        "(norm + 1e-6) / max_grad_norm",
        ("test_clipping_scales_the_whole_step_and_reports_the_norm_before",),
    ),
    Mutation(
        "fused-scale-not-inverted",
        "scale.reciprocal().float()",
        "scale.float()",
        ("test_a_scaled_step_is_that_of_scaled_gradients",),
    ),
    Mutation(
        "betas-swapped",
        "betas = (config.adam_beta1, config.adam_beta2)",
        "betas = (config.adam_beta2, config.adam_beta1)",
        ("test_two_steps_of_adamw_by_its_formula",),
    ),
    Mutation(
        "norms-decayed",
        "(0.0, lambda p: p.ndim < 2)",
        "(config.weight_decay, lambda p: p.ndim < 2)",
        ("test_weight_decay_is_on_matrices_only",),
    ),
    Mutation(
        "warm-up-off-by-one",
        "config.learning_rate * (step + 1) / warmup",
        "config.learning_rate * step / warmup",
        ("test_linear_by_hand", "test_no_step_is_wasted_and_none_exceeds_the_peak"),
    ),
    Mutation(
        "decay-off-by-one",
        "done = (step - begin) / (total_steps - begin)",
        "done = (step + 1 - begin) / (total_steps - begin)",
        ("test_linear_by_hand", "test_cosine_by_hand"),
    ),
    Mutation(
        "pieces-that-count-their-first-token-again",
        "mask[0] = False",
        "mask[0] = True",
        ("test_pieces_predict_each_token_of_a_document_once_and_in_order",),
    ),
    Mutation(
        "a-stream-that-drops-its-last-piece",
        "if len(held[0]) > 1:",
        "if len(held[0]) >= max_length:",
        ("test_a_stream_has_every_token_of_its_documents_once",),
    ),
    Mutation(
        "a-stream-that-counts-bytes-twice",
        "int(widths[1:].sum())",
        "int(widths.sum())",
        ("test_a_stream_has_every_token_of_its_documents_once",),
    ),
    Mutation(
        "a-stream-cut-anew-in-each-batch",
        "made += len(starts)",
        "made += 1",
        ("test_a_stream_does_not_depend_on_batches_and_the_cache_keeps_it",),
    ),
    Mutation(
        "steps-of-one-example-too-many",
        'stop = int(np.searchsorted(ends, before + left, side="right"))',
        'stop = int(np.searchsorted(ends, before + left, side="right")) + 1',
        ("test_a_step_by_tokens_is_the_longest_run_of_examples_within_them", "test_steps_by_tokens_by_hand"),
    ),
    Mutation(
        "longer-pieces-taken-from-the-shorter",
        "first = sum(part.examples for part in self.parts[:place])",
        "first = 0",
        ("test_steps_are_those_of_each_part_counted_through",),
    ),
    Mutation(
        "longer-pieces-a-step-too-late",
        "place = min(bisect_right(ends, step), len(ends) - 1)",
        "place = min(bisect_right(ends, step - 1), len(ends) - 1)",
        ("test_steps_are_those_of_each_part_counted_through",),
    ),
    Mutation(
        "pieces-that-do-not-grow",
        "settings = replace(data, max_length=length)",
        "settings = data",
        ("test_pieces_grow_by_step_and_a_run_killed_among_short_ones_goes_on_to_the_bit",),
    ),
    Mutation(
        "weights-moved-by-gradients-times-the-loss-scale",
        "scale = None if loss_scale is None else torch.ones_like(norm) / loss_scale",
        "scale = None",
        ("test_weights_move_as_without_one",),
    ),
    Mutation(
        "an-infinite-gradient-moves-the-weights",
        "if not skipped:",
        "if True:",
        ("test_a_gradient_that_is_infinite_moves_nothing",),
        within="train_step",
    ),
    Mutation(
        "a-loss-scale-that-a-checkpoint-forgets",
        "examples=restored.examples, loss_scale=restored.loss_scale)",
        "examples=restored.examples)",
        ("test_a_planted_infinity_skips_one_step_and_a_resumed_run_has_the_same_bits",),
    ),
    Mutation(
        "a-loss-scale-that-stays",
        "loss_scale = behind",
        "pass",
        ("test_a_planted_infinity_skips_one_step_and_a_resumed_run_has_the_same_bits",),
        within="training_steps",
    ),
    Mutation(
        "initial-values-by-the-order-of-modules",
        'digest = hashlib.sha256(f"{seed} {name}".encode()).digest()',
        'digest = hashlib.sha256(f"{seed}".encode()).digest()',
        ("test_values_depend_on_seed_and_name_and_on_nothing_else",),
    ),
    Mutation(
        "float32-gradients-not-held",
        "torch.promote_types(weight.dtype, torch.float32)",
        "weight.dtype",
        ("test_with_float32_gradients_bfloat16_weights_make_the_same_step_however_the_batch_is_cut",),
        within="hold_gradients",
    ),
    # --- a run and its files
    Mutation(
        "resume-one-step-early",
        "run.loader, run.session, run.optimizer, run.reference, self.config, self.progress.step",
        "run.loader, run.session, run.optimizer, run.reference, self.config, max(self.progress.step - 1, 0)",
        ("test_a_crash_costs_only_the_steps_since_the_last_checkpoint",),
    ),
    Mutation(
        "other-data-on-resume",
        "if saved.data_digest != begun.data_digest:",
        "if False:",
        ("test_resume_with_other_data_is_refused",),
    ),
    Mutation(
        "checksum-of-metrics-ignored",
        "if checksum not in (None, _checksum(json.dumps(line))) or len(have_checksums) > 1:",
        "if len(have_checksums) > 1:",
        ("test_one_flipped_bit_of_a_line_is_noticed",),
    ),
    Mutation(
        "spoilt-export-taken",
        "if spoilt:",
        "if False:",
        ("test_one_flipped_bit_of_an_export_is_noticed",),
    ),
    Mutation(
        "damaged-checkpoint-taken",
        "if checksum(folder / name) != digest:",
        "if False:",
        ("test_a_sealed_folder_shows_any_damage", "test_a_flipped_bit_is_noticed_before_anything_is_loaded"),
        within="check_sealed",
    ),
    Mutation(
        "metadata-may-call-anything",
        'raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")',
        "return super().find_class(module, name)",
        ("test_metadata_that_is_a_program", "test_metadata_may_call_for_nothing_but_its_own_classes"),
    ),
    Mutation(
        "a-tie-is-a-success",
        "(margin > 0).double() + 0.5 * (margin == 0)",
        "(margin >= 0).double()",
        ("test_statistics_by_hand_ties_count_half",),
    ),
    Mutation(
        "later-of-equals-is-best",
        "sign * value <= sign * other",
        "sign * value < sign * other",
        ("test_of_equals_the_earliest_is_the_best",),
    ),
    Mutation(
        "evaluation-of-answers-in-another-order",
        "found[mine.of(pack.examples)] = ",
        "found[mine.of(pack.examples).flip(0)] = ",
        ("test_evaluation_equals_plain_scores_and_the_papers_formula",),
    ),
    # --- layers with a state
    Mutation(
        "gates-in-the-runs-dtype",
        "wide = torch.promote_types(mixed.dtype, torch.float32)",
        "wide = mixed.dtype",
        ("test_gates_are_float32_under_autocast_and_with_bfloat16_weights",),
        within="_forward",
    ),
    Mutation(
        "negative-eigenvalues-forgotten",
        "beta = 2 * beta",
        "pass",
        (
            "test_hybrid_models_in_float64_packed_equal_alone[olmo_hybrid-shared]",
            "test_negative_eigenvalues_are_a_setting_of_olmo_hybrid",
        ),
    ),
    Mutation(
        "keys-where-queries-are",
        "for part in (query, key, value)], dim=-1)",
        "for part in (key, query, value)], dim=-1)",
        ("test_hybrid_models_in_float64_packed_equal_alone[qwen3_next-shared]",),
    ),
    Mutation(
        "convolution-parts-in-another-order",
        "for _, name in sorted(parts.items()))",
        "for _, name in sorted(parts.items(), reverse=True))",
        ("test_a_released_folder_is_loaded_as_transformers_loads_it[olmo_hybrid]",),
    ),
    Mutation(
        "export-cuts-where-its-folder-did",
        "if self.family.in_recurrent_blocks and elsewhere:",
        "if False:",
        ("test_what_transformers_saves_is_loaded_and_exported_in_the_published_cuts[olmo_hybrid]",),
    ),
    Mutation(
        "rows-of-a-stack-off-by-one-part",
        "start, end = start - part.shape[0], end - part.shape[0]",
        "start, end = start - part.shape[0], end",
        ("test_rows_of_a_stack_are_those_of_its_parts",),
    ),
    Mutation(
        "state-of-the-first-layer-not-compared",
        "if packed_state:",
        "if False:",
        ("test_a_leak_that_no_logit_shows_is_found_in_its_layer",),
    ),
    Mutation(
        "scan-blamed-for-all",
        "without = replace(policy.kernels, forms={**policy.kernels.forms, _SCAN: _ValuesAsTheyAre})",
        "without = policy.kernels",
        ("test_a_leak_is_named",),
    ),
    Mutation(
        "choices-of-blocks-not-compared",
        "_check_choices(what, found, expected, self._scores(",
        "_check_choices(what, expected, expected, self._scores(",
        ("test_a_wrong_choice_is_named_with_a_row_that_has_it",),
    ),
    Mutation(
        "gradients-of-ops-not-compared",
        "for name, f, u, e, floor, part in zip(names, found, usual, exact, floors, more, strict=True):",
        "for name, f, u, e, floor, part in list(zip(names, found, usual, exact, floors, more))[: len(outputs)]:",
        ("test_a_wrong_gradient_of_the_scan_is_named", "test_a_wrong_attention_kernel_is_named"),
    ),
    Mutation(
        "padding-compared",
        "tuple(t[: self._used] for t in results) if of_rows else results",
        "results",
        ("test_rows_of_padding_are_nobodys",),
    ),
    Mutation(
        "rounded-results-of-attention-not-counted",
        "t + of_it for t, of_it in",
        "t + 0 * of_it for t, of_it in",
        ("test_a_kernel_that_loses_what_flash_attention_loses_passes",),
    ),
    # --- native sparse attention
    Mutation(
        "nsa-blocks-that-overlap-count-whole",
        "min(strides, per_block, place + strides, per_block - place)",
        "min(strides, per_block)",
        ("test_scores_of_blocks_are_the_table_worked_out_by_hand",),
    ),
    Mutation(
        "nsa-a-block-is-read-before-it-is-complete",
        "(last <= blocks.positions[:, None])",
        "(last <= blocks.positions[:, None] + 1)",
        ("test_no_later_token_moves_a_bit_of_an_earlier_row",),
    ),
    Mutation(
        "nsa-chosen-rows-behind-the-query",
        "there & (position <= blocks.positions[:, None])",
        "there",
        ("test_values_gradients_and_choices_are_those_of_the_definition[two]",),
    ),
    Mutation(
        "nsa-ties-in-any-order",
        "scores.sort(dim=-1, descending=True, stable=True)",
        "(scores + 1e-6 * block).sort(dim=-1, descending=True, stable=True)",
        ("test_equal_scores_go_to_the_lowest_blocks_every_time",),
    ),
    Mutation(
        "nsa-a-crossed-block-is-the-prompts",
        "segment = torch.searchsorted(end, last, right=True).clamp(max=len(end) - 1)",
        "segment = torch.searchsorted(end, last).clamp(max=len(end) - 1)",
        ("test_each_path_finds_its_blocks_and_a_shared_one_is_made_once",),
    ),
    Mutation(
        "nsa-blocks-of-rows-that-lie-together",
        "rows = rows_at(layout, segment, first[:, None] + torch.arange(grid.length, device=device))",
        "rows = (last[:, None] + torch.arange(1 - grid.length, 1, device=device)).clamp(0, total - 1)",
        ("test_cut_batches_of_families_of_our_own[nsa]",),
    ),
    Mutation(
        "nsa-a-groups-first-head-chooses",
        "weights.unflatten(2, (BLOCK, per_group)).unbind(3)",
        "weights.unflatten(2, (BLOCK, per_group)).unbind(3)[:1]",
        ("test_a_choice_holds_where_scores_move_less_than_half_their_gap_and_ends_where_two_change_places",),
    ),
    Mutation(
        "nsa-rows-without-a-block-have-gradients",
        "masked_fill_(hidden.all(-1, keepdim=True), 0)",
        "masked_fill_(hidden.all(-1, keepdim=True), 1e-3)",
        ("test_gradients_are_those_of_small_differences",),
    ),
    Mutation(
        "nsa-values-are-not-compressed",
        'self._pooled(nsa.ops, values["cmp"], "phi_v")',
        'nsa.ops.mean(values["cmp"])',
        ("test_a_run_starts_at_a_margin_of_0_and_exports_what_it_learned",),
    ),
    Mutation(
        "nsa-gates-that-collapse-are-not-said",
        "if said := self._gates.add(step.statistics.values()):",
        "if said := None:",
        ("test_a_run_starts_at_a_margin_of_0_and_exports_what_it_learned",),
    ),
    Mutation(
        "nsa-gates-of-padding-count",
        "prepared.gates[:, : sum(own for _, own in spans)]",
        "prepared.gates",
        ("test_what_is_noted_are_the_gates_and_keys_of_its_tokens",),
    ),
    # --- the gated delta rule
    Mutation(
        "delta-decay-of-a-chunk",
        "(gamma[:, :, -1:] - gamma).exp() * k",
        "gamma.exp() * k",
        ("test_values_and_gradients_are_those_of_the_recurrence",),
    ),
    Mutation(
        "delta-parents-state",
        "state = take(state, pack.parents[number - 1])",
        "state = state[: len(pack.parents[number - 1])]",
        ("test_a_forest_has_the_gradients_of_the_recurrence_along_each_path",),
    ),
    Mutation(
        "delta-last-of-a-slot",
        "torch.searchsorted(by_parent, number, right=True) - 1",
        "torch.searchsorted(by_parent, number).clamp(max=len(number) - 1)",
        ("test_a_walk_through_trees_and_chains_hands_each_chunk_its_parents_state",),
    ),
    Mutation(
        "delta-gates-either",
        "if decay.dtype != wide or beta.dtype != wide:",
        "if decay.dtype != wide and beta.dtype != wide:",
        ("test_gates_that_would_be_rounded_are_refused",),
    ),
    Mutation(
        "heads-not-filled-up",
        "fill = (0, -rows.shape[2] % LINE) if rows.ndim == 3 else ()",
        "fill = (0, 0) if rows.ndim == 3 else ()",
        ("test_heads_that_fill_no_vector_register_have_the_same_bits_in_every_pack",),
    ),
    # --- CCGQA: what public code has had wrong
    Mutation(
        "ccgqa-zeros-before-the-second-convolution",
        "x.new_zeros(x.shape[1]) if before is None else before.to(x.dtype)",
        "x.new_zeros(x.shape[1])",
        ("test_values_and_gradients_are_those_of_a_loop",),
        within="_query_key",
    ),
    Mutation(
        "ccgqa-mean-over-all-heads",
        "of_queries.unflatten(1, (-1, group)).mean(2)",
        "of_queries.mean(1, keepdim=True).expand_as(key)",
        ("test_values_and_gradients_are_those_of_a_loop",),
    ),
    Mutation(
        "ccgqa-temperature-without-a-gradient",
        "temperature.to(wide).exp()[:, None]).to(x.dtype)",
        "temperature.detach().to(wide).exp()[:, None]).to(x.dtype)",
        ("test_gradients_are_those_of_finite_differences",),
        within="_query_key",
    ),
    Mutation(
        "ccgqa-clamped-gradients",
        "rounded = grad.to(x.dtype).to(wide)",
        "rounded = grad.clamp(-100, 100).to(x.dtype).to(wide)",
        ("test_gradients_grow_and_shrink_with_what_comes_in_and_nothing_is_clamped",),
    ),
    Mutation(
        "ccgqa-no-root-of-the-width",
        "return heads * (heads.shape[-1] ** 0.5 / norm)",
        "return heads / norm",
        ("test_a_query_has_the_length_of_its_width_and_a_key_that_by_its_temperature",),
        within="_unit",
    ),
    Mutation(
        "split-k-in-a-pass",
        "setattr(matmul, name, (False, False))",
        "setattr(matmul, name, (False, True))",
        ("test_a_pass_in_16_bits_goes_without_and_leaves_all_as_it_was",),
    ),
    Mutation(
        "split-k-left-out-behind-a-pass",
        "            setattr(matmul, name, value)\n",
        "            pass\n",
        ("test_a_pass_in_16_bits_goes_without_and_leaves_all_as_it_was",),
    ),
    Mutation(
        "split-k-in-a-policy",
        "with self._precision(), without_split_k(self.device, self.dtype):",
        "with self._precision():",
        ("test_forward_passes_of_a_policy_do_without_and_backward_passes_do_not",),
    ),
    Mutation(
        "split-k-in-a-block-computed-again",
        "forwards.append(running_without_split_k(forward, self.device, self.dtype))",
        "forwards.append(forward)",
        ("test_forward_passes_of_a_policy_do_without_and_backward_passes_do_not",),
    ),
    Mutation(
        "split-k-in-logits",
        "with without_split_k(rows.device, rows.dtype):",
        "if True:",
        ("test_forward_passes_of_a_policy_do_without_and_backward_passes_do_not",),
    ),
    Mutation(
        "no-switch-without-a-workspace",
        'return device.type == "cuda" and dtype.itemsize == 2 and _workspace is not False',
        'return device.type == "cuda" and dtype.itemsize == 2',
        ("test_a_run_in_float32_that_compares_bits_has_none_and_a_later_one_in_16_bits_no_switch",),
    ),
    Mutation(
        "few-numbers-held-to-their-own-rounding",
        "floor + through * sizes[kind])",
        "floor)",
        ("test_a_kind_of_weights_may_be_off_by_what_all_blocks_together_are",),
    ),
    Mutation(
        "ccgqa-value-of-another-example",
        "taps[now:, 0] = 1",
        "taps[now:, 1] = 1",
        ("test_the_first_row_of_a_path_has_no_value_of_the_row_before",),
    ),
)


# --- where a mutation belongs ----------------------------------------------------------------------------------------


def _spans(source: str, within: str) -> list[tuple[int, int]]:
    """Where in a source the functions and classes of this name stand, as characters; all of it for no name."""
    if not within:
        return [(0, len(source))]
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return [
        (starts[node.lineno - 1], starts[node.end_lineno or node.lineno])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == within
    ]


def place(mutation: Mutation, root: Path = ROOT) -> tuple[Path, str]:
    """The file that a mutation belongs to, and its source with the mistake in it. Raises NotFound."""
    found = []
    for path in sorted((root / "tuningfork").rglob("*.py")):
        source = path.read_text()
        if mutation.old not in source:
            continue
        for start, stop in _spans(source, mutation.within):
            at = source.find(mutation.old, start, stop)
            while at >= 0:
                found.append((path, source[:at] + mutation.new + source[at + len(mutation.old) :]))
                at = source.find(mutation.old, at + 1, stop)
    if len(found) != 1:
        where = f" in {mutation.within}" if mutation.within else ""
        raise NotFound(f"{mutation.name}: {mutation.old!r} stands {len(found)} times{where} in tuningfork/, not once")
    path, source = found[0]
    compile(source, str(path), "exec")  # else every test would fail, and prove nothing
    return path, source


@cache
def _tests(root: Path) -> dict[str, list[str]]:
    """Name of a test function -> its node ids, without the cases."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(f"{path.relative_to(root)}::{name}")
    return found


def nodes(mutation: Mutation, root: Path = ROOT) -> list[str]:
    """The node ids of a mutation's tests. Raises NotFound."""
    found = []
    for test in mutation.tests:
        name, bracket, case = test.partition("[")
        if name not in _tests(root):
            raise NotFound(f"{mutation.name}: there is no test {name}")
        found += [node + bracket + case for node in _tests(root)[name]]
    return found


# --- trying them out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """What became of some tests: which failed, and why none could be run, if so."""

    failed: tuple[str, ...]
    trouble: str = ""


def _run(root: Path, wanted: Sequence[str], seconds: float) -> Tried:
    """Run tests of a tree. One that does not end counts as failed."""
    output = root / "output"
    process = _CONTEXT.Process(target=_pytest, args=(root, [*dict.fromkeys(wanted)], output))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Tried(("(not ended)",))
    said = output.read_text() if output.exists() else "it did not begin"
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", said, re.MULTILINE)
    if process.exitcode == (1 if failed else 0):
        return Tried(tuple(dict.fromkeys(failed)))
    return Tried((), f"pytest ended with {process.exitcode}: {said[-1000:]}")


def _pytest(root: Path, wanted: list[str], output: Path) -> None:
    """Run tests of another tree in this process, which was forked from one that has imported the libraries."""
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT), str(root)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tuningfork")]:
        del sys.modules[name]  # this tree's
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    status = pytest.main(["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-W", imported, *wanted])
    sys.stdout.flush()
    os._exit(int(status))


def _copy(root: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", ".tokenizers", "model"))
        elif source.exists():
            shutil.copy(source, root / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[one.name for one in MUTATIONS])
    parser.add_argument("--list", action="store_true", help="name the mutations and their tests, and stop")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if options.only is None or one.name in options.only]
    if options.list:
        print("\n".join(f"{one.name}: {one.old!r} -> {one.new!r}, {', '.join(one.tests)}" for one in chosen))
        return 0

    _CONTEXT.set_forkserver_preload(LIBRARIES)
    os.environ["HF_HUB_OFFLINE"] = "1"
    lost, survived = [], []
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        root = Path(name)
        _copy(root)
        places, wanted = {}, {}
        for one in chosen:
            try:
                places[one.name], wanted[one.name] = place(one, root), nodes(one, root)
            except NotFound as error:
                lost.append(one.name)
                print(f"NOT FOUND  {error}", flush=True)
        whole = _run(root, [node for some in wanted.values() for node in some], SECONDS * 2)
        if whole.trouble or "(not ended)" in whole.failed:
            print(f"Without any mutation the tests cannot be run: {whole.trouble or 'they do not end'}")
            return 1
        if whole.failed:
            print(f"These fail without any mutation, and so tell nothing: {', '.join(whole.failed)}", flush=True)
        for one in (one for one in chosen if one.name in wanted):
            path, mutated = places[one.name]
            kept, begun = path.read_text(), time.monotonic()
            path.write_text(mutated)
            tried = _run(root, wanted[one.name], SECONDS)
            path.write_text(kept)
            expected = {test.partition("[")[0] for test in one.tests} - {*whole.failed}
            caught_by = [test for test in tried.failed if test not in whole.failed]
            said = f"caught by {', '.join(caught_by)}"
            if tried.trouble or not expected:
                lost.append(one.name)
                said = f"NOT TRIED: {tried.trouble or 'all of its tests fail anyway'}"
            elif not caught_by:
                survived.append(one.name)
                said = "SURVIVED"
            elif "(not ended)" not in caught_by and (passed := sorted(expected - {*caught_by})):
                said += f"; not by {', '.join(passed)}"
            print(f"{one.name:<34} {said} ({time.monotonic() - begun:.0f} s)", flush=True)
    caught = len(chosen) - len(lost) - len(survived)
    print(f"\n{caught} of {len(chosen)} mutations caught, {len(survived)} survived, {len(lost)} not tried")
    return 1 if lost or survived else 0


if __name__ == "__main__":
    sys.exit(main())
