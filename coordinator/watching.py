"""What a recorder may see beside steps: calls, device verbs, identities, publications. Not part of the public API.

A recorder that is a :class:`Watcher` is told of every public call, and wraps the few doors through which a coordinator
reaches what is not its own: the device, the hashes of prefixes, the publication of an endpoint. Recording needs them to
write down what was asked; replaying needs them to answer as it was answered then. Without a watcher nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from context_cache.backends.base import LifecycleDevice
    from context_cache.coordinator.core import Core, Request
    from context_cache.coordinator.identity import BlockHasher

__all__ = ["Offer", "Publisher", "Watcher", "publish_offer"]

Offer: TypeAlias = "Callable[[Core, Request, int], None]"
"""How one resident slot is offered for publication."""

Publisher: TypeAlias = "Callable[[Offer, Core, Request, int], None]"
"""Makes one offer; raises what the offer raises."""


def publish_offer(offer: Offer, core: Core, request: Request, resident: int) -> None:
    """The publisher of a coordinator that nobody watches."""
    offer(core, request, resident)


@runtime_checkable
class Watcher(Protocol):
    """A recorder that sees calls.

    What it is asked once, while a coordinator is built, may raise ContractViolation: then none is built. Of the rest
    only an interrupt may pass, and what ``dropped`` was handed to run; its own troubles are its own.

    looks_before: names of calls before which it wants to look. began_at: set to ``perf_counter_ns`` at each call.
    """

    looks_before: frozenset[str]
    began_at: int

    def hasher(self, hasher: BlockHasher) -> BlockHasher:
        """The identity function to use instead, asked once, before anything is built.

        Raises ContractViolation if this watcher cannot be given to a coordinator.
        """

    def attach(self, core: Core) -> None:
        """The core is built, its doors are wrapped already, and nothing has happened.

        Raises ContractViolation if it cannot be watched from the state that its books and tables are in.
        """

    def device(self, device: LifecycleDevice) -> LifecycleDevice:
        """The device to use instead."""

    def publisher(self, publisher: Publisher) -> Publisher:
        """The publisher to use instead."""

    def look(self) -> None:
        """A call named in ``looks_before`` is about to begin."""

    def returned(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """A public call has returned ``result``."""

    def raised(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], error: BaseException) -> None:
        """A public call raises ``error``; whatever that changes is changed."""

    def dropped(self, request: Request, drop: Callable[[], None]) -> None:
        """Run the drop of a request, by its handle or as an orphan."""
