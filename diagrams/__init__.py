"""Pictures and tables of the lifecycles, drawn from their specs.

``table``  a machine as plain values, from a spec or from a committed JSON document.
``drawing``  what a picture shows: nodes, edges, lines; rows are folded here.
``overlay``  marks on a picture: what a run, a coverage count or a diff adds.
``dot``, ``mermaid``, ``markdown``  renderers that need nothing; ``engines`` lays DOT out as SVG, PNG or PDF.
"""

from context_cache.diagrams.dot import to_dot
from context_cache.diagrams.drawing import Drawing, Edge, Node, draw
from context_cache.diagrams.markdown import to_markdown
from context_cache.diagrams.mermaid import to_mermaid
from context_cache.diagrams.overlay import Mark, Overlay
from context_cache.diagrams.table import Table, TableError

__all__ = [
    "Drawing",
    "Edge",
    "Mark",
    "Node",
    "Overlay",
    "Table",
    "TableError",
    "draw",
    "to_dot",
    "to_markdown",
    "to_mermaid",
]
