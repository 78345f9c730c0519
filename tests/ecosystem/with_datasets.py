"""A streaming dataset resumed in mid-epoch by its own state; with a shuffle buffer, which the state lacks, by reading again"""

# dependencies = ["datasets"]

from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from nbtrain import StateManagerAddon, Trainer

N = 64
READ = Path("read.txt")  # a list would be restored with the stream, as all that its functions count in


class Line(Trainer):
    """Learns y = 2x, and keeps the samples that it was given."""

    def train_step(self, batch):
        seen.extend(batch["id"].tolist())
        x = batch["x"].unsqueeze(1)
        if len(seen) == stop_after:
            self.stop()
        return {"loss": (self.model(x) - 2 * x).square().mean()}


def read(row):
    with READ.open("a") as file:
        print(row["id"], file=file)
    return row


def train(folder, buffer_size, stop=None):
    """Two epochs, or up to the sample `stop`. Returns the trainer, the samples that it was given, and how many rows were read."""
    global seen, stop_after
    seen, stop_after = [], stop
    READ.unlink(missing_ok=True)
    rows = Dataset.from_dict({"id": list(range(N)), "x": [i / N for i in range(N)]})
    stream = rows.to_iterable_dataset(num_shards=8).map(read).shuffle(seed=1, buffer_size=buffer_size).with_format("torch")
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    trainer.run(2, DataLoader(stream, batch_size=4), resume="auto")
    return trainer, seen, len(READ.read_text().splitlines())


for name, buffer_size, n_read in ("by shards", 1, 24), ("in a buffer", 10, 64):
    whole, all_seen, _ = train(f"whole {name}", buffer_size)
    assert sorted(all_seen[:N]) == sorted(all_seen[N:]) == list(range(N)) and all_seen[:N] != all_seen[N:]
    train(f"cut {name}", buffer_size, stop=104)  # of 128: 24 of the second epoch are left
    resumed, rest, n = train(f"cut {name}", buffer_size)
    assert rest == all_seen[104:]
    assert n <= n_read + 8, f"{n} rows were read for {len(rest)}"
    assert torch.equal(resumed.model.weight, whole.model.weight)
