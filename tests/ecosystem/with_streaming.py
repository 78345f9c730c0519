"""Mosaic's StreamingDataset by its StreamingDataLoader, stopped in mid-epoch and resumed by its own state"""

# dependencies = ["mosaicml-streaming"]

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from nbtrain import StateManagerAddon, Trainer

N = 64
with MDSWriter(out="numbers", columns={"x": "float32", "id": "int"}, size_limit=200) as writer:
    for i in range(N):
        writer.write({"x": i / N, "id": i})


class Counting(StreamingDataset):
    def __getitem__(self, index):
        read.append(index)
        return super().__getitem__(index)


class Line(Trainer):
    """Learns y = 2x, and keeps the samples that it was given."""

    def train_step(self, batch):
        seen.extend(batch["id"].tolist())
        if len(seen) == stop_after:
            self.stop()
        x = batch["x"].float().unsqueeze(1)
        return {"loss": (self.model(x) - 2 * x).square().mean()}


def train(folder, stop=None):
    global seen, read, stop_after
    seen, read, stop_after = [], [], stop
    torch.manual_seed(0)
    clean_stale_shared_memory()
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    data = Counting(local="numbers", shuffle=True, shuffle_seed=1, batch_size=4, num_canonical_nodes=1)
    trainer.run(2, StreamingDataLoader(data, batch_size=4), resume="auto")
    return trainer, seen


whole, all_seen = train("whole")
assert sorted(all_seen[:N]) == list(range(N))
train("cut", stop=104)
resumed, rest = train("cut")
assert rest == all_seen[104:], (rest, all_seen[104:])
assert len(read) <= len(rest) + 4, f"{len(read)} samples were read for {len(rest)}"
assert torch.equal(resumed.model.weight, whole.model.weight)
