"""The HTML explorer: lifecycles, and what a trace did in them, as one file that opens from disk.

``page``   puts the page together: template, style, scripts, data, all inlined.
``trace``  what the page knows of a trace, in columns.
``assets``  the page's own files; plain JavaScript, no library.
"""

from context_cache.diagrams.explorer.page import explorer_page
from context_cache.diagrams.explorer.trace import ExplorerTrace, ShownAct, ShownCall, ShownStep

__all__ = ["ExplorerTrace", "ShownAct", "ShownCall", "ShownStep", "explorer_page"]
