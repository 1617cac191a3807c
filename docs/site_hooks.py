"""Hooks of mkdocs: they generate the pages that have another source, and edit the HTML of the API reference.

Generated are the front page (from the README), the messages (from the texts of ``compile-callbacks explain``), the
notebook, the changelog, the pages about security and for contributors, and the tables of the report's figures (from
their declarations). The sidebar with the navigation is shown from a smaller width of the window on than in the theme.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
EXPLANATIONS = ROOT / "compile_callbacks" / "cli" / "explanations"
WIDTHS = {"76.25em": "68.75em", "76.234375em": "68.734375em"}
"""The smallest width of a window with a sidebar, and the largest without: the theme's, and ours (1100 px)."""
FRONT_PAGE_HEAD = "---\nhide: [navigation, toc]\n---\n\n"
BUTTONS = (
    "[Get started](get_started/cpu.md){ .md-button .md-button--primary }\n"
    "[On a GPU](get_started/gpu.md){ .md-button }\n"
    "[From torch.compile](how_to/migrate.md){ .md-button }"
)
MESSAGES_HEAD = """\
# Messages

Every warning and error of this library ends with a code, such as `[CC104: compile-callbacks explain CC104]`. The
command prints the explanation of the code, and this page contains the explanations of all codes.

A warning is a `CompileWarning`. To turn these warnings into errors, use
`warnings.filterwarnings("error", category=CompileWarning)`. To hide them, use `"ignore"` in place of `"error"`.
"""


def on_files(files: Any, config: Any) -> None:
    """Add the generated pages."""
    pages = {
        "index.md": _front_page(),
        "reference/messages.md": _messages(),
        "get_started/notebook.md": _notebook(ROOT / "examples" / "quickstart.ipynb"),
        "project/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "project/security.md": (ROOT / "SECURITY.md").read_text(),
        "project/contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("(docs/", "(../"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))


def _front_page() -> str:
    """Return the README without its links, which the navigation has, and with buttons below the first sentence."""
    readme = (ROOT / "README.md").read_text().partition("## Documentation")[0].replace("(docs/", "(")
    title, sentence, rest = readme.split("\n\n", 2)
    return "\n\n".join([FRONT_PAGE_HEAD + title, sentence, BUTTONS, rest])


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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the tables of figures to the page about the report, and leave out what only a code host shows."""
    markdown = re.sub(r"<!-- code host -->.*?<!-- end of code host -->", "", markdown, flags=re.DOTALL)
    return with_figures(markdown) if page.file.src_uri == "reference/report.md" else markdown


def with_figures(markdown: str) -> str:
    """Put tables of figures between the comments that stand for them, in place of the text for a code host."""
    from compile_callbacks.report.figures import PhaseDiagnostics, PhaseReport

    tables, scalars = {}, ["| scalar | field |", "| --- | --- |"]
    for cls in (PhaseReport, PhaseDiagnostics):
        rows = ["| field | row of the table | meaning |", "| --- | --- | --- |"]
        for name, figure in cls.declared().items():
            label = f"`{figure.row}`" if figure.group else ""
            rows.append(f"| `{name}` | {label} | {' '.join(figure.__doc__.split())} |")
            scalars += [f"| `{figure.scalar}` | `{name}` |"] if figure.scalar else []
        tables[f"figures of {cls.__name__}"] = rows
    for name, lines in (tables | {"scalars": scalars}).items():
        before, _, rest = markdown.partition(f"<!-- {name} -->")
        markdown = "\n".join([before, *lines, rest.partition(f"<!-- end of {name} -->")[2]])
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make one colon of the two before an example of the reference."""
    if page.file.src_uri != "reference/api.md":
        return html
    return html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")


def on_post_build(config: Any) -> None:
    """Change the width from which on the sidebar is shown, in the theme's style sheets and in its script."""
    assets = Path(config["site_dir"], "assets")
    for path in (*assets.glob("stylesheets/*.css"), *assets.glob("javascripts/bundle.*.js")):
        text = path.read_text()
        assert "76.25em" in text, f"does this version of the theme have other widths in {path.name}?"
        for theirs, ours in WIDTHS.items():
            text = text.replace(theirs, ours)
        path.write_text(text)
