"""The two floors under a learner's cycle: its matrix products at the peak rate, its bytes at the memory's."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sac.networks import EXPANSION
from functional_sac.replay import fields


class Peaks(NamedTuple):
    """What a device can do in a second at best."""

    bandwidth: float  # bytes
    bfloat16: float  # FLOP, dense
    float32: float  # FLOP, without TF32
    tf32: float  # FLOP, dense

    def rate(self, precision: str) -> float:
        """Returns the FLOP of a second by the name of a precision."""
        return getattr(self, precision)


PEAKS = {"H200": Peaks(4.8e12, 989e12, 67e12, 494e12)}  # its data sheet


@dataclasses.dataclass(frozen=True)
class Network:
    """A network's sizes, or those of two side by side."""

    inputs: int
    width: int
    blocks: int
    outputs: int
    members: int = 1

    def trunk(self, rows: int) -> int:
        """Returns the multiply-adds below the head."""
        block = 2 * EXPANSION * self.width * self.width
        return self.members * rows * (self.inputs * self.width + self.blocks * block)

    def head(self, rows: int) -> int:
        """Returns the multiply-adds of the head."""
        return self.members * rows * self.width * self.outputs

    def parameters(self) -> int:
        """Returns the number of parameters."""
        blocks = self.blocks * (2 * EXPANSION * self.width * self.width + 2 * (EXPANSION + 1) * self.width)
        below = 2 * self.inputs + self.inputs * self.width + blocks + self.width
        return self.members * (below + self.outputs * (self.width + 1))

    def activations(self, rows: int) -> int:
        """Returns the numbers that a batch norm makes each pass wait for: its inputs, whole."""
        return self.members * rows * (self.width + self.blocks * (EXPANSION + 1) * self.width)


class Floors(NamedTuple):
    """What one cycle cannot do without."""

    flop: int  # of matrix products
    bytes: int  # to and from memory, if nothing stays in a cache between passes

    def milliseconds(self, peaks: Peaks, precision: str) -> dict[str, float]:
        """Returns the shortest times."""
        return {"flop": self.flop / peaks.rate(precision) * 1e3, "bytes": self.bytes / peaks.bandwidth * 1e3}


def floors(config: SACConfig, spec: EnvSpec) -> Floors:
    """Counts one cycle.

    Products: a pass forward; backward once for the inputs and once for the weights. A head counts only for the rows
    whose loss needs it. Under a critic that is not trained only the action's columns of its first layer are
    differentiated.

    Bytes: the drawn rows; parameters read and, where trained, written with two moments and read as a gradient; and
    what a batch norm over the batch needs whole: its input is written once and read once, in training once more
    backward, where its gradient is written and read. Element-wise work is taken as fused into the products.
    """
    updates = config.updates_per_step
    acts = -(-updates // config.actor_update_period)
    b, size = config.batch_size, 2 if config.compute_dtype == "bfloat16" else 4
    critic_input = (spec.critic_dim or spec.actor_dim) + spec.action_dim
    actor = Network(spec.actor_dim, config.actor_width, config.num_blocks, 2 * spec.action_dim)
    critic = Network(critic_input, config.critic_width, config.num_blocks, config.bins, members=2)
    action_only = dataclasses.replace(critic, inputs=spec.action_dim)
    critic_update = actor.trunk(b) + actor.head(b) + 4 * (critic.trunk(2 * b) + critic.head(b))
    actor_update = 3 * (actor.trunk(2 * b) + actor.head(b))
    actor_update += critic.trunk(b) + action_only.trunk(b) + 2 * critic.head(b)
    row = 4 * sum(fields(spec).widths)
    # A step reads and writes parameter and two moments, and writes and reads the gradient; a target is read twice.
    critic_bytes = 4 * (8 + 3) * critic.parameters() + size * (2 + 5) * critic.activations(2 * b) + b * row
    actor_bytes = 4 * 8 * actor.parameters() + size * 5 * actor.activations(2 * b)
    return Floors(
        2 * (updates * critic_update + acts * actor_update), updates * critic_bytes + acts * actor_bytes
    )  # fmt: skip


def peaks() -> Peaks | None:
    """Returns the peaks of the current CUDA device, None for one that is not in the table."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((found for part, found in PEAKS.items() if part in name), None)


def properties() -> dict[str, Any]:
    """Returns what the driver says of the current CUDA device that bears on the floors."""
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {"multiprocessors": found.multi_processor_count, "memory_gib": round(found.total_memory / 2**30, 1)}
    about |= {"l2_mib": round(found.L2_cache_size / 2**20)} if hasattr(found, "L2_cache_size") else {}
    if hasattr(found, "clock_rate"):
        about["fp32_tflops"] = round(found.multi_processor_count * 128 * 2 * found.clock_rate * 1e3 / 1e12, 1)
    if hasattr(found, "memory_clock_rate") and hasattr(found, "memory_bus_width"):
        about["memory_tb_s"] = round(2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8 / 1e12, 2)
    return about
