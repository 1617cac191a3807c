"""Hooks of mkdocs: they generate the pages that have another source, and edit the HTML of the API reference.

Generated are the messages (from the texts of ``compile-callbacks explain``), the notebook, the changelog and the page
for contributors.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
EXPLANATIONS = ROOT / "compile_callbacks" / "cli" / "explanations"
MESSAGES_HEAD = """\
# Messages

Every warning and error ends with a code, such as `[CC104: compile-callbacks explain CC104]`. The command prints the
explanation of the code, and this page contains the explanations of all codes.

A warning is a `CompileWarning`. To turn these warnings into errors, use
`warnings.filterwarnings("error", category=CompileWarning)`. To hide them, use `"ignore"` in place of `"error"`.
"""


def on_files(files: Any, config: Any) -> None:
    """Add the generated pages."""
    pages = {
        "reference/messages.md": _messages(),
        "get_started/notebook.md": _notebook(ROOT / "examples" / "quickstart.ipynb"),
        "project/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "project/contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("(docs/", "(../"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))


def _messages() -> str:
    text = "\n".join([MESSAGES_HEAD, *(f"#{path.read_text()}" for path in sorted(EXPLANATIONS.glob("*.md")))])
    return re.sub(r"^## (CC(\d+): .*)$", r"### \1 {#cc\2}", text, flags=re.MULTILINE)


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown, with their outputs: texts and PNG pictures."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(_cell(cell) for cell in cells).replace("(../docs/", "(../")


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![The output of the cell](data:image/png;base64,{data['image/png'].replace(chr(10), '')})"
    text = "".join(output.get("text") or data["text/plain"])
    return f"```text\n{text.rstrip()}\n```"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make links of the names of pages in the reference, and one colon of the two before an example."""
    if page.file.src_uri != "reference/api.md":
        return html
    html = html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")
    return re.sub(r"docs/([\w/]+)\.md", r'<a href="../\1.html">docs/\1.md</a>', html)
