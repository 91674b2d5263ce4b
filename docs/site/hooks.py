"""Files outside of docs/ as pages of the site, so that links to them work there as on GitHub.

A page links to such a file by its path, `../examples/nanogpt.py` say. On the site that is the
page `source/examples/nanogpt.py`: Markdown as it is, a notebook cell by cell, anything else as a
listing.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md", "notebooks/first-steps.ipynb")
LANGUAGES = {".py": "python", ".cff": "yaml", ".toml": "toml"}
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def page_of(path: str) -> str:
    """The page that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def relink(text: str, path: str) -> tuple[str, set[str]]:
    """Markdown of the file ``path`` with links between pages, and the files it links to."""
    here, found = posixpath.dirname(page_of(path)), set()

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        found.add(target)
        return f"]({posixpath.relpath(page_of(target), here or '.')}{match[2] or ''})"

    parts, end = [], 0
    for fence in FENCED.finditer(text):
        parts += [LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, text[end:])]), found


def show(path: Path) -> str:
    """A file as Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        cells = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            cells.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        return "\n\n".join(cells)
    return f"# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root, todo = Path(config.docs_dir).parent, set(ALWAYS)
    for file in files.documentation_pages():
        todo |= relink(file.content_string, f"docs/{file.src_uri}")[1]
    done: set[str] = set()
    while todo := {path for path in todo if not path.startswith("docs/")} - done:
        for path in sorted(todo):
            if not (root / path).is_file():
                raise PluginError(f"a page links to {path}, which is not a file")
            text, more = show(root / path), set()
            if path.endswith((".md", ".ipynb")):
                text, more = relink(text, path)
            files.append(File.generated(config, page_of(path), content=text))
            done.add(path)
            todo = todo | more
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return relink(markdown, f"docs/{page.file.src_uri}")[0]
