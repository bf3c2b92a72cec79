"""The learner made of modules as CUDA graphs, over a replay that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.module_learner import Batch, ModuleLearner, UnitLinear, normalize
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec

WARM_UPS = 3  # calls before a capture, which compile and let cuBLAS take its workspace


class Graph:
    """A function without arguments; on CUDA it is captured in the first call and replayed in every one.

    Args:
      function: computes in place; what it returns holds until the next call.
      device: where it computes.
      changed: the tensors that it changes, put back behind the calls that warm it up.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, changed: Iterable[Tensor] = ()) -> None:
        self._function, self._changed = function, tuple(changed)
        self._cuda, self._graph, self._found = device.type == "cuda", None, None

    def __call__(self) -> Any:
        """Returns what the function returns."""
        if not self._cuda:
            return self._function()
        if self._graph is None:
            self._capture()
        self._graph.replay()
        return self._found

    def _capture(self) -> None:
        before = [x.detach().clone() for x in self._changed]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._found = self._function()
        with torch.no_grad():
            for now, then in zip(self._changed, before, strict=True):
                now.copy_(then)


class Learner(ModuleLearner):
    """A fresh learner with a replay that grows, whose update is made of tensors and can be captured.

    Args:
      config: the algorithm.
      spec: sizes.
      device: of everything.

    Attributes:
      table: [capacity, columns], the transitions that `replay` has views of.
      size: (), how many of its rows are filled.
    """

    def __init__(self, config: SACConfig, spec: EnvSpec, device: torch.device) -> None:
        widths = [spec.actor_dim, spec.action_dim, 1, 1, 1, spec.actor_dim]  # as the fields of a batch
        table = torch.zeros(config.replay_capacity, sum(widths), device=device)
        seen, action, *scalars, following = table.split(widths, 1)
        replay = Batch(seen, action, *(x[:, 0] for x in scalars), following)
        super().__init__(config, spec, replay, torch.ones((), device=device), torch.zeros((), device=device))
        self.table, self.size = table, torch.zeros((), device=device)
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, UnitLinear):
                    for weight in layer.weight.view(-1, *layer.weight.shape[-2:]):
                        nn.init.orthogonal_(weight)
        normalize(self)
        self.target.load_state_dict(self.critic.state_dict())

    def _optimizer(self, parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Adam, LambdaLR]:
        parameters = list(parameters)
        # A graph reads the rate from a tensor, and the moments must be there before it is captured.
        rate = torch.tensor(self.config.lr_peak, device=parameters[0].device)
        optimizer = torch.optim.Adam(parameters, lr=rate, capturable=rate.is_cuda)
        for x in parameters:
            moments = {name: torch.zeros_like(x, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[x] = {"step": torch.zeros((), device=x.device), **moments}
        return optimizer, LambdaLR(optimizer, self._rate_factor)

    def compile_networks(self) -> None:
        """Compiles the forward and backward passes."""
        for network in (self.actor, self.critic, self.target):
            network.forward = torch.compile(network.forward, dynamic=False)

    def changed(self) -> list[Tensor]:
        """Returns the tensors that an update changes."""
        optimizers = self.actor_optimizer, self.critic_optimizer, self.temperature_optimizer
        moments = [x for optimizer in optimizers for state in optimizer.state.values() for x in state.values()]
        return [*self.parameters(), *self.buffers(), *moments]

    def rows(self) -> Tensor:
        """Returns which of the filled rows make a batch."""
        return (torch.rand(self.config.batch_size, device=self.size.device) * self.size).long()

    def learn(self, with_actor: bool) -> None:
        """Draws a batch and makes an update at the learning rates as they are."""
        self.descend(*self.draw(with_actor))
