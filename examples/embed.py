"""A runtime in miniature: one batch on the host backend, a joiner, retirement by compaction.

The "model" is a counter; what matters is the order of the calls and where the runtime synchronises.
"""

import numpy as np

from context_cache.backends import HostBackend
from context_cache.coordinator import (
    BatchAdvance,
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

backend = HostBackend()
stream = backend.new_stream()
deployment = DeploymentConfig(
    max_batch=2, kv_capacity_tokens=64, page_size=4, layers=(LayerGeometry.attention(kv_heads=1, head_dim=8),)
)
resources = allocate_resources(deployment, num_pages=64, backend=backend)
config = ContextCacheConfig(enabled=True)
slots, headroom = ResidentSlotPool(2), DecodingKvHeadroom(1)
mapping = backend.array((2,), "int32")

with ContextCacheCoordinator(config, deployment, resources, backend=backend, stream=stream) as cache:
    founder = ContextCacheSequenceAdmission(list(range(10)), resident=slots.acquire())
    begun = cache.begin_request(ContextCacheBatchAdmission([founder]), headroom, stream)
    with begun.admission.request as request:
        cache.prepare_prefill(request)
        # The runtime enqueues its prefill here, from begun.admission.prefill_starts[0] on, and samples one token.
        backend.synchronize(stream)
        cache.finalize_prefill_publication(request, [ContextCacheSequenceAdvance([100], 10)])

        # Somebody with the same first eight tokens joins the running batch: two pages are shared.
        joiner = ContextCacheSequenceAdmission([*range(8), 50, 51], resident=slots.acquire())
        joined = cache.admit_sequence(request, joiner, headroom)
        print(f"the joiner starts at token {joined.prefill_start}")
        # The runtime appends the slot to its batch, tells the cache, enqueues the prefill of the suffix, synchronises.
        resources.base_cache.materialize_execution_lengths(np.array([10, 10], np.int32), 2, stream)
        backend.synchronize(stream)
        cache.finalize_sequence_admission(request, 1, ContextCacheSequenceAdvance([200], 10))

        lengths = np.array([10, 10], np.int32)
        for step in range(6):
            cache.prepare_decode_step(request, headroom)
            resources.base_cache.commit_sequence_length(1, stream)
            backend.synchronize(stream)
            lengths += 1
            tokens = np.array([101 + step, 201 + step], np.int32)
            ended = [0] if step == 5 else []
            cache.complete_decode_step(request, BatchAdvance.one_token_each(tokens, lengths.copy()), ended)

        # The founder ended normally and was published; it leaves, the joiner becomes logical slot 0.
        cache.begin_batch_compaction(request, [-1, 0], 1, mapping)
        cache.compact_batch(request)
        slots.release(founder.resident)
        print(f"{request.batch_size} sequence left, {len(cache.manager.records)} endpoints published")
        cache.finish(request)
        slots.release(joiner.resident)
    print(f"pages leased at the end: {cache.metrics().base_kv_pages_leased}")
