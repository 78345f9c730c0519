"""What a training step costs: nbtrain and its peers over the plain loop."""

from __future__ import annotations

import contenders
from measure import Duel, Outcome, play
from tables import DUEL_COLUMNS, Claim, Row, Table, at_most, duel_row, less_than, main

OURS = "nbtrain", "nbtrain, output to a file"
BLIND = "plain loop, nothing tracked"
OWN_ORDER = "own order"
DUELS = [
    Duel("plain loop again", contenders.plain),
    Duel("plain loop, metrics as tensors", contenders.plain_as_tensors, every=3),
    Duel(BLIND, contenders.plain_untracked, every=3),
    Duel("nbtrain", contenders.ours),
    Duel("nbtrain, output to a file", contenders.ours, terminal=False),
    Duel("plain loop + tqdm", contenders.plain_tqdm, every=3),
    Duel("Lightning", contenders.lightning, every=3),
    Duel("Fabric", contenders.fabric, every=3),
    Duel("accelerate", contenders.accelerate, every=3),
    Duel("HF Trainer", contenders.hf_trainer, own_way="own order, clips", every=3),
    Duel("fastai", contenders.fastai, every=3),
    Duel("Keras 3 on torch", contenders.keras, own_way="own start", every=3),
    Duel("ignite", contenders.ignite, every=3),
    Duel("skorch", contenders.skorch, own_way=OWN_ORDER, every=3),
]


def chosen(duels: list[Duel], only: set[str]) -> list[Duel]:
    """The duels of these names; all without any."""
    return [duel for duel in duels if not only or duel.name in only]


def judged(outcomes: list[Outcome]) -> list[Row]:
    """The rows, with what is claimed of ours against all that were there."""
    by_name = {outcome.duel.name: outcome for outcome in outcomes}
    peers = [o for o in outcomes if o.rounds and o.duel.name not in OURS and not o.duel.name.startswith(("plain loop again", "plain loop,"))]
    rows = []
    for outcome in outcomes:
        claims: list[Claim] = []
        if outcome.duel.name in OURS:
            claims = at_most(outcome, ratio=1.10, over_us=40, aims=True) + less_than(outcome, by_name.get("Lightning"), 35)
            if peers:
                nearest = min(peers, key=lambda peer: peer.over_us)
                claims += less_than(outcome, nearest, 1)
        rows.append(duel_row(outcome, claims))
    return rows


def table(n_rounds: int, only: set[str]) -> Table:
    title = "A training step: MLP 32→64→2, batch 32, 2,000 steps, Adam, loss and accuracy tracked, one CPU thread"
    return Table(title, DUEL_COLUMNS, tuple(judged(play(chosen(DUELS, only), n_rounds))))


if __name__ == "__main__":
    main(table, 9)
