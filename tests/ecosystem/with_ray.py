"""Ray Tune runs trials in separate processes; each reports its epochs, and the best is found"""

# dependencies = ["ray[tune]"]

import ray
from ray import tune


def train(config):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from nbtrain import Callback, Trainer

    class Regress(Trainer):
        def train_step(self, batch):
            inputs, target = batch
            return {"loss": (self.model(inputs) - target).square().mean()}

        def test_step(self, batch):
            return self.train_step(batch)

    class Report(Callback):
        def on_validation_end(self, pl_trainer, pl_module):
            if not pl_trainer.sanity_checking:
                tune.report({"val_loss": pl_trainer.callback_metrics["val_loss"].item()})

    torch.manual_seed(0)
    x = torch.randn(160, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sgd = lambda params: torch.optim.SGD(params, lr=config["lr"])  # noqa: E731
    trainer = Regress(torch.nn.Linear(4, 1), "cpu", optimizer=sgd, log_bar=False, lightning={"callbacks": [Report()]})
    trainer.run(4, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=80))


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([1e-4, 1e-2, 1e-1])},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=f"{__import__('os').getcwd()}/results", verbose=0),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    best = results.get_best_result()
    assert best.config["lr"] == 1e-1 and best.metrics["training_iteration"] == 4
    ray.shutdown()
