"""What nbtrain's loader for tensors in memory saves, alone and with a fused optimizer."""

from __future__ import annotations

from functools import partial

import contenders
from contenders import Work
from measure import Duel, chosen, play
from tables import Table, duel_table, main

FUSED = partial(contenders.ours_in_memory, work=Work(fused=True))
DUELS = [
    Duel("nbtrain with TensorLoader", contenders.ours_in_memory, max_ratio=0.75),
    Duel("nbtrain with TensorLoader and fused Adam", FUSED, own_way="fused rounds otherwise", max_ratio=0.55),
]


def table(n_rounds: int, only: set[str]) -> Table:
    return duel_table("Data in memory, over the plain loop with its DataLoader", play(chosen(DUELS, only), n_rounds))


if __name__ == "__main__":
    main(table, 5)
