"""`make docs`: the site builds without a warning, is complete, loads nothing from elsewhere."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import bitsparse

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'bitsparse[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_every_page_is_there(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).exists(), page.name
    sources = [*(ROOT / "examples").glob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    for source in [*sources, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        name = source.relative_to(ROOT).as_posix().removesuffix(".md")
        assert (site / "source" / f"{name}.html").exists(), name


def test_every_public_name_is_documented(site):
    page = (site / "api.html").read_text()
    for name in bitsparse.__all__:
        if name not in ("__version__", "nn"):
            assert f'id="bitsparse.{name}"' in page, name
    assert 'id="bitsparse.nn.FeedForward"' in page


def test_docstrings_are_shown_as_markdown(site):
    page = (site / "api.html").read_text()
    text = re.sub(r"<[^>]+>", "", page[page.index("<article") : page.index("</article>")])
    assert ":func:" not in text and ":class:" not in text and ":meth:" not in text
    assert "::" not in text


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", tag), f"{page.name}: {tag}"


def test_pictures_are_those_of_the_script():
    for name, draw in runpy.run_path(str(ROOT / "docs/site/pictures.py"))["PICTURES"].items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text() == draw().svg(), name
