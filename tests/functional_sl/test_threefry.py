from __future__ import annotations

import collections

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from functional_sl import keys, threefry
from functional_sl.tree import bits_equal

FORMS = {"words": torch.int64, "bits": torch.int64, "fraction": torch.float32, "normal": torch.float32}
# Draws of n numbers whose bits are the same on every device.
EXACT = {
    "bits": lambda k, n: keys.bits(k, (n,)),
    "split": keys.split,
    "uniform": lambda k, n: keys.uniform(k, (n,)),
    "range": lambda k, n: keys.uniform(k, (n,), -0.3, 1.7),
    "uniform64": lambda k, n: keys.uniform(k, (n,), dtype=torch.float64),
    "bernoulli": lambda k, n: keys.bernoulli(k, 0.3, (n,)),
    "randint": lambda k, n: keys.randint(k, (n,), -7, 100),
    "permutation": keys.permutation,
    "fold_in": lambda k, n: keys.fold_in(k, n),
    "fold_in_tensor": lambda k, n: keys.fold_in(k, torch.tensor(n - 2**32, device=k.device)),
}
# Draws that a device rounds in its own way.
ROUNDED = {
    "normal": lambda k, n: keys.normal(k, (n,)),
    "normal64": lambda k, n: keys.normal(k, (n,), torch.float64),
    "exponential": lambda k, n: keys.exponential(k, (n,)),
    "truncated_normal": lambda k, n: keys.truncated_normal(k, -2.0, 2.0, (n,)),
}
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def draw(key: torch.Tensor, size: int, form: str) -> torch.Tensor:
    return torch.ops.functional_sl.threefry_draw(key, size, form)


class Calls(TorchDispatchMode):
    """Counts the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [0, 1, 4, 5, 1000])
def test_every_implementation_of_the_hash_agrees(size):
    extremes = torch.tensor([[0, 0], [2**32 - 1, 2**32 - 1], [0, 2**32 - 1], [2**31, 1]])
    counts = torch.cat((torch.arange(size), 2**32 - 1 - torch.arange(size)))
    formula = threefry._hash_torch(extremes[:, None], counts)
    assert formula.shape == (4, 2 * size, 2)
    for count in (counts, counts - 2**32, counts + 2**40):
        assert torch.equal(torch.ops.functional_sl.threefry2x32(extremes[:, None], count), formula)
        assert torch.equal(threefry._hash_torch(extremes[:, None], count), formula)
    single = torch.ops.functional_sl.threefry2x32(extremes[1], counts[:size])
    assert torch.equal(single, formula[1, :size])


@pytest.mark.parametrize("form", FORMS)
def test_the_operators_are_registered_soundly(form):
    for key in (keys.key(1), keys.split(keys.key(1), 9)):
        library.opcheck(torch.ops.functional_sl.threefry2x32.default, (key, torch.arange(9)))
        library.opcheck(torch.ops.functional_sl.threefry_draw.default, (key, 9, form))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_have_the_shapes_and_types_of_real_ones(form, device):
    for batch in ((), (3,), (2, 0)):
        expected = (*batch, 5, 2) if form == "words" else (*batch, 5)
        with FakeTensorMode():
            found = draw(torch.empty(*batch, 2, dtype=torch.int64, device=device), 5, form)
        assert (found.shape, found.dtype, found.device.type) == (expected, FORMS[form], device)
        assert draw(torch.zeros(*batch, 2, dtype=torch.int64), 5, form).shape == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_mapped_operator_is_one_call_for_all_keys(form):
    batch = keys.split(keys.key(6), (2, 3))
    expected = torch.stack([torch.stack([draw(k, 5, form) for k in row]) for row in batch])
    assert bits_equal(draw(batch, 5, form), expected)
    assert bits_equal(vmap(vmap(lambda k: draw(k, 5, form)))(batch), expected)
    assert bits_equal(vmap(lambda k: draw(k, 5, form), in_dims=1, out_dims=1)(batch), expected)
    with Calls() as calls:
        vmap(vmap(lambda k: draw(k, 5, form)))(batch)
    views = torch.ops.aten.permute.default
    assert calls.counts - collections.Counter({views: 2}) == {torch.ops.functional_sl.threefry_draw.default: 1}


@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_function_keeps_the_operator(form):
    batch, seen = keys.split(keys.key(6), (2, 3)), []

    def backend(module, inputs):
        seen.append(str(module.graph))
        return module

    compiled = torch.compile(vmap(lambda k: draw(k, 5, form)), backend=backend, fullgraph=True)
    assert bits_equal(compiled(batch), draw(batch, 5, form))
    assert "threefry_draw" in seen[0]


@on_cuda
@pytest.mark.parametrize("size", [0, 1, 6, 257, 2**20 + 3])
@pytest.mark.parametrize("name", EXACT)
def test_kernels_draw_as_the_cpu_does(name, size):
    key = keys.split(keys.key(3))[1]
    assert bits_equal(EXACT[name](key.cuda(), size), EXACT[name](key, size))


@on_cuda
@pytest.mark.parametrize("size", [0, 1, 6, 257, 2**20 + 3])
@pytest.mark.parametrize("name", ROUNDED)
def test_kernels_round_as_plain_operations_do(name, size, monkeypatch):
    key = keys.key(5, "cuda")
    found, cpu = ROUNDED[name](key, size), ROUNDED[name](key.cpu(), size)
    monkeypatch.setattr(threefry, "draw", threefry._draw_torch)
    monkeypatch.setattr(threefry, "hashed", threefry._hash_torch)
    assert bits_equal(found, ROUNDED[name](key, size))
    torch.testing.assert_close(found.cpu(), cpu, rtol=1e-6, atol=1e-6)


@on_cuda
def test_the_kernel_of_erfinv_is_exact_at_all_its_arguments():
    from functional_sl import threefry_kernels

    x = threefry.symmetric(torch.arange(2**23, device="cuda"), 23, torch.float32)
    pair, found = torch.stack((x, torch.log1p(-x * x))), torch.empty_like(x)
    polynomials = {"CENTRE": threefry._ERFINV_CENTRE, "TAIL": threefry._ERFINV_TAIL}
    threefry_kernels._launch(threefry_kernels._normal, x, x.numel(), pair, found, **polynomials)
    assert torch.equal(found, threefry.erfinv(x) * 2.0**0.5)


@on_cuda
@pytest.mark.parametrize("name", EXACT | ROUNDED)
def test_batched_strided_and_mapped_keys_agree_on_a_gpu(name):
    def one(k):
        return (EXACT | ROUNDED)[name](k, 7)

    batch = keys.split(keys.key(6, "cuda"), (2, 3))
    expected = torch.stack([torch.stack([one(k) for k in row]) for row in batch])
    assert bits_equal(one(batch), expected)
    assert bits_equal(one(batch.transpose(0, 1)), expected.transpose(0, 1))
    assert bits_equal(one(batch[:, 1]), expected[:, 1])
    assert bits_equal(vmap(vmap(one))(batch), expected)
    assert bits_equal(vmap(one, in_dims=1, out_dims=1)(batch), expected)


@on_cuda
def test_a_graph_draws_anew_at_every_replay():
    def everything(k):
        return [f(k, 33) for name, f in (EXACT | ROUNDED).items() if name != "fold_in_tensor"]

    key, stream = keys.key(0, "cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(key)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        drawn = everything(key)
    for seed in (12, 13):
        key.copy_(keys.key(seed))
        graph.replay()
        assert all(map(bits_equal, drawn, everything(keys.key(seed, "cuda"))))


@on_cuda
def test_draws_inside_grad_and_compiled_regions_on_a_gpu():
    key, w = keys.key(11, "cuda"), torch.ones(5, device="cuda")
    e = keys.normal(key, (5,))
    assert bits_equal(grad(lambda w, k: (w * keys.normal(k, (5,))).sum())(w, key), e)
    graphs = []

    def backend(module, inputs):
        graphs.extend(str(node.target) for node in module.graph.nodes)
        return module

    compiled = torch.compile(lambda k: (keys.normal(k, (5,)), keys.split(k)), backend=backend, fullgraph=True)
    assert all(map(bits_equal, compiled(key), (e, keys.split(key))))
    assert any(target.startswith("functional_sl") for target in graphs), graphs
