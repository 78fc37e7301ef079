"""Memory: borrowed without a copy, allocated zeroed, given back, and the clear end when it does not fit."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import DeploymentConfig, LayerGeometry, allocate_resources

pytestmark = pytest.mark.gpu


def free_bytes(cupy):
    gc.collect()
    return cupy.cuda.runtime.memGetInfo()[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8", "uint16", "int32"])
def test_new_arrays_are_zero_at_once(backend, dtype):
    for shape in ((0, 3), (1,), (3, 5, 7), (1 << 20,)):
        array = backend.array(shape, dtype)
        assert (array.shape, str(array.dtype)) == (shape, dtype)
        assert not backend.to_host(array).any()


def test_pinned_memory_is_zero_and_page_locked(backend, cupy):
    array = backend.pinned((3, 5), "int32")
    assert (array.shape, array.dtype) == ((3, 5), np.int32)
    assert not array.any()
    assert cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == 1, "memory of the host that CUDA knows"


def test_an_array_that_does_not_fit_is_a_clear_error_and_the_device_stays_usable(backend, stream):
    with pytest.raises(DeviceError, match=r"'array'.*cudaErrorMemoryAllocation.*asked for.*free") as caught:
        backend.array((1 << 50,), "uint8")
    assert isinstance(caught.value, MemoryError)
    assert backend.lost is None
    lengths = backend.array((4,), "int32")
    backend.add_lengths(lengths, 2, 4, stream)
    assert backend.synchronize(stream)
    assert backend.to_host(lengths).tolist() == [2] * 4


def test_resources_that_do_not_fit_give_back_what_they_took(backend, cupy):
    before, total = free_bytes(cupy), cupy.cuda.runtime.memGetInfo()[1]
    page = 128 * 8 * 128 * 2
    layer = LayerGeometry.attention(kv_heads=8, head_dim=128)
    deployment = DeploymentConfig(
        max_batch=1, kv_capacity_tokens=128, page_size=128, layers=(layer,) * 16, enforce_min_pool=False
    )
    refused = False
    try:  # no pytest.raises: it would keep the error, and with it the frames that hold the first pools
        allocate_resources(deployment, total // (2 * page) // 8, backend)
    except MemoryError:
        refused = True
    assert refused, "twice the memory of the device was allocated"
    assert free_bytes(cupy) >= before - (64 << 20)


def test_memory_is_given_back_when_nobody_refers_to_it(backend, cupy):
    backend.array((1 << 20,), "uint8")
    before = free_bytes(cupy)
    array = backend.array((1 << 28,), "uint8")
    view = array[1:3]
    del array
    assert free_bytes(cupy) <= before - (1 << 28), "a view keeps the memory"
    del view
    assert free_bytes(cupy) >= before - (4 << 20)


def test_plans_keep_no_memory_alive(backend, cupy, stream):
    """Addresses of layers are kept on the device per tuple of tensors; dropped tensors take them along."""
    rows = backend.pinned((1,), "int32")
    known = len(backend._plans)
    tensors = tuple(backend.array((2, 1 << 26), "uint8") for _ in range(2))
    for _ in range(3):
        backend.zero_rows(tuple(tensors), rows, stream)
    assert backend.synchronize(stream)
    assert len(backend._plans) == known + 1
    before = free_bytes(cupy)
    del tensors
    assert free_bytes(cupy) >= before + (1 << 27)
    assert len(backend._plans) == known


def test_a_cupy_array_is_borrowed_as_it_is(backend, cupy):
    theirs = cupy.arange(12, dtype=cupy.int32).reshape(3, 4)
    array = backend.borrow(theirs)
    assert array.data.ptr == theirs.data.ptr


def test_anything_with_the_interface_is_borrowed(backend, cupy):
    theirs = cupy.arange(12, dtype=cupy.float16).reshape(3, 4)[:, 1:3]

    class Runtime:
        __cuda_array_interface__ = theirs.__cuda_array_interface__

    array = backend.borrow(Runtime())
    assert (array.data.ptr, array.shape, array.strides) == (theirs.data.ptr, (3, 2), (8, 2))
    assert cupy.asnumpy(array).tolist() == [[1, 2], [5, 6], [9, 10]]


def test_anything_with_dlpack_is_borrowed(backend, cupy):
    theirs = cupy.arange(12, dtype=cupy.float32)

    class Runtime:
        def __dlpack__(self, **options):
            return theirs.__dlpack__(**options)

        def __dlpack_device__(self):
            return theirs.__dlpack_device__()

    assert backend.borrow(Runtime()).data.ptr == theirs.data.ptr


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("float16", "float16"), ("float32", "float32"), ("bfloat16", "uint16"), ("float8_e4m3fn", "uint8")],
)
def test_a_torch_tensor_is_borrowed_and_written_through(backend, stream, dtype, stored):
    torch = pytest.importorskip("torch")
    tensor = torch.ones((4, 3, 5), device="cuda").to(getattr(torch, dtype))
    array = backend.borrow(tensor)
    assert (array.data.ptr, array.shape, str(array.dtype)) == (tensor.data_ptr(), (4, 3, 5), stored)
    torch.cuda.synchronize()
    backend.clear_resident_row((array,), 2, stream)
    assert backend.synchronize(stream)
    found = tensor.to(torch.float32).sum(dim=(1, 2)).cpu().tolist()
    assert found == [15, 15, 0, 15]


def test_what_cannot_be_borrowed_is_refused(backend):
    with pytest.raises(TypeError, match="neither __cuda_array_interface__ nor __dlpack__"):
        backend.borrow([1, 2])
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="not on a CUDA device"):
        backend.borrow(torch.ones(3))
