"""Pictures and tables of the lifecycles, drawn from their specs."""

from context_cache.diagrams.drawing import Drawing, Edge, Node, draw
from context_cache.diagrams.markdown import to_markdown
from context_cache.diagrams.mermaid import to_mermaid

__all__ = ["Drawing", "Edge", "Node", "draw", "to_markdown", "to_mermaid"]
