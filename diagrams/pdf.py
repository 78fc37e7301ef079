"""An SVG picture as a PDF page.

The page uses the fonts that every PDF viewer has, whose widths are the ones the layout counted with. They know Latin
text, Greek letters and the common signs; any other character is spelled out, as ``U+65E5``, so that nothing is lost
silently. The system's ``dot`` embeds fonts instead.
"""

from __future__ import annotations

import io

from context_cache.diagrams.engines import DrawingFailed

__all__ = ["svg_to_pdf"]


def svg_to_pdf(svg: str) -> bytes:
    """One page of the picture's size, with text that can be selected; the same bytes each time."""
    from reportlab.graphics import renderPDF
    from reportlab.pdfbase.pdfmetrics import getFont
    from reportlab.pdfgen.canvas import Canvas
    from svglib.svglib import svg2rlg

    helvetica = getFont("Helvetica")
    encodings = [font.encName for font in (helvetica, *helvetica.substitutionFonts)]
    text = "".join(c if c.isascii() or _known(c, encodings) else f"U+{ord(c):04X}" for c in svg)
    picture = svg2rlg(io.BytesIO(text.encode()))
    if picture is None:
        raise DrawingFailed("svglib could not read the SVG picture that a PDF is made of; use --format svg")
    page = io.BytesIO()
    canvas = Canvas(page, pagesize=(picture.width, picture.height), invariant=1)
    renderPDF.draw(picture, canvas, 0, 0)
    canvas.showPage()
    canvas.save()
    return page.getvalue()


def _known(c: str, encodings: list[str]) -> bool:
    for encoding in encodings:
        try:
            c.encode(encoding)
        except UnicodeEncodeError:
            continue
        return True
    return False
