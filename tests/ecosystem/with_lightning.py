"""Lightning's own example modules and data, unchanged, by `Trainer.from_lightning`; the losses of `lightning.Trainer`"""

# dependencies = ["lightning"]

import lightning as L
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel, ManualOptimBoringModel, RandomDataset
from torch.utils.data import DataLoader, Dataset

from nbtrain import Trainer


class Offline(LightningTransformer):
    def prepare_data(self):
        """Lightning's own downloads WikiText2, which `Tokens` stands for."""


class Tokens(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        row = (torch.arange(21) + i) % 50
        return row[:-1], row[1:]


def train(module, data, n_epoch):
    """The weights after nbtrain's run and after Lightning's, of the same module."""
    weights = []
    for by_nbtrain in (True, False):
        torch.manual_seed(0)
        made = module()
        torch.manual_seed(1)
        if by_nbtrain:
            trainer = Trainer.from_lightning(made, device="cpu")
            trainer.run(n_epoch, data())
            assert isinstance(trainer.model, type(made)) and trainer.history.epochs[-1]["train_loss"] >= 0
        else:
            quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
            L.Trainer(max_epochs=n_epoch, accelerator="cpu", **quiet).fit(made, data())
        weights.append([p.detach().clone() for p in made.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights)), f"{module} learned something else"


train(BoringModel, BoringDataModule, 2)
train(ManualOptimBoringModel, BoringDataModule, 2)
train(BoringModel, lambda: DataLoader(RandomDataset(32, 64), batch_size=8), 2)
train(lambda: Offline(vocab_size=50), lambda: DataLoader(Tokens(), batch_size=4, shuffle=True), 1)
train(DemoModel, lambda: DataLoader(RandomDataset(32, 64), batch_size=8), 1)

trainer = Trainer.from_lightning(BoringModel(), device="cpu")
data = BoringDataModule()
trainer.run(1, data)
assert trainer.evaluate(data) is not None and len(trainer.inference(DataLoader(RandomDataset(32, 8), batch_size=4))) > 0
