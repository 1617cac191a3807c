"""What mkdocs does besides rendering Markdown: it makes the page of messages, and edits the HTML of the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

EXPLANATIONS = Path(__file__).parents[1] / "compile_callbacks" / "cli" / "explanations"
MESSAGES_HEAD = """\
# Messages

Every warning and error ends with a code, such as `[CC104: compile-callbacks explain CC104]`. The command prints the
entry of a code; this page has all entries. A warning is a `CompileWarning`:
`warnings.filterwarnings("error", category=CompileWarning)` makes an error of each, `"ignore"` silences them.
"""


def on_files(files: Any, config: Any) -> None:
    """Add ``messages.md``, made of the texts that ``compile-callbacks explain`` prints."""
    text = "\n".join([MESSAGES_HEAD, *(f"#{path.read_text()}" for path in sorted(EXPLANATIONS.glob("*.md")))])
    text = re.sub(r"^## (CC(\d+): .*)$", r"### \1 {#cc\2}", text, flags=re.MULTILINE)
    files.append(File.generated(config, "messages.md", content=text))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make links of the names of pages in the reference, and one colon of the two before an example."""
    if page.file.src_uri != "api.md":
        return html
    html = html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")
    return re.sub(r"docs/(\w+)\.md", r'<a href="\1.html">docs/\1.md</a>', html)
