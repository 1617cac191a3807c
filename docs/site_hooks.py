"""What the site does to pages beside rendering them: docstrings are written to be read as text too."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make links of the names of pages in the reference, and one colon of the two before an example."""
    if page.file.src_uri != "api.md":
        return html
    html = html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")
    return re.sub(r"docs/(\w+)\.md", r'<a href="\1.html">docs/\1.md</a>', html)
