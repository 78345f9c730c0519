"""Training on what the model has done: policy gradients and Q-learning in a toy environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from side_by_side import equal, net
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

N_STEPS = 8


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A point on a line that is pushed to the left or to the right, and should stay at 0."""
    state = state + 0.2 * (2 * action[:, None] - 1) + 0.05 * torch.randn_like(state)
    return state, -state.abs().squeeze(1)


@torch.no_grad()
def episode(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and the discounted rewards that follow them, of 16 points side by side."""
    state, states, actions, rewards = torch.randn(16, 1), [], [], []
    for _ in range(N_STEPS):
        action = torch.distributions.Categorical(logits=policy(state)).sample()
        states.append(state)
        actions.append(action)
        state, reward = move(state, action)
        rewards.append(reward)
    returns = [sum(0.9 ** (later - n) * rewards[later] for later in range(n, N_STEPS)) for n in range(N_STEPS)]
    return torch.cat(states), torch.cat(actions), torch.cat(returns)  # pyright: ignore[reportArgumentType]


class Episodes:
    """A loader that plays: each batch is made with the policy as it is then."""

    def __init__(self, policy: nn.Module, n: int) -> None:
        self.policy, self.n = policy, n

    def __len__(self) -> int:  # without it, a loader is read one batch ahead: with the policy before the update
        return self.n

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return (episode(self.policy) for _ in range(self.n))


@pytest.mark.long
def test_reinforce() -> None:
    """Policy gradients: the step plays an episode, and the loader only counts them."""

    def loss_of(policy: Any) -> Tensor:
        states, actions, returns = episode(policy)
        log_probs = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
        return -(log_probs * (returns - returns.mean())).mean()

    class Reinforce(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model)}

    def ours(policy: Any) -> None:
        Reinforce(policy, "cpu", optimizer=Adam(policy.parameters(), lr=1e-2), log_bar=False).run(2, [*range(5)])

    def plain(policy: Any) -> None:
        optimizer = Adam(policy.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(policy).backward()
            optimizer.step()

    equal(ours, plain, lambda: net(1, 2))


def test_ppo() -> None:
    """Proximal policy optimization: an episode is used for four updates, in shuffled parts. The loader plays it."""

    def loss_of(model: Any, states: Tensor, actions: Tensor, returns: Tensor, before: Tensor) -> Tensor:
        values = model["critic"](states).squeeze(1)
        ratio = (torch.distributions.Categorical(logits=model["policy"](states)).log_prob(actions) - before).exp()
        advantage = (returns - values).detach()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return mse_loss(values, returns) - surrogate

    def parts(model: Any, batch: Any) -> Iterator[Any]:
        with torch.no_grad():
            before = torch.distributions.Categorical(logits=model["policy"](batch[0])).log_prob(batch[1])
        for _ in range(4):
            for index in torch.randperm(len(before)).split(64):
                yield [item[index] for item in (*batch, before)]

    class PPO(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            for part in parts(self.model, batch):
                self.optimizers["adam"].zero_grad()
                self.backward(loss_of(self.model, *part))
                self.optimizers["adam"].step()
            return {"return": batch[2].mean()}

    def ours(model: Any) -> None:
        trainer = PPO(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False, count_samples=lambda batch: 1)
        trainer.run(2, Episodes(model["policy"], 3))

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for _ in range(2):
            for batch in Episodes(model["policy"], 3):
                for part in parts(model, batch):
                    optimizer.zero_grad()
                    loss_of(model, *part).backward()
                    optimizer.step()

    equal(ours, plain, lambda: nn.ModuleDict({"policy": net(1, 2), "critic": net(1)}))


def test_ppo_in_a_session() -> None:
    """Each round plays episodes with the policy, and trains on them for two epochs in shuffled batches: the step is automatic."""

    def collect(model: Any) -> DataLoader[Any]:
        states, actions, returns = episode(model["policy"])
        with torch.no_grad():
            before = torch.distributions.Categorical(logits=model["policy"](states)).log_prob(actions)
            advantages = returns - model["critic"](states).squeeze(1)
        return DataLoader(TensorDataset(states, actions, returns, advantages, before), 32, shuffle=True)

    def loss_of(model: Any, batch: Any) -> Tensor:
        states, actions, returns, advantages, before = batch
        ratio = (torch.distributions.Categorical(logits=model["policy"](states)).log_prob(actions) - before).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return mse_loss(model["critic"](states).squeeze(1), returns) - surrogate

    class PPO(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, batch)}

    def ours(model: Any) -> None:
        trainer = PPO(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False)
        with trainer.session(rounds=3, epochs=2) as session:
            for _ in session:
                trainer.run(2, collect(model))

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            loader = collect(model)
            for _ in range(2):
                for batch in loader:
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()

    equal(ours, plain, lambda: nn.ModuleDict({"policy": net(1, 2), "critic": net(1)}))


@pytest.mark.long
def test_dqn() -> None:
    """Q-learning with a replay buffer and a target network. While the buffer fills, the step returns None."""

    def act(model: Any, state: Tensor, memory: deque[Any]) -> Tensor:
        explores = torch.rand(16) < 0.3
        with torch.no_grad():
            action = torch.where(explores, torch.randint(2, (16,)), model["online"](state).argmax(1))
        after, reward = move(state, action)
        memory.append((state, action, reward, after))
        return after

    def loss_of(model: Any, memory: deque[Any]) -> Tensor:
        state, action, reward, after = memory[int(torch.randint(len(memory), ()))]
        with torch.no_grad():
            goal = reward + 0.9 * model["target"](after).amax(1)
        return mse_loss(model["online"](state)[range(16), action], goal)

    class DQN(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any] | None:
            self.state = act(self.model, self.state, self.memory)
            if self.counts.step % 4 == 0:
                self.model["target"].load_state_dict(self.model["online"].state_dict())
            return {"loss": loss_of(self.model, self.memory), "n_samples": 16} if len(self.memory) > 3 else None

    def ours(model: Any) -> None:
        trainer = DQN(model, "cpu", optimizer=Adam(model["online"].parameters(), lr=1e-2), log_bar=False)
        trainer.state, trainer.memory = torch.zeros(16, 1), deque(maxlen=10)
        trainer.run(4, [*range(5)])

    def plain(model: Any) -> None:
        optimizer = Adam(model["online"].parameters(), lr=1e-2)
        state, memory, n_updates = torch.zeros(16, 1), deque[Any](maxlen=10), 0
        for _ in range(20):
            state = act(model, state, memory)
            if n_updates % 4 == 0:
                model["target"].load_state_dict(model["online"].state_dict())
            if len(memory) > 3:
                optimizer.zero_grad()
                loss_of(model, memory).backward()
                optimizer.step()
                n_updates += 1

    equal(ours, plain, lambda: nn.ModuleDict({"online": net(1, 2), "target": net(1, 2)}))
