"""Every Python block of the README and the docs runs as written."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what they write goes there
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    if page.name in ("README.md", "format.md"):
        assert blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables_are_those_of_the_result_files():
    """No figure in a table of results that is not in a committed result file."""
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    lines = {
        line
        for path in (ROOT / "benchmarks" / "results").glob("*.json")
        for line in [*table["rows"](path), "- " + table["caption"](path)]
    }
    for page in (ROOT / "README.md", ROOT / "docs" / "benchmarks.md"):
        text = page.read_text()
        shown = [li for li in text.splitlines() if re.search(r"\| (dense|checkpoint|compress)", li)]
        shown = [li for li in shown if li.count("|") == 9]
        assert shown
        assert set(shown) <= lines


def test_tables_under_known_headers_are_those_of_the_result_files():
    """The same, for whatever `benchmarks/table.py` prints, recognised by its header."""
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    lines: dict[str, set[str]] = {}
    captions = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        captions.add("- " + table["caption"](path))
        for header, rows in table["tables"](path):
            lines.setdefault(header, set()).update(rows)
    known = {table[name].splitlines()[0] for name in ("HEADER", "CODEC_RATES", "KERNELS", "FFN")}
    known |= {header.splitlines()[0] for header in lines}
    names = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    found = 0
    for page in (ROOT / "README.md", ROOT / "docs" / "benchmarks.md"):
        text = page.read_text()
        for header, rule, body in re.findall(
            r"^(\| .*\|)\n(\|(?: --- \|)+)\n((?:\| .*\|\n?)*)", text, re.M
        ):
            if header in known:
                found += 1
                allowed = lines.get(f"{header}\n{rule}", set())
                assert set(body.splitlines()) <= allowed, f"{page.name}: {header}"
        for name in re.findall(r"^- ([\w-]+): ", text, re.M):
            if name in names:
                assert any(line in captions for line in text.splitlines() if f"- {name}: " in line)
    assert found >= 4
