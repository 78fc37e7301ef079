"""How large the page table and the page pool of a run are. Decided, and refused, before anything is built."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from context_cache.coordinator.cli.workload import Workload

__all__ = ["HEADROOM_TOKENS", "PAGES_MAX", "ROW_TOKENS_MAX", "RunSize", "SizeError", "size_run"]

HEADROOM_TOKENS: Final = 1
"""Positions past the committed length that a plain decode step may write; a speculative one writes more."""

ROW_TOKENS_MAX: Final = 2**24
"""A longer sequence is taken for a mistake in the file: the longest context of any model is far below."""

PAGES_MAX: Final = 2**26
"""More pages are taken for a mistake on the command line: their bookkeeping alone would fill gigabytes."""

_ROWS_PER_SLOT: Final = 4  # the default pool holds the rows of the running batch and three times as much of the past


class SizeError(Exception):
    """The options do not fit together. One sentence; nothing was built and nothing ran."""


@frozen
class RunSize:
    """``row_tokens`` is a multiple of ``page_size`` (tokens); ``pages`` is at least the pages of one row.

    Without attention layers there are no pages, and ``pages`` is 0.
    """

    page_size: int
    row_tokens: int
    pages: int
    max_batch: int

    @property
    def row_pages(self) -> int:
        return self.row_tokens // self.page_size


def size_run(
    workload: Workload,
    *,
    page_size: int,
    max_batch: int,
    pages: int | None = None,
    row_tokens: int | None = None,
    headroom: int = HEADROOM_TOKENS,
    paged: bool = True,
) -> RunSize:
    """Size the row for the longest input + output + headroom, rounded up to a page, unless ``row_tokens`` is given.

    Without ``pages`` the pool holds four rows for every sequence that can run at once; a model that is not ``paged``
    has no page. ``headroom``: positions past the committed length that a step may write.
    Raises: WorkloadError if a request does not fit into the row (with its line); SizeError if the pool is too small or
    too large.
    """
    limit = ROW_TOKENS_MAX if row_tokens is None else _round_up(row_tokens, page_size)
    longest = 0
    for request in workload.requests:
        length = request.prompt_length + request.max_new_tokens + headroom
        if length > limit:
            advice = "use --max-new-tokens" if row_tokens is None else "use --max-new-tokens, raise --row-tokens"
            raise workload.error(
                request,
                f"needs {length} tokens (input {request.prompt_length}, output {request.max_new_tokens}, headroom "
                f"{headroom}) and a page-table row holds {limit}; {advice} or remove the request",
            )
        longest = max(longest, length)
    row_pages = (_round_up(longest, page_size) if row_tokens is None else limit) // page_size
    if not paged:
        pages = 0
    elif pages is None:
        pages = _ROWS_PER_SLOT * max_batch * row_pages
        if pages > PAGES_MAX:
            raise SizeError(f"the default pool would have {pages} pages, more than {PAGES_MAX}; choose --pages")
    elif pages > PAGES_MAX:
        raise SizeError(f"--pages {pages} is more than {PAGES_MAX}; choose fewer")
    elif pages < row_pages:
        raise SizeError(
            f"--pages {pages} is too small: a row of {row_pages * page_size} tokens takes {row_pages} pages of "
            f"{page_size}; use --pages {row_pages} or more, or shorten outputs with --max-new-tokens"
        )
    return RunSize(page_size=page_size, row_tokens=row_pages * page_size, pages=pages, max_batch=max_batch)


def _round_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size
