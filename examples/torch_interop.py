"""A runtime on torch: its K/V tensors and its current stream are the coordinator's; nothing is copied.

Needs torch with CUDA and the extra cuda12 or cuda13; says so and ends well where they are missing.
"""

from __future__ import annotations

import sys
from typing import Any

from context_cache.backends.cupy_backend import BackendUnavailable, CupyBackend
from context_cache.coordinator import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentSlotPool,
    allocate_resources,
)

try:
    import torch
except ImportError:
    print("torch_interop: torch is not installed, so there is nothing to show; install torch with CUDA")
    sys.exit(0)
if not torch.cuda.is_available():
    print("torch_interop: torch sees no CUDA GPU, so there is nothing to show")
    sys.exit(0)


class TorchMemory(CupyBackend):
    """All device memory of the coordinator comes from torch's allocator; ``tensors`` has it by address."""

    def __init__(self) -> None:
        super().__init__(torch.cuda.current_device())
        self.tensors: dict[int, torch.Tensor] = {}

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
        torch.cuda.current_stream().synchronize()  # zero at once, also for work on another stream
        self.tensors[tensor.data_ptr()] = tensor
        return self.borrow(tensor)


try:
    backend = TorchMemory()
except BackendUnavailable as error:
    print(f"torch_interop: {error}")
    sys.exit(0)

deployment = DeploymentConfig(
    max_batch=2, kv_capacity_tokens=64, page_size=4, layers=(LayerGeometry.attention(kv_heads=2, head_dim=64),) * 2
)
with torch.cuda.stream(torch.cuda.Stream()):
    stream = backend.wrap_stream(torch.cuda.current_stream(), "torch")
    resources = allocate_resources(deployment, num_pages=64, backend=backend)
    pools = [backend.tensors[pool.data.ptr] for pool in resources.base_cache.kv_pools]
    table = backend.tensors[resources.base_page_table.device_array.data.ptr]
    slots = ResidentSlotPool(2)
    config = ContextCacheConfig(enabled=True)
    with ContextCacheCoordinator(config, deployment, resources, backend=backend, stream=stream) as cache:
        founder = ContextCacheSequenceAdmission(list(range(10)), resident=slots.acquire())
        begun = cache.begin_request(ContextCacheBatchAdmission([founder]), DecodingKvHeadroom(1), stream)
        with begun.admission.request as request:
            cache.prepare_prefill(request)
            # The model is torch code on the same stream: behind the upload of the rows, without any wait.
            pages = table[0, 0, :3].long()
            for pool in pools:
                pool[0].index_fill_(0, pages, 1.0)
            torch.cuda.current_stream().synchronize()
            cache.finalize_prefill_publication(request, [ContextCacheSequenceAdvance([100], 10)])
            leased = [int(page) for page in cache.sequence(request, 0).base_pages]
            written = [pool.view(2, 64, -1)[0].sum(dim=1).nonzero().flatten().tolist() for pool in pools]
        print(f"the model wrote pages {written[0]} through the row, the coordinator leased {leased}")
        assert all(found == sorted(leased) for found in written)
    addresses = [pool.data_ptr() for pool in pools]
    assert addresses == [array.data.ptr for array in resources.base_cache.kv_pools]
    assert stream.ptr == torch.cuda.current_stream().cuda_stream
    print("every pool is at one address for torch and for the coordinator, and both use one stream")
