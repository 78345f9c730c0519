# ==== samples.Regress · samples.py
class Regress(Trainer):
    """Predicts one number; records the loss and the mean absolute error."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x)
        return {"loss": mse_loss(output, y), "mae": (output - y).abs().mean(), "output": output}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


# ==== samples.make_trainer.<locals>.<lambda> · samples.py
options = {"device": "cpu", "log_bar": False, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2)} | options
