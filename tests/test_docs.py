"""Every Python block of the README, of the docs and of docstrings on the site runs as written.

A block that needs more than bitsparse and a CPU says so in a comment before it, which readers do
not see: `<!-- needs: gpu -->`, `network` or `processes`, or names of packages. If something is not
there, the block is left out. Comments are counted in `NEEDS`: none can hide a block that fails.
"""

import ast
import importlib.util
import inspect
import re
import runpy
import shlex
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch

import bitsparse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[\w ]+) -->\n)?(?P<indent> *)```(?P<language>[^\n`]*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
PACKAGES = {"accelerate", "lightning", "transformers"}
NEEDS = {
    ("turn-it-on.md", "accelerate transformers"): 1,
    ("turn-it-on.md", "gpu"): 1,
    ("turn-it-on.md", "lightning"): 1,
    ("turn-it-on.md", "network"): 1,
    ("turn-it-on.md", "processes"): 1,
}
# Python in blocks of another kind: parts of a program, which mean nothing by themselves.
PARTS = {"commands.md": 1, "convert.md": 1, "training.md": 1}


def is_there(need):
    if need == "gpu":
        return torch.cuda.is_available()
    return need in PACKAGES and importlib.util.find_spec(need) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what they write goes there
    blocks = [b for b in BLOCK.finditer(page.read_text()) if b["language"] == "python"]
    namespace: dict[str, object] = {}
    missing = set()
    for block in blocks:
        absent = {need for need in (block["needs"] or "").split() if not is_there(need)}
        missing |= absent
        if not absent:
            # Compiled as it stands in the page, so that a traceback has the page's lines.
            line = block.string[: block.start("code")].count("\n")
            source = "\n" * line + textwrap.dedent(block["code"])
            exec(compile(source, str(page), "exec"), namespace)
    if page.name in ("README.md", "concepts.md", "format.md", "tutorial.md", "turn-it-on.md"):
        assert blocks
    if missing & PACKAGES:
        pytest.skip(f"but for blocks that need {', '.join(sorted(missing & PACKAGES))}")


def test_no_block_is_left_out_silently():
    needs, parts = Counter(), Counter()
    for page in PAGES:
        text = page.read_text()
        blocks = list(BLOCK.finditer(text))
        assert sum(b[0].count("```") for b in blocks) == text.count("```"), page.name
        # A comment that marks no block would be a mistake.
        assert text.count("<!--") == sum(b["needs"] is not None for b in blocks), page.name
        for block in blocks:
            if block["needs"]:
                assert block["language"] == "python"
                needs[page.name, " ".join(sorted(block["needs"].split()))] += 1
            if block["language"] not in ("python", "sh") and is_python(block["code"]):
                parts[page.name] += 1
    assert needs == NEEDS
    assert parts == PARTS


def is_python(code):
    try:
        tree = ast.parse(textwrap.dedent(code))
    except SyntaxError:
        return False
    kinds = (ast.Call, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.With)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def docstring_blocks(thing):
    """The literal blocks, which follow a paragraph that ends in two colons."""
    text = inspect.getdoc(thing) or ""
    return [textwrap.dedent(b) for b in re.findall(r"::\n\n((?: +.*\n|\n)+)", text + "\n")]


def test_blocks_of_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    things = {name: getattr(bitsparse, name) for name in bitsparse.__all__}
    things["nn.FeedForward"] = bitsparse.nn.FeedForward
    for name, thing in list(things.items()):
        if inspect.isclass(thing):
            things |= {f"{name}.{k}": v for k, v in vars(thing).items() if not k.startswith("_")}
    found = {name: docstring_blocks(thing) for name, thing in things.items()}
    found = {name: blocks for name, blocks in found.items() if blocks}
    assert found.keys() == {"compressed_saved_tensors", "graph_warmup", "profile"}

    model, x = bitsparse.nn.FeedForward(16, 64), torch.randn(32, 16)
    names = {"bitsparse": bitsparse, "torch": torch, "model": model, "x": x, "batches": [x, x]}
    if torch.cuda.is_available():
        on_gpu, inputs = bitsparse.nn.FeedForward(64, 256, device="cuda"), x.repeat(4, 4).cuda()
        names |= {
            "graph": torch.cuda.CUDAGraph(),
            "step": lambda: on_gpu(inputs).sum().backward(),
        }
    else:
        del found["graph_warmup"]
    for blocks in found.values():
        for block in blocks:
            # The loop's body is left to the reader.
            exec(block.replace("...  # forward", "model(batch).sum().backward()  #"), dict(names))


def test_commands_have_the_options_shown():
    """Every `bitsparse ...` in a block of shell commands."""
    pytest.importorskip("typer", reason="needs the commands: pip install 'bitsparse[cli]'")
    import typer.main

    from bitsparse.cli.app import app

    root, seen = typer.main.get_command(app), 0
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] != "sh":
                continue
            for line in block["code"].replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "bitsparse" not in words or words[0] in ("pip", "make", "git"):
                    continue
                words = words[words.index("bitsparse") + 1 :]
                command = root
                while words and hasattr(command, "commands"):
                    assert words[0] in command.commands, f"{page.name}: {line}"
                    command = command.commands[words.pop(0)]
                options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
                options |= {"--help", "-h"}
                given = {w.split("=")[0] for w in words if re.match(r"--?[a-zA-Z]", w)}
                assert given <= options, f"{page.name}: {line}"
                seen += 1
    assert seen > 10


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
