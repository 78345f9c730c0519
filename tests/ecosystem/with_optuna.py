"""A study over learning rates that prunes runs after each epoch"""

# dependencies = ["optuna"]

import optuna
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Callback, Trainer

torch.manual_seed(0)
x = torch.randn(160, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))


class Regress(Trainer):
    def train_step(self, batch):
        inputs, target = batch
        return {"loss": (self.model(inputs) - target).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


class Prune(Callback):
    """Reports each epoch to a trial, and ends a run without promise."""

    def __init__(self, trial):
        self.trial = trial

    def on_validation_end(self, pl_trainer, pl_module):
        if not pl_trainer.sanity_checking:
            self.trial.report(pl_trainer.callback_metrics["val_loss"].item(), pl_trainer.current_epoch)
            if self.trial.should_prune():
                raise optuna.TrialPruned


def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=lr)  # noqa: E731
    trainer = Regress(torch.nn.Linear(4, 1), "cpu", optimizer=sgd, nonfinite="stop", log_bar=False, lightning={"callbacks": [Prune(trial)]})
    return trainer.run(6, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=80)).best["val_loss"]


pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
study.optimize(objective, n_trials=12)
states = [trial.state.name for trial in study.trials]
assert study.best_value < 1e-2 and "PRUNED" in states and set(states) <= {"COMPLETE", "PRUNED"}, states
