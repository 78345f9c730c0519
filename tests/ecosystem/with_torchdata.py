"""StatefulDataLoader with two workers, stopped in mid-epoch and resumed by its own state"""

# dependencies = ["torchdata"]

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from nbtrain import StateManagerAddon, Trainer

N = 64


class Numbers(Dataset):
    """Each sample, and how many samples its worker has read before it."""

    n_read = -1

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.n_read += 1
        return torch.tensor([i / N]), i, self.n_read


class Line(Trainer):
    """Learns y = 2x, and keeps the samples that it was given."""

    def train_step(self, batch):
        x, index, n_read = batch
        seen.extend(index.tolist())
        most_read.append(n_read.max().item() + 1)
        if len(seen) == stop_after:
            self.stop()
        return {"loss": (self.model(x) - 2 * x).square().mean()}


def train(folder, stop=None):
    global seen, most_read, stop_after
    seen, most_read, stop_after = [], [], stop
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    trainer.run(2, StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2), resume="auto")
    return trainer, seen, max(most_read)


whole, all_seen, _ = train("whole")
train("cut", stop=104)  # of 128: 24 of the second epoch are left
resumed, rest, n_read = train("cut")
assert rest == all_seen[104:]
assert n_read <= 24 / 2 + 4, "each of two workers reads what is left, and no more"
assert torch.equal(resumed.model.weight, whole.model.weight)
