"""Arguments as callers give them, made plain or refused with one sentence."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from context_cache.coordinator.errors import ContractViolation

__all__ = ["Int32Array", "as_index", "as_int32", "as_tuple", "expect"]

Int32Array = npt.NDArray[np.int32]
_INT32: Final = np.iinfo(np.int32)


def as_int32(values: Any, what: str) -> Int32Array:
    """A read-only int32 copy of a list or integer array, one dimension.

    An array that is read only and owns its memory (such as this function returns) is taken as it is.
    Raises ContractViolation for anything that is not one dimension of integers in the range of int32.
    """
    if type(values) is np.ndarray and values.dtype == np.int32 and values.ndim == 1:
        if not values.flags.writeable and values.base is None and values.flags.c_contiguous:
            return values
        array = np.array(values, np.int32)
    else:
        try:
            raw = np.array(values if isinstance(values, np.ndarray) else list(values))
        except (TypeError, ValueError, OverflowError) as error:
            raise ContractViolation(
                f"{what} must be a list or array of integers, got {type(values).__name__}"
            ) from error
        if raw.size == 0:
            raw = raw.astype(np.int32).reshape(-1)
        if raw.ndim != 1 or raw.dtype.kind not in "iu":
            raise ContractViolation(
                f"{what} must be one dimension of integers, got {raw.ndim} dimension(s) of {raw.dtype}; pass int32 ids",
                dtype=str(raw.dtype),
            )
        if raw.size and (int(raw.min()) < _INT32.min or int(raw.max()) > _INT32.max):
            raise ContractViolation(f"{what} must fit int32, got values from {raw.min()} to {raw.max()}")
        array = raw.astype(np.int32)
    array.flags.writeable = False
    return array


def as_index(value: Any, what: str) -> int:
    """A plain int of an int or NumPy integer. Raises ContractViolation for anything else, bools included."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ContractViolation(f"{what} must be an integer, got {value!r}")
    return int(value)


def as_tuple(values: Any, what: str) -> tuple[Any, ...]:
    """The items of an iterable. Raises ContractViolation for anything else, text included."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ContractViolation(f"{what} must be a list, got {type(values).__name__}")
    return tuple(values)


def expect(value: Any, kind: type | types.UnionType, what: str) -> None:
    """Raise ContractViolation unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        names = getattr(kind, "__name__", None) or str(kind)
        raise ContractViolation(f"{what} must be a {names}, got {type(value).__name__}")
