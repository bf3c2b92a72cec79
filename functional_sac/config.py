"""Every setting of a run, in one frozen dataclass that is checked once.

This module imports neither torch nor jax, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses

from functional_sac import tasks
from functional_sac.tasks.settings import PRESETS, SAMPLING, Settings
from functional_sl.run.checks import require
from functional_sl.run.cli import option

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class SACConfig:
    """The algorithm. The defaults are the official FlashSAC ones."""

    gamma: float = option(0.99, "Discount per environment step.", group="Algorithm")
    n_step: int = option(1, "Steps summed in the target before it bootstraps.")
    batch_size: int = option(2048, "Transitions of one update.")
    updates_per_step: int = option(2, "Updates after every step of all environments: one cycle.")
    actor_update_period: int = option(2, "Actor and temperature are updated in every n-th update.")
    actor_count: str = option(
        "global", "Where that count runs: over the run, or anew in each cycle.", choices=("global", "cycle")
    )
    critic_first: bool = option(False, "Update the critic before actor and temperature instead of after.")
    tau: float = option(0.01, "Step of the target critic towards the critic, after every update.")
    actor_width: int = option(128, "Hidden units of the actor.", group="Networks")
    critic_width: int = option(256, "Hidden units of each critic.")
    num_blocks: int = option(2, "Inverted residual blocks of each network.")
    bins: int = option(101, "Bins of the categorical return.")
    min_value: float = option(-5.0, "Lowest scaled return.")
    max_value: float = option(5.0, "Highest scaled return.")
    lr_init: float = option(
        3e-4, "Learning rate at the start of the warm-up.", group="Learning rates, temperature, rewards, noise"
    )
    lr_peak: float = option(3e-4, "Learning rate after the warm-up.")
    lr_end: float = option(1.5e-4, "Learning rate at the end of the cosine.")
    lr_warmup_updates: int = option(0, "Optimizer steps of the warm-up.")
    lr_decay_updates: int = option(
        0,
        "Optimizer steps until lr_end, warm-up included; 0 takes the number of updates of this run. Each optimizer "
        "counts its own steps: the actor's, taken every second update, are halfway at the end.",
    )
    initial_temperature: float = option(0.01, "Entropy temperature at the start.")
    target_sigma: float = option(0.15, "The target entropy is that of a Gaussian of this deviation.")
    bc_alpha: float = option(0.0, "Weight of the behaviour-cloning term in the actor's loss.")
    scale_rewards: bool = option(True, "Divide rewards by the spread of the running return.")
    return_bound: float = option(5.0, "Scaled returns stay within this bound.")
    reward_prior: str = option("official", "Prior weight of the return's moments.", choices=("official", "unilab"))
    noise_mu: float = option(2.0, "Exponent of the zeta law of noise repeats.")
    noise_max_repeat: int = option(16, "Longest noise repeat, in environment steps.")
    noise_per_env: bool = option(False, "A repeat counter for each environment, drawn anew at its episode ends.")
    replay_capacity: int = option(
        10_000_000, "Transitions that the replay holds (a rank).", group="Replay and precision"
    )
    learning_starts: int = option(100_000, "Transitions in the replay (a rank) before the first update.")
    random_warmup: bool = option(True, "Act uniformly at random until learning starts, instead of by the policy.")
    compute_dtype: str = option("float32", "Type of the matrix products; float16 scales the loss.", choices=DTYPES)
    dp_gradient_wire_dtype: str = option("float32", "Type in which gradients travel between ranks.", choices=DTYPES[:2])

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        for name in _POSITIVE:
            require(self, getattr(self, name) > 0, (name,), "must be positive")
        for name in _NOT_NEGATIVE:
            require(self, getattr(self, name) >= 0, (name,), "must not be negative")
        require(self, 0 < self.gamma <= 1, ("gamma",), "must lie in (0, 1]")
        require(self, 0 < self.tau <= 1, ("tau",), "must lie in (0, 1]")
        require(self, self.batch_size >= 2, ("batch_size",), "batch norm needs at least 2 rows")
        for name in ("actor_width", "critic_width"):
            require(self, getattr(self, name) < 2**15, (name,), "must lie below 32768, for the weights of one layer")
        require(self, self.bins >= 2, ("bins",), "a distribution needs at least 2 bins")
        require(self, self.min_value < self.max_value, ("min_value", "max_value"), "must be in this order")
        require(
            self,
            self.batch_size <= self.replay_capacity,
            ("batch_size", "replay_capacity"),
            "the replay must hold a batch",
        )
        require(
            self,
            self.learning_starts <= self.replay_capacity,
            ("learning_starts", "replay_capacity"),
            "the replay never holds that many, so learning would never start",
        )
        require(
            self,
            self.lr_decay_updates == 0 or self.lr_warmup_updates <= self.lr_decay_updates,
            ("lr_warmup_updates", "lr_decay_updates"),
            "the warm-up is part of the decay, which has as many updates as the run unless it is given",
        )


_POSITIVE = (
    "n_step", "batch_size", "updates_per_step", "actor_update_period", "actor_width", "critic_width", "num_blocks",
    "lr_peak", "initial_temperature", "target_sigma", "return_bound", "noise_max_repeat", "replay_capacity",
)  # fmt: skip
_NOT_NEGATIVE = (
    "lr_init",
    "lr_end",
    "lr_warmup_updates",
    "lr_decay_updates",
    "bc_alpha",
    "learning_starts",
    "noise_mu",
)


@dataclasses.dataclass(frozen=True)
class TrainConfig(SACConfig):
    """A whole run: the algorithm, its task and what is written down."""

    task: str = option(
        "pendulum",
        "Task: pendulum, cartpole_swingup, cartpole_balance, reacher, reacher_asymmetric, a gymnasium id such as "
        f"HalfCheetah-v5, package.module:function of one of your own, or, on robots, {', '.join(tasks.TASKS)}. A robot "
        "task brings a preset: one for two CPU cores, or, with --sim=mjwarp or --device=cuda, one for a GPU.",
        group="Run",
    )
    sim: str = option(
        "auto",
        "Simulator of the task; auto takes the first that has it, for robots mjwarp on a GPU, mujoco on a CPU.",
        choices=("auto", "classic", "gym", "mujoco", "mjwarp"),
    )
    num_envs: int = option(1024, "Parallel environments (a rank, a seed).")
    env_steps: int = option(50_000_000, "Environment steps of the whole run, over all environments, ranks and resumes.")
    seed: int = option(0, "Seed of everything random.")
    num_seeds: int = option(1, "Independent learners in this process: seeds seed, seed + 1, ...; not with ranks.")
    simulated_ranks: int = option(
        1, "Data-parallel ranks in this one process, eagerly, for tests and experiments; real ones take torchrun."
    )
    timeout_s: float = option(
        300.0, "Time without a sign of life or a finished iteration after which all ranks end.", unit="s"
    )
    device: str = option(
        "auto", "Where everything runs: auto takes CUDA where there is one.", choices=("auto", "cpu", "cuda")
    )
    compile: str = option(
        "auto",
        "Compile the updates; auto does on CUDA, where iterations and evaluations are captured too, and on a CPU from "
        "20,000 updates on.",
        choices=("auto", "true", "false"),
    )
    cuda_process_sharing: str | None = option(
        None,
        "With mps, run in the recorded MPS service of the rank's GPU (see functional_sac.cuda_mps), never without it.",
        choices=("mps",),
    )
    dp_transport: str = option(
        "nccl",
        "What gradients travel by: nccl (on a CPU Gloo), or peer, where 2, 4 or 8 GPUs of one host write into each "
        "other's memory.",
        choices=("nccl", "peer"),
    )
    dp_whole_cycle_cuda_graph: bool = option(
        True, "On CUDA with several ranks, capture whole iterations as one graph, as one rank does."
    )
    overlap: bool = option(
        False,
        "Learn while the environments step: updates draw from the replay as it was before that step, hence other "
        "numbers; on CUDA both are branches of one graph.",
    )
    threads: int = option(0, "CPU threads of torch; 0 takes one for small networks. Bits depend on it.")
    deterministic: bool = option(True, "Only deterministic kernels; one that is not is an error that names it.")
    task_preset: str | None = option(
        None,
        "Rewards, noise, action scale and dynamics of motion tracking; unilab if not given.",
        choices=PRESETS,
        group="Robot tasks",
    )
    motion: str | None = option(
        None,
        "Motions to track, by commas: generated ones (squat, step, walk, wave; walk:3 walks otherwise), .npz and .csv "
        "files, folders of them; all generated ones if not given.",
    )
    motion_sampling: str | None = option(
        None,
        "Where episodes of training begin in the motions; adaptive if not given. Evaluations begin with a first frame.",
        choices=SAMPLING,
    )
    robot_xml: str | None = option(None, "MuJoCo model of the same robot, in place of the built-in one.")
    geometry: str | None = option(
        None, "Shapes of the robot that touch the floor; cheap if not given.", choices=("cheap", "full")
    )
    sim_contacts: int | None = option(None, "Contacts a world that mjwarp has room for; 64 if not given.")
    sim_constraints: int | None = option(
        None, "Rows of constraints a world that mjwarp has room for; 256 if not given."
    )
    sim_threads: int | None = option(None, "Threads of mujoco (a rank); the rank's share of the cores if not given.")
    eval_episodes: int = option(
        50,
        "Episodes of an evaluation, side by side, deterministic actions; 0 for none.",
        group="Evaluation, records, snapshots",
    )
    eval_every: int = option(0, "Environment steps between evaluations; 0 for ten in the run.")
    log_every: int = option(0, "Environment steps between metric records; 0 for two hundred in the run.")
    snapshot_every: int = option(0, "Environment steps between snapshots; 0 for five in the run.")
    snapshot_replay: bool = option(True, "Snapshots hold the replay too, so that a resume is exact.")
    keep_snapshots: int = option(3, "Snapshots kept, beside the best.")
    run_dir: str | None = option(None, "Folder of the run; by default a new one under runs/.")
    resume: str | None = option(None, "Run folder or snapshot to go on from, or 'latest' under runs/.")
    init_from: str | None = option(None, "Run folder or snapshot whose networks a new run starts from.")
    tensorboard: bool = option(True, "Write TensorBoard events too.")

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        super().__post_init__()
        for name in ("num_envs", "env_steps", "num_seeds", "simulated_ranks", "timeout_s", "keep_snapshots"):
            require(self, getattr(self, name) > 0, (name,), "must be positive")
        _check_robots(self)
        for name in ("eval_episodes", "eval_every", "log_every", "snapshot_every", "seed", "threads"):
            require(self, getattr(self, name) >= 0, (name,), "must not be negative")
        require(self, self.threads <= 1024, ("threads",), "must be at most 1024, as many as cores at best")
        require(
            self,
            1 in (self.num_seeds, self.simulated_ranks),
            ("num_seeds", "simulated_ranks"),
            "a run has several seeds or several ranks, not both",
        )
        require(
            self,
            self.simulated_ranks == 1 or self.compile != "true",
            ("simulated_ranks", "compile"),
            "simulated ranks run eagerly; use --compile=auto, or torchrun",
        )
        require(
            self,
            self.simulated_ranks == 1 or self.dp_transport == "nccl",
            ("simulated_ranks", "dp_transport"),
            "simulated ranks have one memory, and nothing travels; use --dp_transport=nccl, or torchrun",
        )
        require(
            self, self.num_envs <= self.replay_capacity, ("num_envs", "replay_capacity"), "one vector step must fit"
        )
        require(
            self,
            max(self.learning_starts, self.batch_size) <= self.env_steps,
            ("learning_starts", "batch_size", "env_steps"),
            "the run ends before learning starts",
        )
        require(
            self,
            max(self.learning_starts, 1) + (self.n_step - 1 + self.overlap) * self.num_envs <= self.env_steps,
            ("learning_starts", "n_step", "num_envs", "env_steps", "overlap"),
            "the run ends before learning starts: the first n - 1 vector steps give no row, and an overlapping cycle "
            "has those before its step",
        )
        require(
            self,
            not self.overlap or 2 * self.num_envs <= self.replay_capacity,
            ("overlap", "num_envs", "replay_capacity"),
            "beside the vector step that is being written, another one must fit",
        )
        require(
            self,
            self.resume is None or self.init_from is None,
            ("resume", "init_from"),
            "a run goes on or starts from other networks, not both",
        )


# Flags of robot tasks, and the fields of `Settings` that they fill.
ROBOT_FLAGS = {
    "task_preset": "preset",
    "motion": "motion",
    "motion_sampling": "sampling",
    "robot_xml": "robot_xml",
    "geometry": "geometry",
    "sim_contacts": "contacts",
    "sim_constraints": "constraints",
    "sim_threads": "threads",
}
_OF_SIMULATOR = {"sim_contacts": "mjwarp", "sim_constraints": "mjwarp", "sim_threads": "mujoco"}


def task_settings(config: TrainConfig) -> Settings:
    """Returns what the config tells a robot task; what it leaves out has the task's defaults."""
    values = {field: getattr(config, flag) for flag, field in ROBOT_FLAGS.items()}
    return Settings(**{field: value for field, value in values.items() if value is not None})


def _check_robots(config: TrainConfig) -> None:
    robot = config.task in tasks.TASKS
    require(
        config,
        config.num_seeds == 1 or not robot,
        ("num_seeds", "task"),
        "a robot's simulator trains one seed a process; start one run a seed",
    )
    for flag, field in ROBOT_FLAGS.items():
        value, simulator = getattr(config, flag), _OF_SIMULATOR.get(flag)
        if value is None:
            continue
        having = [name for name, entry in tasks.TASKS.items() if field in entry.settings]
        require(config, config.task in having, (flag, "task"), f"only {', '.join(having)} can be told this")
        require(
            config,
            simulator is None or config.sim in ("auto", simulator),
            (flag, "sim"),
            f"only --sim={simulator} can be told this",
        )
        require(config, not isinstance(value, int) or value > 0, (flag,), "must be positive")
