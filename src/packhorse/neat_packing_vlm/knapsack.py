"""The documented planning functions: lists in, lists of lists out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packhorse.neat_packing_vlm.plan import as_integers, plan_packs


def greedy_knapsack(lengths: npt.ArrayLike, max_length: int) -> list[list[int]]:
    """Put samples into bins by best fit decreasing.

    >>> greedy_knapsack([5, 3, 4, 20], 8)
    [[0, 1], [2]]

    Args:
        lengths: tokens of each sample.
        max_length: what a bin holds.

    Returns:
        Lists of positions. Every sample of at most ``max_length`` tokens is in exactly one of them; longer
        ones are in none. :func:`plan_packs` names those and needs fewer bins for hard mixes.
    """
    return plan_packs(lengths, max_length, effort=0, empty="keep").bins()


def greedy_knapsack_vt_balanced(
    lengths: npt.ArrayLike, max_length: int, visual_tokens: npt.ArrayLike
) -> list[list[int]]:
    """The bins of :func:`greedy_knapsack`, ordered so that neighbours carry similar visual tokens.

    Ranks that take consecutive packs of a step then have a similar load on the vision encoder. The cost model
    of ``balance`` knows more: it counts the language model and attention too, and shuffles.

    Args:
        lengths: tokens of each sample, media included.
        max_length: what a bin holds.
        visual_tokens: media tokens of each sample.
    """
    plan = plan_packs(lengths, max_length, effort=0, empty="keep")
    visual = as_integers(visual_tokens, "visual_tokens", plan.samples).astype(np.int64)
    bins = plan.bins()
    return [bins[pack] for pack in np.argsort(plan.sums(visual), kind="stable").tolist()]
