"""What a batch of an evaluation costs."""

from __future__ import annotations

import contenders
from measure import Duel, Outcome, chosen, play
from tables import Table, duel_table, main, ratios

DUELS = [
    Duel("nbtrain", contenders.ours_evaluation, contenders.by_hand_evaluation, max_over_us=25),
    Duel("Lightning", contenders.lightning_evaluation, contenders.by_hand_evaluation),
]


def shown(outcomes: list[Outcome]) -> Table:
    says = f"How long a batch of an evaluation takes beside the same in a plain loop: {ratios(outcomes, 'nbtrain', 'Lightning')}."
    return duel_table("An evaluation", outcomes, "2,000 batches of 32, loss and accuracy.", says)


def table(n_rounds: int, only: set[str]) -> Table:
    return shown(play(chosen(DUELS, only), n_rounds))


if __name__ == "__main__":
    main(table, 7)
