"""Graph classification: a batch counts its graphs, so that the means are right; the weights of a plain loop"""

# dependencies = ["torch_geometric"]

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphConv, global_mean_pool

from nbtrain import Trainer

torch.manual_seed(0)


def ring_or_star(i):
    n = 4 + i % 5
    ends = [(j, (j + 1) % n) for j in range(n)] if i % 2 else [(0, j) for j in range(1, n)]
    edges = torch.tensor(ends + [(b, a) for a, b in ends]).T
    degrees = torch.bincount(edges[0], minlength=n).float().unsqueeze(1)
    return Data(x=degrees, edge_index=edges, y=torch.tensor([i % 2]))


graphs = [ring_or_star(i) for i in range(50)]


class GNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GraphConv(1, 16), GraphConv(16, 16), torch.nn.Linear(16, 2)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch))


class Classify(Trainer):
    def train_step(self, batch):
        logits = self.model(batch)
        return {
            "loss": cross_entropy(logits, batch.y),
            "acc": (logits.argmax(1) == batch.y).float().mean(),
            "n_graphs": float(batch.num_graphs),
        }

    def test_step(self, batch):
        return self.train_step(batch)


loader = DataLoader(graphs, batch_size=16, shuffle=True)
plain, own = GNN(), GNN()
own.load_state_dict(plain.state_dict())
optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
torch.manual_seed(1)
for _ in range(15):
    for data in loader:
        optimizer.zero_grad()
        cross_entropy(plain(data), data.y).backward()
        optimizer.step()

torch.manual_seed(1)
trainer = Classify(own, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
trainer.run(15, loader)
assert all(torch.equal(value, plain.state_dict()[name]) for name, value in own.state_dict().items())
result = trainer.run(1, loader, DataLoader(graphs, batch_size=16))
assert result.last["val_acc"] > 0.9
assert abs(result.last["val_n_graphs"] - (3 * 16 * 16 + 2 * 2) / 50) < 1e-5  # the mean of all graphs, not of the four batches
