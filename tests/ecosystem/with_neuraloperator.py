"""A Fourier neural operator with complex weights, its AdamW, losses and data processor; the weights of a plain loop, also resumed"""

# dependencies = ["neuraloperator"]

import torch
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from neuralop.losses import H1Loss, LpLoss
from neuralop.models import FNO
from neuralop.training import AdamW
from torch.utils.data import DataLoader

from nbtrain import StateManagerAddon, Trainer

grid = torch.linspace(0, 6.28, 33)[:-1]
shifts = torch.rand(24, generator=torch.Generator().manual_seed(0)) * 6
x = torch.sin(grid + shifts[:, None]).unsqueeze(1)
y = torch.cos(grid + shifts[:, None]).unsqueeze(1) * x  # what the operator makes of a function
loader = DataLoader([{"x": a, "y": b} for a, b in zip(x[:16], y[:16])], batch_size=4, shuffle=True)
loss_of, relative = H1Loss(d=1), LpLoss(d=1, p=2)


def make():
    torch.manual_seed(0)
    normalizers = UnitGaussianNormalizer(dim=[0, 2]), UnitGaussianNormalizer(dim=[0, 2])
    normalizers[0].fit(x[:16])
    normalizers[1].fit(y[:16])
    model = FNO(n_modes=(8,), in_channels=1, out_channels=1, hidden_channels=12, n_layers=2)
    return model, DefaultDataProcessor(*normalizers)


class Operator(Trainer):
    def train_step(self, batch):
        batch = processor.preprocess(batch)
        output, batch = processor.postprocess(self.model(batch["x"]), batch)
        return {"loss": loss_of(output, batch["y"]), "relative": relative(output, batch["y"])}


model, processor = make()
optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
torch.manual_seed(1)
for _ in range(8):
    model.train(), processor.train()
    for batch in loader:
        batch = processor.preprocess(batch)
        output, batch = processor.postprocess(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss_of(output, batch["y"]).backward()
        optimizer.step()
    schedule.step()
plain = model.state_dict()

for n_epochs in (3, 8):  # the second run resumes the first one
    own, processor = make()
    optimizer = AdamW(own.parameters(), lr=5e-3, weight_decay=1e-4)
    trainer = Operator.add_on(StateManagerAddon)(
        own,
        "cpu",
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5),
        save_path="operator",
    )
    torch.manual_seed(1)
    trainer.run(n_epochs, loader, resume="auto")
assert any(value.is_complex() for value in own.parameters())
assert all(torch.equal(value, plain[name]) for name, value in own.state_dict().items() if isinstance(value, torch.Tensor))
losses = [row["train_loss"] for row in trainer.history.epochs]
assert losses[-1] < 0.3 * losses[0], losses
