"""The best weights of a run as an ONNX file, whose outputs are the model's"""

# dependencies = ["onnx", "onnxscript", "onnxruntime"]

import numpy as np
import onnx
import onnxruntime
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

torch.manual_seed(0)
x = torch.randn(128, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))


class Regress(Trainer):
    def train_step(self, batch):
        inputs, target = batch
        return {"loss": (self.model(inputs) - target).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
trainer = Regress(net, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
trainer.run(3, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
trainer.apply_weights()  # the best
rows = {0: torch.export.Dim("rows")}
torch.onnx.export(trainer.model.eval(), (x[:2],), "net.onnx", dynamic_shapes=(rows,), dynamo=True)

onnx.checker.check_model(onnx.load("net.onnx"))
session = onnxruntime.InferenceSession("net.onnx")
found = session.run(None, {session.get_inputs()[0].name: x[:50].numpy()})[0]
assert np.allclose(found, trainer.predict(x[:50]).numpy(), atol=1e-6)
