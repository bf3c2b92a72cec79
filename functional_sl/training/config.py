"""The trainer's settings, in one frozen dataclass that is checked once; the recipe's own stand beside them.

This module imports no torch, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses

from functional_sl.run.checks import require
from functional_sl.run.cli import option

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that a supervised run is told, but for its recipe's own settings."""

    recipe: str | None = option(
        None,
        "package.module:function that builds the task, such as functional_sl.recipes.bc_state:build; one from "
        "anywhere will do. With it, --help lists its settings too.",
        group="Task",
    )
    size: str = option("small", "Named set of defaults that the recipe brings, such as small or paper.")
    seed: int = option(0, "Seed of parameters, sampling and noise; every rank draws from a stream of its own.")
    updates: int = option(1000, "Optimizer updates of the whole run, those before a resume included.", group="Updates")
    batch_size: int = option(64, "Samples of one worker in one micro-batch, drawn with replacement.")
    accumulation: int = option(1, "Micro-batches whose gradients make one update.")
    optimizer: str = option("adam", "The optimizer.", choices=("adam", "adamw", "sgd"), group="Optimizer")
    learning_rate: float = option(1e-3, "Highest learning rate; never scaled by the number of workers.")
    lr_schedule: str = option(
        "constant", "Way of the rate after the warm-up.", choices=("constant", "linear", "cosine")
    )
    lr_end: float = option(0.0, "Rate at the end of a linear or cosine schedule.")
    lr_warmup_updates: int = option(0, "Updates in which the rate rises from 0 in a straight line.")
    lr_decay_updates: int = option(
        0, "Updates until lr_end, warm-up included; 0 takes the updates of the run's first start."
    )
    weight_decay: float = option(0.0, "Decoupled decay of adamw, L2 term of sgd's gradient.")
    momentum: float = option(0.0, "Momentum of sgd.")
    b1: float = option(0.9, "Adam's decay of the mean gradient.")
    b2: float = option(0.999, "Adam's decay of the mean squared gradient.")
    eps: float = option(1e-8, "Adam's term beside the root of the mean square.")
    clip_norm: float | None = option(None, "Bound of the global gradient norm.")
    compute_dtype: str = option(
        "float32", "Autocast of the loss; float32 leaves the recipe's own types. float16 scales the loss.",
        choices=DTYPES, group="Precision and machine",
    )  # fmt: skip
    dp_gradient_wire_dtype: str = option("float32", "Type in which gradients travel between ranks.", choices=DTYPES[:2])
    dp_transport: str = option(
        "nccl",
        "What gradients travel by: nccl (on a CPU Gloo), or peer, where 2, 4 or 8 GPUs of one host write into each "
        "other's memory.",
        choices=("nccl", "peer"),
    )
    device: str = option("auto", "Where the update runs.", choices=("auto", "cpu", "cuda"))
    backend: str = option(
        "auto", "What moves gradients: nccl on CUDA, gloo on a CPU.", choices=("auto", "gloo", "nccl")
    )
    compile: str = option("auto", "Compile the update; auto: on CUDA only.", choices=("auto", "true", "false"))
    cuda_graph: bool = option(True, "Capture the whole update as one CUDA graph; not with float16.")
    deterministic: bool = option(True, "Deterministic kernels: the same settings give the same bits.")
    threads: int = option(0, "Threads of CPU kernels; 0 keeps torch's own number.")
    timeout_s: float = option(300.0, "After this long without life of a rank the job ends.", unit="s")
    log_every: int = option(100, "Updates between two records.", group="What is written down")
    validate_every: int = option(1000, "Updates between two validations, each with a snapshot; 0: at the end only.")
    snapshot_every: int = option(0, "Updates between two further snapshots; 0 writes none.")
    keep_snapshots: int = option(3, "Newest snapshots that stay, beside the best one.")
    tensorboard: bool = option(True, "Write TensorBoard events.")
    run_dir: str | None = option(None, "Folder of the run; by default a new one under runs/.")
    resume: str | None = option(
        None, "Go on with a run: its folder, a snapshot, or latest or best (of --run_dir, else of the newest run)."
    )
    init_from: str | None = option(
        None, "Start a new run from the parameters and buffers of a run or snapshot; not with --resume."
    )

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        for name in _POSITIVE:
            require(self, getattr(self, name) > 0, (name,), "must be positive")
        for name in _NOT_NEGATIVE:
            require(self, getattr(self, name) >= 0, (name,), "must not be negative")
        for name in ("momentum", "b1", "b2"):
            require(self, 0 <= getattr(self, name) < 1, (name,), "must lie in [0, 1)")
        require(self, self.seed < 2**32, ("seed",), "must lie below 2**32")
        require(self, self.threads <= 1024, ("threads",), "must be at most 1024, as many as cores at best")
        require(self, self.clip_norm is None or self.clip_norm > 0, ("clip_norm",), "must be positive or none")
        require(
            self,
            self.optimizer != "adam" or not self.weight_decay,
            ("optimizer", "weight_decay"),
            "adamw decays weights",
        )
        require(self, self.optimizer == "sgd" or not self.momentum, ("optimizer", "momentum"), "sgd has momentum")
        decay = self.lr_decay_updates
        require(
            self,
            not decay or self.lr_warmup_updates <= decay,
            ("lr_warmup_updates", "lr_decay_updates"),
            "the warm-up is part of the decay, which has as many updates as the run unless it is given",
        )
        clash = {"cpu": "nccl", "cuda": "gloo"}.get(self.device)
        require(self, self.backend != clash, ("device", "backend"), "nccl moves CUDA tensors, gloo a CPU's")
        require(
            self,
            self.resume is None or self.init_from is None,
            ("resume", "init_from"),
            "one goes on with a run, the other starts a new one",
        )


MAY_CHANGE = frozenset(
    (
        "updates", "log_every", "validate_every", "snapshot_every", "keep_snapshots", "tensorboard", "device",
        "backend", "compile", "cuda_graph", "dp_transport", "threads", "timeout_s",
    )
)  # fmt: skip
UNSTORED = ("resume", "run_dir")  # a run may be moved, and every attempt has its own
_POSITIVE = ("updates", "batch_size", "accumulation", "learning_rate", "eps", "timeout_s", "log_every")
_POSITIVE += ("keep_snapshots",)
_NOT_NEGATIVE = ("seed", "lr_end", "lr_warmup_updates", "lr_decay_updates", "weight_decay", "threads")
_NOT_NEGATIVE += ("validate_every", "snapshot_every")
