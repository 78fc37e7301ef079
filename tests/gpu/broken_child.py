"""A process whose kernel writes to an illegal address while a request is running. Started by ``test_broken_device``.

Prints one JSON object and ends with exit code 7, through the ordinary end of the interpreter.
"""

import gc
import json
import logging
import sys

from context_cache.backends import DeviceError
from context_cache.backends.cupy_backend import CupyBackend
from context_cache.coordinator import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentRef,
    allocate_resources,
)

BAD = 'extern "C" __global__ void bad(int* nowhere) { *nowhere = 1; }'


class Trace:
    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - flushed and closed at the end, as a run does
        self.steps = 0

    def record(self, step):
        self.steps += 1
        self.file.write(f"{step}\n")

    __call__ = record


def main(path):
    logging.disable(logging.CRITICAL)
    backend = CupyBackend()
    stream = backend.new_stream("runtime")
    layers = (LayerGeometry.attention(1, 4), LayerGeometry.recurrent(1, 2, 2, 2, 2))
    deployment = DeploymentConfig(max_batch=2, kv_capacity_tokens=16, page_size=4, layers=layers)
    resources = allocate_resources(deployment, 8, backend)
    trace = Trace(path)
    config = ContextCacheConfig(
        enabled=True, recurrent_snapshot_pool_bytes=1 << 16, partial_kv_snapshot_pool_bytes=1 << 16
    )
    cache = ContextCacheCoordinator(
        config, deployment, resources, backend=backend, stream=stream, recorder=trace, identity_key=bytes(32)
    )
    kernel = backend._device.cupy.RawKernel(BAD, "bad")
    backend._device.keep_for_ever(kernel)  # cupy would unload its code at the end, and say that it could not
    admission = ContextCacheSequenceAdmission([1, 2, 3, 4, 5], resident=ResidentRef(0, 1))
    begun = cache.begin_request(ContextCacheBatchAdmission([admission]), DecodingKvHeadroom(1, 0), stream)
    request = begun.admission.request
    cache.prepare_prefill(request)
    # Near address 0: nobody's.
    kernel((1,), (1,), (16,), stream=stream)
    report = {"finish": str(cache.finish(request)), "request": str(request.state), "coordinator": cache.state}
    report["lost"] = backend.lost
    report["shutdown"] = str(cache.shutdown())
    report["after"] = str(request.state)
    verbs = {
        "record_event": lambda: backend.record_event(stream),
        "array": lambda: backend.array((4,), "int32"),
        "pinned": lambda: backend.pinned((4,), "int32"),
        "to_host": lambda: backend.to_host(resources.base_cache.lengths),
        "synchronize": lambda: backend.synchronize(stream),
        "limited": lambda: backend.synchronize(stream, 0.01),
        "new_stream": lambda: backend.new_stream(),
    }
    report["later"] = {}
    for name, verb in verbs.items():
        try:
            verb()
            report["later"][name] = "worked"
        except DeviceError as error:
            report["later"][name] = error.cause
    report["withheld"] = cache.metrics().base_kv_pages_withheld
    report["steps"] = trace.steps
    trace.file.close()
    print(json.dumps(report))
    # Some of it is dropped here, the rest while the interpreter ends.
    del cache, request, begun
    gc.collect()
    sys.exit(7)


main(sys.argv[1])
