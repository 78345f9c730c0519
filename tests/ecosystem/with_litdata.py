"""An optimized dataset by its StreamingDataLoader, stopped in mid-epoch and resumed by its own state"""

# dependencies = ["litdata"]

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from nbtrain import StateManagerAddon, Trainer

N = 64


def sample(i):
    return {"x": torch.tensor([i / N]), "id": i}


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
        return {"loss": (self.model(batch["x"]) - 2 * batch["x"]).square().mean()}


def train(folder, stop=None):
    global seen, read, stop_after
    seen, read, stop_after = [], [], stop
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    data = Counting("numbers", shuffle=True, seed=1, drop_last=False)
    trainer.run(2, StreamingDataLoader(data, batch_size=4, shuffle=True), resume="auto")
    return trainer, seen


if __name__ == "__main__":
    optimize(sample, list(range(N)), "numbers", chunk_size=8, num_workers=1)
    whole, all_seen = train("whole")
    assert sorted(all_seen[:N]) == list(range(N))
    train("cut", stop=104)
    resumed, rest = train("cut")
    assert rest == all_seen[104:], (rest, all_seen[104:])
    assert len(read) <= len(rest) + 4, f"{len(read)} samples were read for {len(rest)}"
    assert torch.equal(resumed.model.weight, whole.model.weight)
