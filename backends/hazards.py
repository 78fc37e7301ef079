"""Use of pages that are not yours, found while it happens: the strict half of the host backend.

The runtime's work (in tests: a model stub) names the pages it reads and writes when it is enqueued. The monitor is told
by the resource pools when pages are leased and freed. It raises :class:`HazardError`

* when work that runs late touches a page that has been freed since it was enqueued, or given to somebody else;
* when a page is freed while work that touches it is still pending;
* when work writes a page that more than one lease or a record can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from context_cache.backends.host import HostStream

__all__ = ["HazardError", "HazardMonitor"]


class HazardError(AssertionError):
    """A page was used by somebody who must not use it. A bug, never a device error."""


class HazardMonitor:
    """Watches the pages of one pool.

    num_pages:  size of the pool.
    page_type:  which of the manager's pools to listen to (its ``ResourceType`` value).
    is_shared:  says whether a page may be read by anyone beside its writer (more than one active reference, or a
                cache reference); None: not checked.
    """

    def __init__(self, num_pages: int, page_type: int = 0, is_shared: Callable[[int], bool] | None = None) -> None:
        self._page_type = page_type
        self._generation = np.zeros(num_pages, np.int64)
        self._live = np.zeros(num_pages, bool)
        self._pending = np.zeros(num_pages, np.int64)
        self.is_shared = is_shared

    def leased(self, resource_type: int, indices: npt.NDArray[Any]) -> None:
        """Pool hook: the pages were taken from the free list."""
        if resource_type == self._page_type:
            self._live[indices] = True
            self._generation[indices] += 1

    def freed(self, resource_type: int, indices: npt.NDArray[Any]) -> None:
        """Pool hook: the pages went back to the free list."""
        if resource_type != self._page_type:
            return
        for page in np.asarray(indices).tolist():
            if self._pending[page]:
                raise HazardError(f"page {page} was freed while {self._pending[page]} pieces of work still use it")
            if not self._live[page]:
                raise HazardError(f"page {page} was freed twice")
        self._live[indices] = False

    def enqueue(
        self,
        stream: HostStream,
        work: Callable[[], None],
        label: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
    ) -> None:
        """Enqueue work that touches pages. Writes to shared pages are refused at once."""
        written = tuple(writes)
        touched = tuple(dict.fromkeys((*reads, *written)))
        for page in touched:
            if not self._live[page]:
                raise HazardError(f"{label} uses page {page}, which nobody holds")
        for page in written:
            if self.is_shared is not None and self.is_shared(page):
                raise HazardError(f"{label} writes page {page}, which others can read")
        generations = {page: int(self._generation[page]) for page in touched}
        self._pending[list(touched)] += 1

        def checked() -> None:
            self._pending[list(touched)] -= 1
            for page, generation in generations.items():
                if self._generation[page] != generation or not self._live[page]:
                    raise HazardError(f"{label} ran late and uses page {page}, which has a new life")
            work()

        stream.enqueue(checked, label)
