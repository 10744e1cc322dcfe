"""How evenly the ranks of a step are loaded: packs in random order, sorted by visual tokens, and ours.

    python benchmarks/balance.py [--quick] [--samples 1000000] [--seed 0]

Packs image chats (capacity 8,192), prices the packs with the cost model for a language model of 7 B
parameters and a vision encoder of 0.6 B (sizes of Qwen2.5-VL 7B), assigns them to simulated ranks and prints
the predicted straggler ratio: the most expensive rank of a step over the mean of the step, mean over all
steps. The visual token sort is what the component that Packhorse re-implements does. Exit code 1 if a promise
is missed.
"""

from __future__ import annotations

import numpy as np

from mixes import CAPACITY, chat_parts
from packhorse.neat_packing_vlm import (
    CostWeights,
    order_packs,
    pack_costs,
    pack_media_masks,
    patch_pairs_of,
    plan_packs,
    sample_costs,
    straggler_ratio,
)
from promises import fact, make_parser, parse, promise, record_outcome

RANKS = (8, 64, 512)
MODEL = {
    "text_config": {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064},
        **{"num_attention_heads": 28, "num_key_value_heads": 4},
    },
    "vision_config": {
        **{"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "hidden_act": "silu"},
        **{"fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "patch_size": 14},
    },
}


@record_outcome()
def main() -> None:
    """Plan, order, judge."""
    options = parse(make_parser(__doc__, samples=1_000_000, seed=0), samples=100_000)
    rng = np.random.default_rng(options.seed)
    chats = chat_parts(options.samples, rng)
    plan = plan_packs(chats.lengths, CAPACITY, seed=options.seed)
    offsets = np.concatenate([[0], np.cumsum(chats.images)])
    pairs = patch_pairs_of(4 * chats.image_tokens, offsets)
    weights = CostWeights.of_model(MODEL)
    costs = pack_costs(
        plan,
        sample_costs(chats.lengths, weights, patches=4 * chats.visual, patch_pairs=pairs, items=chats.images),
        weights,
        patches=4 * chats.visual,
    )
    masks = pack_media_masks(plan, image=chats.images)
    print(f"{weights}\n")
    print(plan.with_costs(costs, masks).describe(RANKS))
    spread = np.percentile(costs / costs.mean(), (1, 50, 99))
    print(
        f"cost of a pack over the mean, 1st percentile, median, 99th: {', '.join(f'{s:.2f}' for s in spread)}"
    )
    by_visual = np.argsort(plan.sums(chats.visual), kind="stable")
    orders = {"random order": rng.permutation(len(plan)), "visual token sort": by_visual}
    print(f"\n{'straggler ratio':<22}" + "".join(f"{ranks:>6} ranks" for ranks in RANKS))
    theirs: dict[str, float] = {}
    for name, order in orders.items():
        ratios = [straggler_ratio(costs, in_steps(order, ranks)) for ranks in RANKS]
        theirs[name] = ratios[RANKS.index(64)]
        print(f"{name:<22}" + "".join(f"{ratio:>12.4f}" for ratio in ratios))
    ours = {ranks: order_packs(costs, ranks, media_masks=masks, seed=options.seed) for ranks in RANKS}
    ratios = {ranks: straggler_ratio(costs, order.steps) for ranks, order in ours.items()}
    print(f"{'ours':<22}" + "".join(f"{ratio:>12.4f}" for ratio in ratios.values()))
    print(f"{'  steps, mixed media':<22}" + "".join(steps_and_mixed(order) for order in ours.values()))
    print()
    other = order_packs(costs, 64, media_masks=masks, seed=options.seed, epoch=1)
    together = share_of_pairs_kept(ours[64].steps, other.steps, len(plan))
    for ranks in RANKS:
        fact(f"predicted straggler ratio at {ranks} ranks, ours", ratios[ranks])
    usual = ", ".join(f"{name} {ratio:.3f}" for name, ratio in theirs.items())
    promise(
        f"straggler ratio at 64 ranks, predicted from {weights.basis}",
        *(ratios[64], 1.02),
        baseline=usual,
        unit="",
        at_least=False,
        kind="exact",
    )
    promise(
        "share of neighbours in a step that meet again in the next epoch",
        *(together, 0.2),
        baseline="1.0, the same steps in every epoch",
        unit="",
        at_least=False,
        kind="exact",
    )
    promise(
        "correlation of a step's cost with that of the next",
        *(abs(correlation(costs, ours[64].steps)), 0.1),
        baseline="0, steps in random order",
        unit="",
        at_least=False,
        kind="exact",
    )


def in_steps(order: np.ndarray, ranks: int) -> np.ndarray:
    """One row for each whole step."""
    return order[: len(order) // ranks * ranks].reshape(-1, ranks)


def steps_and_mixed(order: object) -> str:
    """How many steps, and how many of them with mixed media."""
    return f"{len(order.steps):>7,}, {len(order.mixed):>3}"


def share_of_pairs_kept(steps: np.ndarray, others: np.ndarray, packs: int) -> float:
    """How often two packs of one step are in one step of the other order too."""
    step_of = np.full(packs, -1)
    step_of[others.ravel()] = np.repeat(np.arange(len(others)), others.shape[1])
    found = step_of[steps]
    return float((found[:, :-1] == found[:, 1:]).mean())


def correlation(costs: np.ndarray, steps: np.ndarray) -> float:
    """Of the mean costs of consecutive steps: 0 if they are shuffled."""
    means = costs[steps].mean(axis=1)
    return float(np.corrcoef(means[:-1], means[1:])[0, 1])


if __name__ == "__main__":
    main()
