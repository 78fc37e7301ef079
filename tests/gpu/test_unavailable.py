"""Where the backend cannot work it says in one sentence what is missing and what to install. Needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from context_cache.backends.cupy_backend import BackendUnavailable, CupyBackend, device


class Failure(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaErrorSomething: {status}")
        self.status = status


def machine(monkeypatch, *, status=None, driver=13000, count=1, capability="90"):
    """A machine with cupy, whose driver answers like this."""

    def devices():
        if status is not None:
            raise Failure(status)
        return count

    runtime = SimpleNamespace(
        CUDARuntimeError=Failure, getDeviceCount=devices, driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13000, getDevice=lambda: 0,
    )  # fmt: skip
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=Failure),
        compiler=SimpleNamespace(CompileException=Failure),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        Device=lambda index: SimpleNamespace(compute_capability=capability),
    )
    monkeypatch.setattr(device, "_import_cupy", lambda: SimpleNamespace(cuda=cuda))


def refused(words, number=None):
    with pytest.raises(BackendUnavailable, match=words) as caught:
        CupyBackend(number)
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message, "one sentence"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), r"cupy is not installed; install .*\[cuda13\]"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "without its part x; install"),
        (ImportError("\nlibcudart.so.12: missing\nmore"), r"does not load \(libcudart.so.12: missing\); install"),
    ],
)
def test_no_cupy(monkeypatch, error, words):
    def load(name):
        raise error

    monkeypatch.setattr(device, "importlib", SimpleNamespace(import_module=load))
    refused(words)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": 35, "driver": 0}, "no NVIDIA driver was found; install the driver"),
        ({"status": 35, "driver": 12040}, r"supports CUDA 12\.4 and this cupy was built for CUDA 13\.0; install"),
        ({"status": 100}, "no CUDA GPU is visible to this process"),
        ({"status": 999}, r"CUDA does not start \(cudaErrorSomething: 999\)"),
        ({"count": 0}, "no CUDA GPU is visible to this process"),
        ({"capability": "61"}, r"compute capability 6\.1, and the kernels need 7\.0"),
    ],
)
def test_no_gpu(monkeypatch, facts, words):
    machine(monkeypatch, **facts)
    refused(words)


@pytest.mark.parametrize("number", [-1, 1])
def test_no_such_device(monkeypatch, number):
    machine(monkeypatch)
    refused(f"no CUDA device {number}, only 1", number)


def test_the_package_imports_without_cupy():
    """Also what the tests on a GPU do when they are collected."""
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from context_cache.backends.cupy_backend import BackendUnavailable, CupyBackend\n"
        "try:\n    CupyBackend()\n"
        "except BackendUnavailable as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the package cupy is not installed; install")
