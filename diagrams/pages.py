"""The committed pages that show tables and pictures: what they must say, from the specs."""

from __future__ import annotations

from context_cache.diagrams.markdown import to_markdown
from context_cache.diagrams.mermaid import to_mermaid
from context_cache.machines import ALL_MACHINES, REQUEST

__all__ = ["lifecycles_page", "request_picture"]


def request_picture() -> str:
    """The picture of a request's life as a Markdown block, as the README shows it."""
    return f"```mermaid\n{to_mermaid(REQUEST)}```\n"


def lifecycles_page() -> str:
    """``docs/lifecycles.md``: every machine, picture and table."""
    head = (
        "# Lifecycles\n\n"
        "Made from the tables in `machines/` by `python -m context_cache.diagrams.pages`; a test holds this page to "
        "them.\n\nIn the pictures a dashed arrow is a way that only an error takes, rows between the same two states "
        "are one arrow, and rows that stay in their state are left to the table. In the tables the steps of a row run "
        "from left to right; `machine.event` is an event offered to another machine.\n"
    )
    parts = [head]
    for spec in ALL_MACHINES:
        title, rest = to_markdown(spec).split("\n", 1)
        parts.append(f"\n{title}\n\n```mermaid\n{to_mermaid(spec)}```\n{rest}")
    return "".join(parts)


if __name__ == "__main__":
    print(lifecycles_page(), end="")
