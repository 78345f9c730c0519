"""What a training step costs: nbtrain and its peers over the plain loop."""

from __future__ import annotations

from dataclasses import replace

import contenders
from measure import Duel, Outcome, chosen, play
from tables import DUEL_COLUMNS, Claim, Row, Table, by_ratio, duel_row, less_than, main, ratios

OURS = Duel("nbtrain", contenders.ours, max_ratio=1.10, max_over_us=40)
VARIANTS = [
    Duel("plain loop again", contenders.plain),
    Duel("plain loop (.item() in each step)", contenders.plain_item, every=3),
    Duel("plain loop (nothing tracked)", contenders.plain_untracked, every=3),
    OURS,
    replace(OURS, name="nbtrain (output to a file)", terminal=False),
]
PEERS = [
    Duel("plain loop + tqdm", contenders.plain_tqdm, every=3),
    Duel("Lightning", contenders.lightning, every=3),
    Duel("Fabric", contenders.fabric, every=3),
    Duel("accelerate", contenders.accelerate, every=3),
    Duel("HF Trainer", contenders.hf_trainer, own_way="own order, clips", every=3),
    Duel("fastai", contenders.fastai, every=3),
    Duel("Keras 3 on torch", contenders.keras, own_way="own start", every=3),
    Duel("ignite", contenders.ignite, every=3),
    Duel("skorch", contenders.skorch, own_way="own order", every=3),
]
TITLE = "A training step"
NOTE = """MLP 32→64→2, batch 32, 2,000 steps, Adam, loss and accuracy tracked, one CPU thread. A tool ends with the loop's weights,
bit for bit; where not, brackets say why. The last column is the whole call, with what a tool sets up. Bars show the ratio."""


def judged(outcomes: list[Outcome]) -> list[Row]:
    """The rows; ours are held against the peers that were there, too."""
    peers = {o.duel.name: o for o in outcomes if o.rounds and o.duel.name in {duel.name for duel in PEERS}}
    rows = []
    for outcome in outcomes:
        claims: list[Claim] = []
        if outcome.duel.tool is OURS.tool:
            claims = less_than(outcome, peers.get("Lightning"), 35)
            claims += less_than(outcome, min(peers.values(), key=lambda peer: peer.over_us, default=None), 1)
        rows.append(duel_row(outcome, claims))
    return rows


def shown(outcomes: list[Outcome]) -> Table:
    nearest = next((o.duel.name for o in by_ratio(outcomes) if o.duel in PEERS and o.duel.name != "Lightning"), "")
    found = ratios(outcomes, "nbtrain", nearest, "Lightning")
    says = f"How long a training step takes beside the same step in a plain PyTorch loop: {found}."
    return Table(TITLE, DUEL_COLUMNS, tuple(judged(by_ratio(outcomes))), NOTE, says)


def table(n_rounds: int, only: set[str]) -> Table:
    return shown(play(chosen(VARIANTS + PEERS, only), n_rounds))


if __name__ == "__main__":
    main(table, 7)
