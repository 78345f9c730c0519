"""Steps a second in two processes: nbtrain under torchrun against a plain DistributedDataParallel loop under torchrun.

Both train in the same two processes, in turns, so that they have the same neighbours; in odd rounds nbtrain goes first. The clock is
wall time, because waiting for the other rank is a part of such a step; so the machine should have nothing else to do. It begins after the
first 200 steps, and the window of 100 steps at the 20th percentile counts, as in `measure`: where another process interrupts one rank, both
wait. gloo on the CPU, one thread each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tables import Claim, Row, Table, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workload import BATCH_SIZE, N_FEATURES, WARM_UP, WINDOW, Clock, adam, make_data

from nbtrain import MultiGPUAddon, Trainer

N_PROCESSES = 2
SIZES = {"10,000": (83, 1200), "1,000,000": (980, 1200), "10,000,000": (3143, 400)}  # parameters: width, steps by rank


class WallClock(Clock):
    """Reads the time at each forward."""

    def tick(self) -> None:
        self.reads_s.append(time.perf_counter())

    @property
    def steps_per_s(self) -> float:
        reads_s = self.reads_s[WARM_UP::WINDOW]
        windows_s = sorted(after - before for before, after in zip(reads_s, reads_s[1:]))
        return WINDOW / windows_s[len(windows_s) // 5]


class Net(nn.Module):
    def __init__(self, width: int, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layers = nn.Sequential(nn.Linear(N_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.tick()
        return self.layers(x)


def make_net(width: int, clock: Clock) -> Net:
    torch.manual_seed(0)
    return Net(width, clock)


def plain_ddp(width: int, n_steps: int, clock: Clock) -> nn.Module:
    """What PyTorch's tutorial shows, with loss and accuracy tracked as `contenders.plain` does."""
    model = DistributedDataParallel(net := make_net(width, clock))
    optimizer = adam(model.parameters())
    dataset = TensorDataset(*make_data(n_steps * N_PROCESSES))
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=True))
    loss_sum, n_right = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for x, y in loader:
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.detach() * len(y)
        n_right += (logits.argmax(1) == y).sum()
    return net


class Classify(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}


def ours(width: int, n_steps: int, clock: Clock) -> nn.Module:
    """nbtrain with its defaults."""
    dataset = TensorDataset(*make_data(n_steps * N_PROCESSES))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Classify.add_on(MultiGPUAddon)(make_net(width, clock), "cpu", optimizer=adam, save_path=folder)
        trainer.run(1, DataLoader(dataset, BATCH_SIZE, shuffle=True))
    return trainer.model


def measured(train: Callable[..., Any], width: int, n_steps: int) -> float:
    dist.barrier()
    train(width, n_steps, clock := WallClock())
    return clock.steps_per_s


def rank(path: Path, n_rounds: int, size: str) -> None:
    """One of the processes. Rank 0 writes what was found: steps a second of (plain, ours) by round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = []
    for i in range(n_rounds):
        pair = [plain_ddp, ours][:: -1 if i % 2 else 1]
        found = {train: measured(train, *SIZES[size]) for train in pair}
        rounds.append((found[plain_ddp], found[ours]))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rounds))


def play(n_rounds: int, size: str) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", N_PROCESSES, __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*map(str, command), str(path), str(n_rounds), size], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def row(name: str, rounds: list[tuple[float, float]]) -> Row:
    plain, own, ratio = (median(values) for values in zip(*((a, b, b / a) for a, b in rounds)))
    ratios = sorted(b / a for a, b in rounds)
    return made_row(name, own, plain, ratio, ratios[0], ratios[-1])


def made_row(name: str, own: float, plain: float, ratio: float, lowest: float, highest: float) -> Row:
    claim = Claim("{:.2f} ×", ratio, 0.97, at_least=True)
    return Row((name, f"{own:.0f}", f"{plain:.0f}", claim, f"{lowest:.2f} to {highest:.2f}"), bar=ratio)


def table(n_rounds: int, only: set[str]) -> Table:
    """Three rounds of the largest model, in which a step takes a tenth of a second."""
    return shown([row(size, play(3 if size == "10,000,000" else n_rounds, size)) for size in SIZES if not only or size in only])


def shown(rows: list[Row]) -> Table:
    found = ", ".join(f"{row.bar or 0:.2f} × ({row.cells[0]} parameters)" for row in rows)
    says = f"How many steps a second two processes make, beside plain DistributedDataParallel under torchrun: {found}."
    note = f"MLPs of three layers, batch {BATCH_SIZE}, gloo. Medians over the rounds, of wall time."
    return Table(
        "Two processes",
        ("parameters", "nbtrain, steps/s", "plain DDP, steps/s", "nbtrain of plain", "in the rounds"),
        tuple(rows),
        note,
        says,
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        main(table, 9)
