"""Page-table rows of the base model and of the draft, bound, extended and cleared together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.page_table import KVPageTable
from context_cache.coordinator.types import ResidentRef

__all__ = ["Rows"]


class Rows:
    """Both tables of one coordinator. A pure recurrent deployment has none: binding is then nothing but a no-op.

    A row of the draft's table is bound only for a paired request, so a plain request leaves that table untouched.
    """

    def __init__(self, base: KVPageTable | None, draft: KVPageTable | None) -> None:
        self.base, self.draft = base, draft

    def bind(self, refs: Sequence[ResidentRef], base: Sequence[Int32Array], draft: Sequence[Int32Array] | None) -> None:
        """Give rows to their holders; ``draft`` is None for an unpaired request."""
        if self.base is not None:
            self.base.bind(zip(refs, base, strict=True))
        if self.draft is not None and draft is not None:
            self.draft.bind(zip(refs, draft, strict=True))

    def extend_base(self, refs: Sequence[ResidentRef], starts: Sequence[int], pages: Sequence[Int32Array]) -> None:
        """Append base pages behind ``starts[i]`` entries of each row."""
        if self.base is not None:
            self.base.extend(refs, starts, pages)

    def extend_draft(self, refs: Sequence[ResidentRef], starts: Sequence[int], pages: Sequence[Int32Array]) -> None:
        """The same for draft pages."""
        if self.draft is not None:
            self.draft.extend(refs, starts, pages)

    def unbind(self, refs: Iterable[ResidentRef]) -> bool:
        """Clear the rows that are bound to these holders; whether there was any."""
        holders = list(refs)
        any_bound = False
        for table in (self.base, self.draft):
            if table is None:
                continue
            bound = [ref for ref in holders if table.bound_epoch(ref.slot) == ref.epoch]
            if bound:
                table.unbind(bound)
                any_bound = True
        return any_bound
