"""What nbtrain's loader for tensors in memory saves, alone and with a fused optimizer."""

from __future__ import annotations

from functools import partial

import contenders
from contenders import Work
from measure import Duel, Outcome, chosen, play
from tables import Table, duel_table, main, ratios

FUSED = partial(contenders.ours_in_memory, work=Work(fused=True))
DUELS = [
    Duel("nbtrain with TensorLoader", contenders.ours_in_memory, max_ratio=0.75),
    Duel("nbtrain with TensorLoader and fused Adam", FUSED, own_way="fused rounds otherwise", max_ratio=0.55),
]


def shown(outcomes: list[Outcome]) -> Table:
    found = ratios(outcomes, *(duel.name for duel in DUELS))
    says = f"How long a step takes with data that are tensors in memory, beside a plain loop with a DataLoader: {found}."
    return duel_table("Data in memory", outcomes, says=says)


def table(n_rounds: int, only: set[str]) -> Table:
    return shown(play(chosen(DUELS, only), n_rounds))


if __name__ == "__main__":
    main(table, 5)
