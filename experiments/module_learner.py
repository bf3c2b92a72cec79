"""FlashSAC built the usual way: modules, in-place state, `backward` and `torch.optim`, for comparison.

The mathematics is that of `functional_sac.cycle`; parameters are registered in the order of its trees' leaves.
An ensemble layer holds both critics' parameters with a leading axis of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec

MEMBERS = 2


class Batch(NamedTuple):
    """A minibatch; the actor sees the first columns of the observation."""

    observation: Tensor  # [B, C]
    action: Tensor  # [B, A]
    reward: Tensor  # [B]
    terminated: Tensor  # [B] float, 0 or 1
    truncated: Tensor  # [B] float, 0 or 1; not used by an update
    next_observation: Tensor  # [B, C]


class UnitLinear(nn.Module):
    """A linear layer with weight rows of norm one and, in a head, a free bias."""

    def __init__(self, inputs: int, outputs: int, members: tuple[int, ...] = (), bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*members, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(*members, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def normalize_parameters(self) -> None:
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True).clamp_min(1e-8))


class EnsembleUnitLinear(UnitLinear):
    """The same for [M, B, inputs]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class BatchNorm(nn.Module):
    """Batch norm whose mode is an argument."""

    momentum, eps = 0.01, 1e-5

    def __init__(self, features: int, members: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*members, features))
        self.bias = nn.Parameter(torch.zeros(*members, features))
        self.register_buffer("running_mean", torch.zeros(*members, features))
        self.register_buffer("running_var", torch.ones(*members, features))

    def forward(self, x: Tensor, training: bool) -> Tensor:
        running = self.running_mean, self.running_var
        return F.batch_norm(x, *running, self.weight, self.bias, training, self.momentum, self.eps)

    @torch.no_grad()
    def normalize_parameters(self) -> None:
        square = self.weight.square().sum(-1, keepdim=True) + self.bias.square().sum(-1, keepdim=True)
        factor = torch.sqrt(self.weight.shape[-1] / (square + 1e-8))
        self.weight.mul_(factor)
        self.bias.mul_(factor)


class EnsembleBatchNorm(BatchNorm):
    """The same for [M, B, features], with statistics for each member."""

    def forward(self, x: Tensor, training: bool) -> Tensor:
        mean = x.mean(1) if training else self.running_mean
        centred = x - mean.unsqueeze(1)
        # torch.var along an inner axis takes several times as long on a CPU.
        var = centred.square().mean(1) if training else self.running_var
        if training:
            with torch.no_grad():
                rows = x.shape[1]
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * (rows / (rows - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return torch.addcmul(self.bias.unsqueeze(1), centred, scale.unsqueeze(1))


class RMSNorm(nn.Module):
    """RMS norm without a bias."""

    def __init__(self, features: int, members: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*members, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight.unsqueeze(-2)

    @torch.no_grad()
    def normalize_parameters(self) -> None:
        square = self.weight.square().sum(-1, keepdim=True)
        self.weight.mul_(torch.sqrt(self.weight.shape[-1] / (square + 1e-8)))


class Block(nn.Module):
    """An inverted residual block of expansion 4."""

    def __init__(self, width: int, members: tuple[int, ...]) -> None:
        super().__init__()
        linear, norm = (EnsembleUnitLinear, EnsembleBatchNorm) if members else (UnitLinear, BatchNorm)
        self.w1 = linear(width, 4 * width, members)
        self.norm1 = norm(4 * width, members)
        self.w2 = linear(4 * width, width, members)
        self.norm2 = norm(width, members)

    def forward(self, x: Tensor, training: bool) -> Tensor:
        y = F.relu(self.norm1(self.w1(x), training))
        return x + F.relu(self.norm2(self.w2(y), training))


class Trunk(nn.Module):
    """Everything below the heads."""

    def __init__(self, inputs: int, width: int, blocks: int, members: tuple[int, ...] = ()) -> None:
        super().__init__()
        linear, norm = (EnsembleUnitLinear, EnsembleBatchNorm) if members else (UnitLinear, BatchNorm)
        self.norm = norm(inputs, members)
        self.w = linear(inputs, width, members)
        self.blocks = nn.ModuleList([Block(width, members) for _ in range(blocks)])
        self.post_norm = RMSNorm(width, members)

    def forward(self, x: Tensor, training: bool) -> Tensor:
        h = self.w(self.norm(x, training))
        for block in self.blocks:
            h = block(h, training)
        return self.post_norm(h)


class Actor(nn.Module):
    """A tanh Gaussian policy."""

    def __init__(self, observation_dim: int, action_dim: int, width: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Trunk(observation_dim, width, blocks)
        self.mean = UnitLinear(width, action_dim, bias=True)
        self.std = UnitLinear(width, action_dim, bias=True)

    def forward(self, observation: Tensor, noise: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """Returns actions [B, A] and their log-probabilities [B]."""
        h = self.trunk(observation, training)
        log_std = -10.0 + 6.0 * (1.0 + torch.tanh(self.std(h)))
        u = self.mean(h) + torch.exp(log_std) * noise
        gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        jacobian = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        return torch.tanh(u), (gaussian - jacobian).sum(-1)


class Critic(nn.Module):
    """Two critics over the same inputs."""

    def __init__(self, input_dim: int, bins: int, width: int, blocks: int, low: float, high: float) -> None:
        super().__init__()
        self.trunk = Trunk(input_dim, width, blocks, (MEMBERS,))
        self.head = EnsembleUnitLinear(width, bins, (MEMBERS,), bias=True)
        self.register_buffer("atoms", torch.linspace(low, high, bins))

    def forward(self, observation: Tensor, action: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """Returns expected returns [2, B] and log-probabilities of the bins [2, B, bins]."""
        x = torch.cat([observation, action], -1).expand(MEMBERS, -1, -1)
        log_probs = F.log_softmax(self.head(self.trunk(x, training)), -1)
        return torch.exp(log_probs) @ self.atoms, log_probs


class ModuleLearner(nn.Module):
    """Networks, optimizers and replay of one run; an update changes them in place.

    Args:
      config: the algorithm.
      spec: sizes; the actor sees the first `actor_dim` columns of the critic's observation.
      replay: all transitions.
      return_var: (), variance of the running return.
      return_max: (), its largest magnitude.
    """

    def __init__(self, config: SACConfig, spec: EnvSpec, replay: Batch, return_var: Tensor, return_max: Tensor) -> None:
        super().__init__()
        self.config, self.spec, self.replay = config, spec, replay
        self.return_var, self.return_max = return_var, return_max
        device, blocks = replay.reward.device, config.num_blocks
        critic_dim = (spec.critic_dim or spec.actor_dim) + spec.action_dim
        shape = (critic_dim, config.bins, config.critic_width, blocks, config.min_value, config.max_value)
        self.actor = Actor(spec.actor_dim, spec.action_dim, config.actor_width, blocks).to(device)
        self.critic, self.target = Critic(*shape).to(device), Critic(*shape).to(device).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.initial_temperature), device=device))
        self.target_entropy = 0.5 * spec.action_dim * math.log(2 * math.pi * math.e * config.target_sigma**2)
        self.actor_optimizer, self.actor_schedule = self._optimizer(self.actor.parameters())
        self.critic_optimizer, self.critic_schedule = self._optimizer(self.critic.parameters())
        self.temperature_optimizer, self.temperature_schedule = self._optimizer([self.log_temperature])
        self.updates = 0

    def _optimizer(
        self, parameters: Iterable[nn.Parameter]
    ) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
        parameters = list(parameters)
        optimizer = torch.optim.Adam(parameters, lr=self.config.lr_peak, fused=parameters[0].is_cuda or None)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_factor)

    def _rate_factor(self, step: int) -> float:
        c = self.config
        if step < c.lr_warmup_updates:
            return (c.lr_init + (c.lr_peak - c.lr_init) * step / c.lr_warmup_updates) / c.lr_peak
        phase = min(1.0, (step - c.lr_warmup_updates) / max(1, c.lr_decay_updates - c.lr_warmup_updates))
        return (c.lr_end + (c.lr_peak - c.lr_end) * (1 + math.cos(math.pi * phase)) / 2) / c.lr_peak

    def step(self) -> dict[str, Tensor]:
        """Samples a batch and makes one update, with the actor in every second one."""
        with_actor = self.updates % self.config.actor_update_period == 0
        self.updates += 1
        return self.update(*self.draw(with_actor))

    def rows(self) -> Tensor:
        """Returns which transitions make a batch, [B]."""
        return torch.randint(len(self.replay.reward), (self.config.batch_size,), device=self.replay.reward.device)

    def draw(self, with_actor: bool) -> tuple[Batch, Tensor | None, Tensor]:
        """Returns a batch with scaled rewards, and the noise of both parts of an update."""
        rows = self.rows()
        batch = Batch(*(x[rows] for x in self.replay))
        divisor = torch.maximum(torch.sqrt(self.return_var + 1e-8), self.return_max / self.config.return_bound)
        batch = batch._replace(reward=batch.reward / divisor)
        actor_noise = torch.randn(2 * len(rows), self.spec.action_dim, device=rows.device) if with_actor else None
        critic_noise = torch.randn(len(rows), self.spec.action_dim, device=rows.device)
        return batch, actor_noise, critic_noise

    def update(self, batch: Batch, actor_noise: Tensor | None, critic_noise: Tensor) -> dict[str, Tensor]:
        """Updates actor and temperature (if there is noise for them), then critic and target, then the rates."""
        metrics = self.descend(batch, actor_noise, critic_noise)
        self.advance(actor_noise is not None)
        return metrics

    def advance(self, with_actor: bool) -> None:
        """Counts an update in the schedules of the learning rates."""
        self.critic_schedule.step()
        if with_actor:
            self.actor_schedule.step()
            self.temperature_schedule.step()

    def descend(self, batch: Batch, actor_noise: Tensor | None, critic_noise: Tensor) -> dict[str, Tensor]:
        """Makes an update at the learning rates as they are."""
        metrics = {}
        if actor_noise is not None:
            metrics = self._update_actor(batch, actor_noise)
            metrics |= self._update_temperature(metrics["entropy"])
        metrics |= self._update_critic(batch, critic_noise)
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                old.lerp_(new, self.config.tau)
        return metrics

    def _update_actor(self, batch: Batch, noise: Tensor) -> dict[str, Tensor]:
        rows = len(batch.reward)
        both = torch.cat([batch.observation, batch.next_observation])[:, : self.spec.actor_dim]
        action, log_prob = (x[:rows] for x in self.actor(both, noise, training=True))
        self.critic.requires_grad_(False)
        qs, _ = self.critic(batch.observation, action, training=False)
        self.critic.requires_grad_(True)
        q = qs.amin(0)
        loss = (self.log_temperature.exp().detach() * log_prob - q).mean()
        _descend(loss, self.actor_optimizer, self.actor)
        metrics = {"actor_loss": loss, "entropy": -log_prob.mean(), "mean_action": action.mean(), "q": q.mean()}
        return {name: x.detach() for name, x in metrics.items()}

    def _update_temperature(self, entropy: Tensor) -> dict[str, Tensor]:
        temperature = self.log_temperature.exp()
        loss = temperature * (entropy - self.target_entropy)
        _descend(loss, self.temperature_optimizer)
        return {"temperature_loss": loss.detach(), "temperature": temperature.detach()}

    def _update_critic(self, batch: Batch, noise: Tensor) -> dict[str, Tensor]:
        rows = len(batch.reward)
        with torch.no_grad():
            after = batch.next_observation
            next_action, next_log_prob = self.actor(after[:, : self.spec.actor_dim], noise, training=False)
            entropy_term = self.log_temperature.exp() * next_log_prob
            observation = torch.cat([batch.observation, after])
            action = torch.cat([batch.action, next_action])
            qs, log_probs = self.target(observation, action, training=True)
            member = qs[:, rows:].argmin(0)
            chosen = log_probs[member, torch.arange(rows, len(observation), device=member.device)]
            goal = self._project(chosen.exp(), batch, entropy_term)
        _, log_probs = self.critic(observation, action, training=True)
        loss = -(goal * log_probs[:, :rows]).sum(-1).mean()
        _descend(loss, self.critic_optimizer, self.critic)
        return {"critic_loss": loss.detach(), "max_entropy_bonus": entropy_term.amax()}

    def _project(self, probs: Tensor, batch: Batch, entropy_term: Tensor) -> Tensor:
        """Shares each moved atom's mass between its two neighbours, [B, bins]."""
        c, atoms = self.config, self.critic.atoms
        discount = (c.gamma**c.n_step * (1.0 - batch.terminated)).unsqueeze(-1)
        moved = batch.reward.unsqueeze(-1) + discount * (atoms - entropy_term.unsqueeze(-1))
        position = (moved.clamp(c.min_value, c.max_value) - c.min_value) * ((c.bins - 1) / (c.max_value - c.min_value))
        lower = position.floor()
        fraction = position - lower
        index = lower.long()
        goal = torch.zeros_like(probs)
        goal.scatter_add_(1, index, probs * (1.0 - fraction))
        goal.scatter_add_(1, (index + 1).clamp_max(c.bins - 1), probs * fraction)
        return goal


def normalize(network: nn.Module) -> None:
    """Projects the parameters of every layer."""
    for layer in network.modules():
        if hasattr(layer, "normalize_parameters"):
            layer.normalize_parameters()


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer, network: nn.Module | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if network:
        normalize(network)
