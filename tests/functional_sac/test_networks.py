"""Actor and critic against the same networks written as `nn.Module`s."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from equal import assert_bits_equal
from torch import Tensor, nn

from functional_sac import losses, networks
from functional_sac.networks import Actor, Critic, Stats, Trunk
from functional_sl import keys, tree

OBSERVATION, ACTION, WIDTH, BINS, BLOCKS, ROWS = 5, 2, 8, 7, 2, 16


class Norm(nn.BatchNorm1d):
    def __init__(self, features: int) -> None:
        super().__init__(features, eps=1e-5, momentum=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.norm1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), Norm(4 * WIDTH)
        self.w2, self.norm2 = nn.Linear(4 * WIDTH, WIDTH, bias=False), Norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.w1(x)))
        return x + F.relu(self.norm2(self.w2(hidden)))


class Module(nn.Module):
    """Norm, embedding, inverted residual blocks, RMS norm, one or two linear heads."""

    def __init__(self, inputs: int, *heads: int) -> None:
        super().__init__()
        self.norm, self.w = Norm(inputs), nn.Linear(inputs, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.post = nn.RMSNorm(WIDTH, eps=1e-6)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in heads)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.w(self.norm(x))
        for block in self.blocks:
            h = block(h)
        return [head(self.post(h)) for head in self.heads]

    def norms(self) -> list[Norm]:
        return [m for m in self.modules() if isinstance(m, Norm)]

    def trunk(self, of: str = "data") -> Trunk:
        """The parameters, or their gradients for `of="grad"`, in this package's structure."""

        def norm(n: Norm) -> networks.BatchNorm:
            return networks.BatchNorm(getattr(n.weight, of), getattr(n.bias, of))

        blocks = tuple(
            networks.Block(getattr(b.w1.weight, of), norm(b.norm1), getattr(b.w2.weight, of), norm(b.norm2))
            for b in self.blocks
        )
        return Trunk(norm(self.norm), getattr(self.w.weight, of), blocks, getattr(self.post.weight, of))

    def head(self, of: str = "data") -> list[Tensor]:
        return [getattr(p, of) for head in self.heads for p in (head.weight, head.bias)]

    def stats(self) -> Stats:
        return Stats(*(torch.cat([getattr(n, f"running_{m}") for n in self.norms()]).clone() for m in ("mean", "var")))


def module(inputs: int, *heads: int) -> Module:
    """A module whose every number differs from its initial value, in float64."""
    torch.manual_seed(inputs)
    built = Module(inputs, *heads).double()
    with torch.no_grad():
        for p in built.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for n in built.norms():
            n.running_mean.normal_()
            n.running_var.uniform_(0.5, 2.0)
    return built


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    observation = 50 + 3 * torch.randn(ROWS, OBSERVATION, generator=generator, dtype=torch.float64)
    return observation, torch.rand(ROWS, ACTION, generator=generator, dtype=torch.float64) * 2 - 1


@pytest.mark.parametrize("training", [True, False])
def test_actor(training: bool) -> None:
    """Outputs, gradients and statistics to 1e-9 in float64, for observations of mean 50."""
    reference = module(OBSERVATION, ACTION, ACTION).train(training)
    params, stats, observation = Actor(reference.trunk(), *reference.head()), reference.stats(), inputs()[0]

    def loss(p: Actor) -> tuple[Tensor, tuple]:
        (mean, log_std), after = networks.actor(p, stats, observation, training=training)
        return (mean.sin() + log_std.square()).sum(), (mean, log_std, after)

    gradient, (mean, log_std, after) = torch.func.grad(loss, has_aux=True)(params)
    expected_mean, raw = reference(observation)
    expected_log_std = -10 + 6 * (1 + torch.tanh(raw))
    (expected_mean.sin() + expected_log_std.square()).sum().backward()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close((mean, log_std), (expected_mean.detach(), expected_log_std.detach()), **close)
    torch.testing.assert_close(gradient, Actor(reference.trunk("grad"), *reference.head("grad")), **close)
    torch.testing.assert_close(after, reference.stats(), **close)
    assert tree.bits_equal(after, stats) is not training


@pytest.mark.parametrize("training", [True, False])
def test_critic(training: bool) -> None:
    reference = module(OBSERVATION + ACTION, BINS).train(training)
    params, stats = Critic(reference.trunk(), *reference.head()), reference.stats()
    weight = torch.linspace(-1, 1, BINS, dtype=torch.float64)

    def loss(p: Critic) -> tuple[Tensor, tuple]:
        log_probs, after = networks.critic(p, stats, *inputs(), training=training)
        return (weight * log_probs).sum(), (log_probs, after)

    gradient, (log_probs, after) = torch.func.grad(loss, has_aux=True)(params)
    expected = F.log_softmax(reference(torch.cat(inputs(), -1))[0], -1)
    (weight * expected).sum().backward()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(log_probs, expected.detach(), **close)
    torch.testing.assert_close(gradient, Critic(reference.trunk("grad"), *reference.head("grad")), **close)
    torch.testing.assert_close(after, reference.stats(), **close)


def test_statistics_converge_to_those_of_the_data() -> None:
    """1000 forwards at momentum 0.01 leave 4e-5 of the start; a constant feature ends at variance 0, never below."""
    params, stats = networks.init_critic(keys.key(0), OBSERVATION + ACTION, BINS, WIDTH, BLOCKS)
    observation, action = (x.float() for x in inputs())
    observation[:, 0] = 7.0
    for _ in range(1000):
        _, stats = networks.critic(params, stats, observation, action, training=True)
    data = torch.cat([observation, action], -1)
    features = data.shape[-1]
    torch.testing.assert_close(stats.mean[:features], data.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(stats.var[:features], data.var(0), rtol=1e-3, atol=1e-4)
    assert stats.var.min() > -1e-9  # the epsilon of the root is 1e-5
    log_probs, same = networks.critic(params, stats, observation, action, training=False)
    assert log_probs.isfinite().all()
    assert_bits_equal(same, stats)


def both() -> tuple[Critic, Stats]:
    members = [networks.init_critic(k, OBSERVATION + ACTION, BINS, WIDTH, BLOCKS) for k in keys.split(keys.key(3), 2)]
    return tree.stack(members)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_a_double_critic_is_two_single_ones(training: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, statistics and gradients, one by one and batched; batched products may round differently: 1e-5."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    params, stats = both()
    observation, action = (x.float() for x in inputs())

    def double(p: Critic) -> tuple[Tensor, tuple]:
        out, after = losses.ensemble(p, stats, observation, action, training=training, dtype=torch.float32)
        return out.square().sum(), (out, after)

    gradient, found = torch.func.grad(double, has_aux=True)(params)
    mapped = torch.func.vmap(lambda p, s: networks.critic(p, s, observation, action, training=training))(params, stats)
    torch.testing.assert_close(found, mapped, rtol=1e-5, atol=1e-5)
    for i in range(2):
        one = tree.index(stats, i)

        def single(p: Critic, one: Stats = one) -> tuple[Tensor, tuple]:
            out, after = networks.critic(p, one, observation, action, training=training)
            return out.square().sum(), (out, after)

        expected_gradient, expected = torch.func.grad(single, has_aux=True)(tree.index(params, i))
        torch.testing.assert_close(tree.index(found, i), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tree.index(gradient, i), expected_gradient, rtol=1e-4, atol=1e-4)


def test_initial_weights_are_orthogonal_with_unit_rows() -> None:
    actor, stats = networks.init_actor(keys.key(0), OBSERVATION, ACTION, WIDTH, BLOCKS)
    critic, _ = networks.init_critic(keys.key(1), OBSERVATION + ACTION, BINS, WIDTH, BLOCKS)
    wide = [actor.mean_w, actor.std_w, critic.w, *(b.w2 for t in (actor.trunk, critic.trunk) for b in t.blocks)]
    for w in wide:
        torch.testing.assert_close(w @ w.T, torch.eye(len(w)), rtol=0, atol=1e-5)
    for w in (actor.trunk.w, critic.trunk.w, *(b.w1 for b in actor.trunk.blocks)):
        torch.testing.assert_close(w.norm(dim=-1), torch.ones(len(w)))
    for leaf in (actor.mean_b, actor.std_b, critic.b, stats.mean, actor.trunk.norm.bias):
        assert not leaf.any()
    for leaf in (stats.var, actor.trunk.norm.scale, actor.trunk.post_scale):
        torch.testing.assert_close(leaf, torch.ones_like(leaf))
    assert not torch.allclose(actor.trunk.blocks[0].w1, actor.trunk.blocks[1].w1, atol=0.1)
    assert tree.overlapping((actor, stats)) is None


def test_project() -> None:
    """Rows to norm 1, (scale, bias) jointly and the RMS scale to sqrt(F); head biases and zero rows stay."""
    params = tree.map(
        lambda x: 3 * x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), both()[0]
    )
    params.w[1, 4] = 0.0
    done = networks.project(params)
    for w, old in (
        (done.w, params.w),
        (done.trunk.w, params.trunk.w),
        (done.trunk.blocks[1].w1, params.trunk.blocks[1].w1),
    ):
        torch.testing.assert_close(w, F.normalize(old, dim=-1))
    assert not done.w[1, 4].any()
    assert_bits_equal(done.b, params.b)
    for norm, old in ((done.trunk.norm, params.trunk.norm), (done.trunk.blocks[0].norm2, params.trunk.blocks[0].norm2)):
        square = norm.scale.square() + norm.bias.square()
        torch.testing.assert_close(square.sum(-1), torch.full((2,), float(norm.scale.shape[-1])))
        torch.testing.assert_close(norm.scale * old.bias, norm.bias * old.scale)
    torch.testing.assert_close(done.trunk.post_scale.square().sum(-1), torch.full((2,), float(WIDTH)))
    torch.testing.assert_close(networks.project(done), done)
    torch.testing.assert_close(tree.index(done, 1), networks.project(tree.index(params, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products(dtype: torch.dtype) -> None:
    """Outputs and statistics stay float32 and close: 8 and 11 bits of mantissa through three layers."""
    params, stats = tree.index(both(), 0)
    observation, action = (x.float() for x in inputs())
    found, after = networks.critic(params, stats, observation, action, training=True, dtype=dtype)
    expected, reference = networks.critic(params, stats, observation, action, training=True)
    assert found.dtype == after.mean.dtype == after.var.dtype == torch.float32
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(after, reference, rtol=0, atol=tolerance * networks.BN_MOMENTUM)
    assert not torch.equal(found, expected)


def test_a_missing_batch_axis_is_refused() -> None:
    params, stats = networks.init_actor(keys.key(0), OBSERVATION, ACTION, WIDTH, BLOCKS)
    with pytest.raises(AssertionError):
        networks.actor(params, stats, torch.zeros(OBSERVATION), training=False)
