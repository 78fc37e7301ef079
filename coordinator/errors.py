"""Errors of the coordinator package: one class to catch, one class per cause.

A message is one sentence that says what was refused, where, and what to do instead. The facts behind it are kept
beside the text, as ``error.facts`` and as attributes, so that a program never has to parse the sentence::

    except ContractViolation as error:
        error.facts["count"], error.count

Errors are picklable, facts included, because runtimes hand them across processes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ContextCacheError", "ContractViolation", "InvariantViolation"]


class ContextCacheError(Exception):
    """Base of every error that this package raises by itself (a backend's ``DeviceError`` is not one of them).

    ``message`` is the sentence, ``facts`` are plain picklable values that it was made from.
    """

    facts: dict[str, Any]

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Looked up in __dict__ because unpickling asks for attributes before the facts are back.
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute or fact {name!r}") from None


class ContractViolation(ContextCacheError):
    """The caller asked for something that the rules exclude. Nothing changed."""


class InvariantViolation(ContextCacheError):
    """The metadata contradicts itself: a bug, never a caller's fault. Stop admitting and report it."""
