"""Every verb against the host backend: random bytes in, the same bytes out, in every array that was near."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import HostBackend

pytestmark = pytest.mark.gpu

SEEDS = range(12)


class Both:
    """The same arrays on the host and on the device; a verb runs on both, and all bytes must agree afterwards."""

    def __init__(self, backend, stream, put, seed):
        self.rng = np.random.default_rng(seed)
        self.backends = (HostBackend(), backend)
        self.streams = (self.backends[0].new_stream(), stream)
        self.put = put
        self.arrays = []

    def bytes(self, shape, dtype):
        """A pair of arrays with the same random bytes, NaN patterns among them."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.pair(self.rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape))

    def pair(self, values):
        pair = (values.copy(), self.put(values))
        self.arrays.append(pair)
        return pair

    def staged(self, values):
        """A host input of each backend, in its own staging memory."""
        pair = []
        for one in self.backends:
            array = one.pinned((len(values),), "int32")
            array[:] = values
            pair.append(array)
        return tuple(pair)

    def run(self, verb, *arguments):
        """Pairs, tuples of pairs and plain values."""
        for index, (backend, stream) in enumerate(zip(self.backends, self.streams, strict=True)):
            getattr(backend, verb)(*(_pick(argument, index) for argument in arguments), stream)

    def agree(self):
        for backend, stream in zip(self.backends, self.streams, strict=True):
            assert backend.synchronize(stream)
        for host, device in self.arrays:
            assert host.tobytes() == self.backends[1].to_host(device).tobytes()

    def some(self, limit, count, unique=True):
        return self.rng.choice(limit, count, replace=not unique).astype(np.int32)


def _pick(argument, index):
    if isinstance(argument, list):
        return tuple(pair[index] for pair in argument)
    return argument[index] if isinstance(argument, tuple) else argument


@pytest.fixture(params=SEEDS)
def both(request, backend, stream, put):
    return Both(backend, stream, put, request.param)


@pytest.mark.sanitizer
def test_upload_rows(both):
    rng = both.rng
    batch, width, pages = int(rng.integers(1, 40)), int(rng.integers(1, 300)), 2**30 - 1
    table = both.bytes((batch, 2, width), "int32")
    for _ in range(3):
        count = int(rng.integers(1, batch + 1))
        ids = rng.integers(-1, pages, (count, width)).astype(np.int32)
        staged = []
        for one in both.backends:
            array = one.pinned((batch, width), "int32")[:count]
            array[:] = ids
            staged.append(array)
        both.run("upload_rows", table, tuple(staged), both.staged(both.some(batch, count)), pages)
    both.agree()


@pytest.mark.sanitizer
@pytest.mark.parametrize("size", [1, 2, 31, 33, 1000, 4096, 4097, 70_000])
def test_compact_lengths(backend, stream, put, size):
    """In place, ascending, in one block, whatever the size; entries behind the old size stay."""
    for seed in range(4):
        both = Both(backend, stream, put, seed)
        lengths = both.bytes((size + 3,), "int32")
        keep = both.rng.random(size + 1) < (0.0, 0.3, 0.9, 1.0)[seed]
        mapping = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
        both.run("compact_lengths", lengths, both.pair(mapping), size)
        both.agree()


@pytest.mark.sanitizer
def test_lengths(both):
    rng = both.rng
    capacity = int(rng.integers(1, 5000))
    count = int(rng.integers(1, capacity + 1))
    lengths, source, increments = (both.bytes((capacity,), "int32") for _ in range(3))
    mapping = both.bytes((capacity, 1), "int32")
    both.run("reset_lengths", lengths, both.staged(rng.integers(0, 99, count)))
    both.run("add_lengths", lengths, 3, count)
    both.run("copy_lengths", source, lengths, count)
    both.run("add_lengths", source, increments, count)
    both.run("upload_mapping", mapping, both.staged(rng.integers(-1, 99, count)))
    both.run("add_lengths", source, increments, 0)
    both.run("copy_lengths", source, lengths, 0)
    both.agree()


@pytest.mark.sanitizer
def test_gather_rows(both):
    rng = both.rng
    batch, width = int(rng.integers(1, 40)), int(rng.integers(1, 300))
    table, dest = both.bytes((batch, 2, width), "int32"), both.bytes((batch + 2, 2, width), "int32")
    slots = both.pair(both.some(batch, batch, unique=False))
    both.run("gather_rows", dest, table, slots, int(rng.integers(0, batch + 1)))
    both.agree()


ROWS = [(1,), (3,), (7, 1), (5, 3), (16,), (33, 2), (4, 8, 16), (129, 127), (64, 1024)]
DTYPES = ["uint8", "float16", "float32", "uint16", "float64"]


def tensors(both, rows, count):
    """Tensors of ``rows`` rows with different row sizes, most of them no multiple of 16 bytes."""
    rng = both.rng
    kinds = [(ROWS[int(rng.integers(len(ROWS)))], DTYPES[int(rng.integers(len(DTYPES)))]) for _ in range(count)]
    return kinds, [both.bytes((rows, *shape), dtype) for shape, dtype in kinds]


@pytest.mark.sanitizer
def test_zero_rows(both):
    rows = int(both.rng.integers(1, 9))
    _, some = tensors(both, rows, int(both.rng.integers(1, 8)))
    both.run("zero_rows", some, both.staged(both.some(rows, int(both.rng.integers(1, rows + 1)))))
    both.run("clear_resident_row", some, rows - 1)
    both.agree()


@pytest.mark.sanitizer
def test_copy_rows(both):
    rng = both.rng
    rows, slots = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    kinds, live = tensors(both, rows, int(rng.integers(1, 8)))
    slabs = [both.bytes((slots, *shape), dtype) for shape, dtype in kinds]
    count = int(rng.integers(1, min(rows, slots) + 1))
    both.run("copy_rows", slabs, both.staged(both.some(slots, count)), live, both.staged(both.some(rows, count, False)))
    both.run("copy_rows", live, both.staged(both.some(rows, count)), slabs, both.staged(both.some(slots, count, False)))
    both.agree()


@pytest.mark.sanitizer
def test_pages(both):
    """Only the first tokens move, whatever the size of a token, and the rest of page and slot keeps its bytes."""
    rng = both.rng
    page, pages, slots = int(rng.integers(1, 40)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    pools, slabs = [], []
    for _ in range(int(rng.integers(1, 5))):
        tail = (page, int(rng.integers(1, 9)), int(rng.integers(1, 70)))
        dtype = ("float16", "uint8", "float32")[int(rng.integers(3))]
        pools.append(both.bytes((2, pages, *tail), dtype))
        slabs.append(both.bytes((slots, 2, *tail), dtype))
    count = int(rng.integers(1, min(pages, slots) + 1))

    def tokens():
        return both.staged(rng.integers(1, page + 1, count))

    both.run(
        "capture_pages", slabs, both.staged(both.some(slots, count)), pools,
        both.staged(both.some(pages, count, False)), tokens(),
    )  # fmt: skip
    both.run(
        "restore_pages", pools, both.staged(both.some(pages, count)), slabs,
        both.staged(both.some(slots, count, False)), tokens(),
    )  # fmt: skip
    both.agree()


@pytest.mark.sanitizer
def test_pages_of_many_parts(both):
    """Pages of 256 KiB, filled to each side of every bound between the parts that the blocks of a launch share."""
    pools, slabs = both.bytes((2, 16, 128, 8, 128), "float16"), both.bytes((12, 2, 128, 8, 128), "float16")
    fill = np.array([1, 3, 4, 5, 11, 12, 13, 16, 47, 48, 49, 128])
    both.run(
        "capture_pages", [slabs], both.staged(both.some(12, 12)), [pools], both.staged(both.some(16, 12)),
        both.staged(fill),
    )  # fmt: skip
    both.run(
        "restore_pages", [pools], both.staged(both.some(16, 12)), [slabs], both.staged(both.some(12, 12)),
        both.staged(fill[::-1]),
    )  # fmt: skip
    both.agree()


def test_copy_row(both):
    width = int(both.rng.integers(1, 5000))
    dest, source = both.bytes((4, width), "float16"), both.bytes((6, width), "float16")
    both.run("copy_row", dest, 3, source, 5)
    both.run("copy_row", dest, 0, source, 0)
    both.agree()


@pytest.mark.sanitizer
@pytest.mark.parametrize("shift", [1, 2, 3, 4, 6, 8, 12, 15, 16])
@pytest.mark.parametrize("row", [1, 15, 16, 17, 255, 4096, 40_000])
def test_rows_at_any_address(backend, stream, put, shift, row):
    """Borrowed memory may start anywhere: source and destination are apart by every number of bytes."""
    rows, rng = 3, np.random.default_rng(row + shift)
    values = rng.integers(0, 256, (2, rows * row + 64), dtype=np.uint8)
    whole = [put(one) for one in values]
    dest = whole[0][shift : shift + rows * row].reshape(rows, row)
    source = whole[1][16 : 16 + rows * row].reshape(rows, row)
    wanted = values.copy()
    into, out = wanted[0][shift : shift + rows * row].reshape(rows, row), wanted[1][16 : 16 + rows * row]
    into[[2, 0]] = out.reshape(rows, row)[[1, 1]]
    into[1] = 0
    indices = backend.pinned((3, 2), "int32")
    indices[:] = [[2, 0], [1, 1], [1, 1]]
    backend.copy_rows((dest,), indices[0], (source,), indices[1], stream)
    backend.zero_rows((dest,), indices[2][:1], stream)
    assert backend.synchronize(stream)
    for array, expected in zip(whole, wanted, strict=True):
        assert backend.to_host(array).tobytes() == expected.tobytes()


def test_more_rows_than_a_grid_is_wide(backend, stream, put):
    """The second dimension of a grid ends at 65535."""
    rows = 70_000
    values = np.arange(rows, dtype=np.int32).reshape(rows, 1) + 1
    tensor, copy = put(values), put(np.zeros_like(values))
    indices = backend.pinned((rows,), "int32")
    indices[:] = np.arange(rows)
    backend.copy_rows((copy,), indices, (tensor,), indices, stream)
    backend.zero_rows((tensor,), indices, stream)
    assert backend.synchronize(stream)
    assert (backend.to_host(copy) == values).all()
    assert not backend.to_host(tensor).any()


def test_a_kernel_is_never_given_host_memory(backend, stream, put):
    """It would fault, and this process could not use the device any more."""
    lengths, table = put(np.zeros(4, np.int32)), put(np.zeros((4, 2, 3), np.int32))
    host = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="slots: an array on the device is needed"):
        backend.gather_rows(put(np.zeros((2, 2, 3), np.int32)), table, host, 2, stream)
    with pytest.raises(ValueError, match="mapping: an array on the device is needed"):
        backend.compact_lengths(lengths, host, 4, stream)
    assert backend.synchronize(stream)


def test_what_does_not_fit_is_refused_before_anything_is_enqueued(backend, stream, put):
    pool, slab = put(np.zeros((2, 3, 4, 1, 2), np.float16)), put(np.zeros((5, 2, 4, 1, 2), np.float16))
    one = backend.pinned((1,), "int32")
    with pytest.raises(ValueError, match="do not match"):
        backend.capture_pages((pool,), one, (slab,), one, one, stream)
    with pytest.raises(ValueError, match="one size in bytes"):
        backend.copy_rows((pool,), one, (slab,), one, stream)
    with pytest.raises(ValueError, match="behind each other"):
        backend.zero_rows((slab[:, :1],), one, stream)
    with pytest.raises(ValueError, match="at least 7 contiguous int32"):
        backend.add_lengths(put(np.zeros(6, np.int32)), 1, 7, stream)
    with pytest.raises(TypeError, match="no stream of the CuPy backend"):
        backend.zero_rows((slab,), one, HostBackend().new_stream())
