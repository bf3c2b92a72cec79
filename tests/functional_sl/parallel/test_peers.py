"""Sums over GPUs that write into each other's memory: the protocol in Triton's interpreter, what is refused, GPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import RanksFailed, run_ranks

from functional_sl.kernels import buildable
from functional_sl.parallel import collectives, peers, watchdog
from functional_sl.parallel.collectives import ordered_sum
from functional_sl.parallel.errors import RankError
from functional_sl.parallel.world import World, world

ROOT = Path(__file__).parents[3]
GPUS = torch.cuda.device_count()
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
gpus = pytest.mark.skipif(GPUS < 2 or not buildable(), reason="needs two CUDA devices")

# Ranks are processes that share memory. A rank's programs run one after the other there, two of them at most.
PROTOCOL = """
import json, mmap, os, random, signal, sys, time, torch
from functional_sl.parallel import peer_kernels
from functional_sl.parallel.collectives import ordered_sum
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    # Triton 3.6 takes an array for a scalar, which NumPy 2.5 no longer does.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor, rmw = patched, interpreter.InterpreterBuilder.create_atomic_rmw
def leisurely(*args):
    time.sleep(0.001)  # who waits has others go on
    return rmw(*args)
interpreter.InterpreterBuilder.create_atomic_rmw = leisurely
peer_kernels.PROGRAMS = 2
def live(rank, shared, ranks, shots, size, dtype, before):
    signal.alarm(60)
    memory = torch.tensor([part.data_ptr() for part in shared])
    calls, late = torch.zeros(2, dtype=torch.int32).fill_(before), random.Random(rank)
    for call in range(3):
        given = torch.randn(ranks, size, generator=torch.Generator().manual_seed(call)).to(dtype)
        x = given[rank].clone()
        time.sleep(0.05 * late.random())
        peer_kernels.total(x, memory, calls, rank, ranks, shots)
        assert torch.equal(x, ordered_sum(given)), (rank, ranks, shots, size, call)
for ranks, shots, size, dtype, before in json.loads(sys.argv[1]):
    dtype, children = getattr(torch, dtype), []
    count = peer_kernels.memory_bytes(size, dtype.itemsize, ranks, shots)
    shared = [torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8) for _ in range(ranks)]
    for memory in shared:
        met = (before + 1) // 2 * ranks
        memory[: peer_kernels.COUNTERS].view(torch.int32).fill_((met + 2**31) % 2**32 - 2**31)
    for rank in range(ranks):
        children.append(os.fork())
        if not children[-1]:
            live(rank, shared, ranks, shots, size, dtype, before)
            os._exit(0)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""
IN_PLACE = """
import contextlib, torch
from torch._inductor.utils import run_and_get_code
from functional_sl.parallel import peers
from functional_sl.parallel.world import World
called = []
peers.guard, peers._check = lambda *_: contextlib.nullcontext(), lambda *_: None
peers._joined["world 0"] = None
@peers._begin.register_kernel("cpu")
def _(x: torch.Tensor, name: str) -> None:
    called.append(name)
    x.mul_(2)
@peers._wait.register_kernel("cpu")
def _(x: torch.Tensor) -> None:
    called.append("wait")
begin = peers.join(World(0, 2, 0, torch.device("cuda", 0), None, None, 60.0))
def parts(x):
    first, second = begin(x.cumsum(0)), begin(x.sin())
    return first() + second()
x = torch.randn(1000)
options = {"reorder_for_peak_memory": False}
found, (code,) = run_and_get_code(torch.compile(parts, fullgraph=True, options=options), x)
assert called == ["world 0", "world 0", "wait", "wait"], called
torch.testing.assert_close(found, 2 * x.cumsum(0) + 2 * x.sin())
assert "clone" not in code, code
assert torch.equal(parts(x), 2 * x.cumsum(0) + 2 * x.sin())
"""
ONE_PROGRAM = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from functional_sl.parallel import peer_kernels
kernel, itemsize = peer_kernels._total, {"bf16": 2, "fp32": 4}[sys.argv[1]]
constants = {"RANK": 0, "RANKS": int(sys.argv[2]), "SHOTS": int(sys.argv[3]), "WIDE": tl.float32}
constants |= {"COUNTERS": peer_kernels.COUNTERS, "BLOCK": 8192 // itemsize}
types = {"x": "*" + sys.argv[1], "memory": "*i64", "calls": "*i32", "size": "i32", "row": "i32"}
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if name != "size"}
source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"])
"""


def run(code: str, *argv: object, **more: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@triton
def test_ranks_that_share_memory_add_in_their_order() -> None:
    """In the interpreter, which does not round to bfloat16; two kinds of ranks have made almost 2^31 calls before."""
    cases = [
        (2, 1, 1, "float32", 0),
        (2, 1, 9_007, "float16", 0),
        (2, 1, 4_096, "float32", 2**31 - 2),
        (4, 1, 5_003, "float16", 0),
        (4, 2, 30_011, "float32", 0),
        (4, 2, 3, "float32", 0),
        (4, 2, 40_000, "float16", 2**31 - 2),
    ]
    run(PROTOCOL, json.dumps(cases), TRITON_INTERPRET="1")


@triton
@pytest.mark.parametrize(("dtype", "ranks", "shots"), [("bf16", 2, 1), ("fp32", 2, 1), ("bf16", 8, 2)])
def test_the_kernel_signals_to_the_whole_system_and_moves_16_bytes_at_once(dtype: str, ranks: int, shots: int) -> None:
    ptx = run(ONE_PROGRAM, dtype, ranks, shots)
    assert ptx.count(".sys.release.add.u32") == shots
    assert ptx.count("ld.global.sys.acquire") == shots
    moved = {1: ranks - 1, 2: 2 * (ranks - 1)}[shots]
    assert ptx.count("st.global.v4.b32") == moved + 1 + (ranks - 1) * (shots - 1)
    assert "multimem" not in ptx


HERE = World(0, 2, 0, torch.device("cuda", 0), None, None, 60.0)
REFUSED = {
    "few GPUs": ({"size": 4}, "rank 0 sees 2 GPUs, but it needs all 4 visible to every rank"),
    "a CPU": ({"device": torch.device("cpu")}, "the ranks are on cpu, but it needs GPUs"),
    "one rank": ({"size": 1}, "1 ranks have started, but it needs 2, 4 or 8"),
    "three ranks": ({"size": 3}, "3 ranks have started, but it needs 2, 4 or 8"),
    "another host": ({"rank": 1}, "rank 1 is number 0 of its host, but it needs all ranks on one host"),
    "no access": ({}, "cuda:0 has no access to cuda:1, but it needs GPUs that reach each other's memory"),
    "no Triton": ({"accessible": True}, "Triton or a C compiler is missing, but it needs both"),
    "a second world": (
        {"accessible": True, "buildable": True, "joined": "world 6"},
        "an earlier world of this process has joined, but it needs a process of its own",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_met_is_one_line(changes: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: changes.get(name, False) for name in ("accessible", "buildable", "joined")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: here["accessible"])
    monkeypatch.setattr(peers, "buildable", lambda: here["buildable"])
    monkeypatch.setattr(peers, "_joined", {here["joined"]: None} if here["joined"] else {})
    world_ = dataclasses.replace(HERE, **{name: value for name, value in changes.items() if name not in here})
    with pytest.raises(ValueError) as caught:
        peers._check(world_, "world 7")
    assert str(caught.value) == f"dp_transport=peer: {reason}; use dp_transport=nccl"


def joining() -> str:
    with world("cpu", timeout_s=60.0) as here:
        try:
            collectives.over(here, "peer")
        except RankError as error:
            return str(error)
        return "joined"


def test_memory_that_is_not_shared_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(peers, "_open", fails)
    reason = r"^dp_transport=peer: no memory is shared \(pidfd_getfd: Operation not permitted\); use dp_transport=nccl$"
    with pytest.raises(RuntimeError, match=reason):
        peers._try(peers._Peers("0", 0, 2), torch.device("cpu"))


def test_another_transport_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dp_transport=' peer': choose among nccl, peer$"):
        collectives.over(HERE, " peer")


def test_all_ranks_are_refused_together() -> None:
    reason = "ValueError: dp_transport=peer: the ranks are on cpu, but it needs GPUs; use dp_transport=nccl"
    where = "joining the GPUs' memory failed on 2 of 2 ranks"
    assert run_ranks(2, joining) == [f"{where}: rank 0: {reason}; rank 1: {reason}"] * 2


def test_a_compiler_sums_in_place_and_waits_behind_all_that_is_begun() -> None:
    """In a process of its own, with kernels for a CPU that double what they are given."""
    run(IN_PLACE)


def values(size: int, dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def sums_of_all_sizes() -> None:
    """Eagerly, then replayed, each with numbers of its own; the first three sizes take one shot on any GPUs."""
    with world("cuda", timeout_s=60.0) as here:
        nccl, begin = collectives.over(here), collectives.over(here, "peer").begin
        for dtype in (torch.float32, torch.bfloat16):
            for size in (1, 2, 517, 65_537, 262_144, 1_050_011):
                x, wrong = values(size, dtype, here.rank, here.device), torch.zeros((), device=here.device)

                def step(x=x, wrong=wrong) -> None:
                    given = x.clone()
                    found = begin(given)()
                    wrong.add_((found != ordered_sum(nccl.gather(x))).sum())
                    x.copy_(x.roll(1) * 0.9375)

                for _ in range(3):
                    step()
                graph = torch.cuda.CUDAGraph()
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    step()
                for i in range(300):
                    graph.replay()
                    if i % 50 == 7:
                        step()
                assert float(wrong) == 0, (dtype, size, float(wrong))
                assert float(x.float().abs().max()) > 0
                torch.cuda.synchronize()
                del graph


@gpus
@pytest.mark.parametrize(
    "size", [2, *[pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason="GPUs")) for n in (4, 8)]]
)
def test_sums_have_the_bits_of_ordered_ones(size: int) -> None:
    run_ranks(size, sums_of_all_sizes, timeout=280)


def two_sites_on_two_streams() -> float:
    """8000 replays of sums of one size that run side by side, with work between them."""
    with world("cuda", timeout_s=60.0) as here:
        nccl, begin = collectives.over(here), collectives.over(here, "peer").begin
        a, b = (values(300_007, torch.bfloat16, 10 * i + here.rank, here.device) for i in (1, 2))
        expected = [ordered_sum(nccl.gather(x)) for x in (a, b)]
        wrong, heat = torch.zeros((), device=here.device), torch.eye(512, device=here.device)

        def both(main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                second = begin(b.clone())
                wrong_b = (second() != expected[1]).sum()
            first = begin(a.clone())
            heat.copy_(heat @ heat)
            wrong.add_((first() != expected[0]).sum())
            main.wait_stream(side)
            wrong.add_(wrong_b)

        main, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            both(main, side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
            both(main, side)
        for _ in range(8000):
            graph.replay()
        torch.cuda.synchronize()
        del graph
        return float(wrong)


@gpus
def test_sums_on_two_streams_do_not_meet() -> None:
    assert run_ranks(2, two_sites_on_two_streams, timeout=120) == [0.0, 0.0]


def lost_rank() -> None:
    """Rank 1 ends without a word before a sum that rank 0 waits for on its GPU."""
    with world("cuda", timeout_s=60.0) as here, watchdog.Watchdog(here, 6.0):
        begin = collectives.over(here, "peer").begin
        x = torch.ones(100_000, device=here.device)
        begin(x)()
        torch.cuda.synchronize()
        if here.rank == 1:
            os._exit(7)
        begin(x)()
        torch.cuda.synchronize()


@gpus
def test_the_watchdog_ends_a_kernel_that_waits_for_a_lost_rank() -> None:
    """Both ranks end by themselves, long before the timeout of the test."""
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 0: died without a word\nrank 1: died without a word"):
        run_ranks(2, lost_rank, timeout=100)
    assert time.monotonic() - begin < 60
