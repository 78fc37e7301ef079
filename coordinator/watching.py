"""What a recorder may see beside steps: calls, device verbs, identities, publications. Not part of the public API.

A recorder that is a :class:`Watcher` is told of every public call, and wraps the few doors through which a coordinator
reaches what is not its own: the device, the hashes of prefixes, the publication of an endpoint. Recording needs them to
write down what was asked; replaying needs them to answer as it was answered then. Without a watcher nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from context_cache.backends.base import LifecycleDevice
    from context_cache.coordinator.core import Core, Request
    from context_cache.coordinator.identity import BlockHasher

__all__ = ["Offer", "Publisher", "Watcher", "publish_offer"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

Offer: TypeAlias = "Callable[[Core, Request, int], None]"
"""How one resident slot is offered for publication."""

Publisher: TypeAlias = "Callable[[Offer, Core, Request, int], None]"
"""Makes one offer; raises what the offer raises."""


def publish_offer(offer: Offer, core: Core, request: Request, resident: int) -> None:
    """The publisher of a coordinator that nobody watches."""
    offer(core, request, resident)


@runtime_checkable
class Watcher(Protocol):
    """A recorder that sees calls. Every method of it must return without raising, except what it was handed to run."""

    def hasher(self, hasher: BlockHasher) -> BlockHasher:
        """The identity function to use instead, asked once, before anything is built."""

    def attach(self, core: Core) -> None:
        """The coordinator is built; wrap its doors. Raises ContractViolation if it cannot be watched."""

    def device(self, device: LifecycleDevice) -> LifecycleDevice:
        """The device to use instead."""

    def publisher(self, publisher: Publisher) -> Publisher:
        """The publisher to use instead."""

    def call(
        self, method: Callable[Concatenate[_S, _P], _R], coordinator: _S, /, *arguments: _P.args, **options: _P.kwargs
    ) -> _R:
        """Run one public call and return or raise what it does."""

    def dropped(self, request: Request, drop: Callable[[], None]) -> None:
        """Run the drop of a request, by its handle or as an orphan."""

    def settled(self) -> None:
        """The call is over, everything it changed is changed."""
