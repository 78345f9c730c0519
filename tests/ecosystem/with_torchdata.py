"""StatefulDataLoader with two workers that augment at random, stopped in mid-epoch and resumed"""

# dependencies = ["torchdata"]

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from nbtrain import StateManagerAddon, Trainer

N = 64


class Numbers(Dataset):
    """Samples with noise."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i / N]) + 0.1 * torch.randn(1), i


class Line(Trainer):
    """Learns y = 2x, and keeps the samples that it was given."""

    def train_step(self, batch):
        x, index = batch
        seen.extend(index.tolist())
        if len(seen) == stop_after:
            self.stop()
        return {"loss": (self.model(x) - 2 * x).square().mean()}


def train(folder, stop=None):
    global seen, stop_after
    seen, stop_after = [], stop
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    trainer.run(2, StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2), resume="auto")
    return trainer, seen


whole, all_seen = train("whole")
train("cut", stop=104)  # of 128: 24 of the second epoch are left
resumed, rest = train("cut")
assert rest == all_seen[104:]
assert torch.equal(resumed.model.weight, whole.model.weight)
