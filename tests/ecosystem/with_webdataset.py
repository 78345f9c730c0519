"""Shards in tar files, shuffled; a stream without a state is resumed exactly by reading its beginning again, and the record says so"""

# dependencies = ["webdataset"]

import numpy as np
import torch
import webdataset as wds

from nbtrain import StateManagerAddon, Trainer

N = 64
with wds.ShardWriter("shard-%03d.tar", maxcount=16, verbose=0) as writer:
    for i in range(N):
        writer.write({"__key__": f"{i:04d}", "x.npy": np.array([i / N], "float32"), "id.cls": i})


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
    data = wds.WebDataset("shard-{000..003}.tar", shardshuffle=4, detshuffle=True, seed=1)
    data = data.compose(wds.detshuffle(20, seed=1)).decode().to_tuple("x.npy", "id.cls").batched(4)
    torch.manual_seed(0)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Line.add_on(StateManagerAddon)(torch.nn.Linear(1, 1), "cpu", optimizer=sgd, save_path=folder)
    trainer.run(2, wds.WebLoader(data, batch_size=None), resume="auto")
    return trainer, seen


whole, all_seen = train("whole")
assert sorted(all_seen[:N]) == list(range(N))
train("cut", stop=104)
resumed, rest = train("cut")
assert rest == all_seen[104:], (rest, all_seen[104:])
assert torch.equal(resumed.model.weight, whole.model.weight)
assert "Resuming reads 10 batches of this epoch again" in (resumed.run_dir / "events.jsonl").read_text()
