"""Bytes that travel together arrive as they were: shapes, dtypes and bits, also at odd lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from functional_sac.envs import transfer

TENSORS = [
    torch.tensor([[1.5, -0.0, float("nan")]]),
    torch.tensor([[2**40 + 1, -3]]),
    torch.tensor([True, False, True]),
    torch.tensor(7),
]


def test_arrays_share_one_buffer_and_keep_their_bits() -> None:
    arrays = [x.numpy() for x in TENSORS]
    found = transfer.unpack(transfer.pack(arrays, pinned=False), arrays)
    assert [x.dtype for x in found] == [x.dtype for x in TENSORS]
    assert [x.numpy().tobytes() for x in found] == [x.tobytes() for x in arrays]
    assert [x.shape for x in found] == [x.shape for x in TENSORS]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    # 12, 16, 3 and 8 bytes begin at 0, 16, 32 and 40.
    assert [x.data_ptr() - found[0].data_ptr() for x in found] == [0, 16, 32, 40]


def test_tensors_are_split_as_they_were_joined() -> None:
    joined = torch.cat([x.reshape(-1).view(torch.uint8) for x in TENSORS]).numpy()
    found = transfer.split(joined, TENSORS)
    assert [(x.shape, x.tobytes()) for x in found] == [(tuple(x.shape), x.numpy().tobytes()) for x in TENSORS]
    assert [x.dtype for x in found] == [np.float32, np.int64, bool, np.int64]


def test_on_a_cpu_nothing_is_copied() -> None:
    (array,) = transfer.fetch(TENSORS[0])
    (tensor,) = transfer.send([array], torch.device("cpu"))
    assert tensor.data_ptr() == TENSORS[0].data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_to_a_gpu_and_back() -> None:
    arrays = [x.numpy() for x in TENSORS]
    found = transfer.fetch(*transfer.send(arrays, torch.device("cuda")))
    assert [x.tobytes() for x in found] == [x.tobytes() for x in arrays]
