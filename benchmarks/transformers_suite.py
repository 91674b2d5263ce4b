"""The model tests that transformers ships, with every model converted and without: same outcomes?

With a checkout of the installed version's tag, or its unpacked source distribution
(``pip download --no-binary :all: --no-deps transformers==VERSION``):

    python benchmarks/transformers_suite.py CHECKOUT --models opt t5 nemotron persimmon
    python benchmarks/transformers_suite.py CHECKOUT -k "OPT or T5"

The first runs ``tests/models/*/test_modeling_*.py``, which the source distribution does not have.
The second, without ``--models``, runs transformers' common model tests on the tiny ReLU models of
transformers_models.py. Needs pytest and parameterized. Exit status 1 if an outcome differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

CONVERT, OUTCOMES = "BITSPARSE_SUITE_CONVERT", "BITSPARSE_SUITE_OUTCOMES"
HERE = Path(__file__).resolve().parent


# As a pytest plugin: one run, with or without conversion.

outcomes: dict[str, str] = {}
blocks = Counter[str]()


def pytest_configure(config: Any) -> None:
    for name, cls in (
        ("tests.exporters.test_export", "ExportTesterMixin"),
        ("tests.generation.test_utils", "GenerationTesterMixin"),
    ):  # not in the source distribution
        if not Path.cwd().joinpath(*name.split(".")).with_suffix(".py").exists():
            module = types.ModuleType(name)
            setattr(module, cls, type(cls, (), {}))
            sys.modules[name] = module
    if os.environ[CONVERT] == "1":
        _convert_every_model()


def _convert_every_model() -> None:
    from transformers import PreTrainedModel

    import bitsparse

    post_init = PreTrainedModel.post_init

    def convert_after(self: Any) -> None:
        post_init(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            blocks["converted"] += len(bitsparse.convert(self).converted)

    PreTrainedModel.post_init = convert_after


def pytest_runtest_setup(item: Any) -> None:
    import torch

    torch.manual_seed(0)


def pytest_runtest_logreport(report: Any) -> None:
    # Subtests report under the name of their test.
    if outcomes.get(report.nodeid, "").startswith("failed"):
        return
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome
        if report.outcome == "failed":
            outcomes[report.nodeid] += ": " + str(report.longrepr).strip().splitlines()[-1]


def pytest_sessionfinish() -> None:
    result = {"outcomes": outcomes, "blocks": blocks}
    Path(os.environ[OUTCOMES]).write_text(json.dumps(result))


# As a program: both runs, compared.


def _run(checkout: Path, tests: list[str], convert: bool, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "outcomes.json"
        environ = dict(os.environ)
        environ[CONVERT], environ[OUTCOMES] = str(int(convert)), str(result)
        environ["HF_HUB_OFFLINE"] = "1"
        paths = [str(HERE), str(checkout), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "pytest", "-q", "-p", HERE.joinpath(__file__).stem, *tests]
        command += ["--tb=short", "--rootdir", str(checkout), "-p", "no:cacheprovider", *options]
        command += ["-c", str(checkout / "pyproject.toml"), "-o", "addopts="]
        done = subprocess.run(command, cwd=checkout, env=environ, stdout=subprocess.PIPE, text=True)
        if not result.exists():
            sys.exit(f"pytest failed to run:\n{done.stdout}")
        print(done.stdout.strip().splitlines()[-1])
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder that has transformers' tests/")
    parser.add_argument("--models", nargs="+", help="names of folders of tests/models")
    parser.add_argument("-k", help="which tests, as pytest's -k")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    tests = [str(HERE / "transformers_models.py")]
    if args.models:
        tests = [f"tests/models/{m}/test_modeling_{m}.py" for m in args.models]
    missing = [t for t in tests if not (checkout / t).exists()]
    if missing or not (checkout / "tests/test_modeling_common.py").exists():
        parser.error(f"checkout: got {checkout}, without {missing or 'tests/'}")
    options = ["-k", args.k] if args.k else []
    before, after = (_run(checkout, tests, convert, options) for convert in (False, True))
    print(f"{after['blocks'].get('converted', 0)} blocks converted")
    names = sorted({*before["outcomes"], *after["outcomes"]})
    different = 0
    for name in names:
        old, new = (r["outcomes"].get(name, "not run") for r in (before, after))
        if old.partition(":")[0] != new.partition(":")[0]:
            different += 1
            print(f"{name}\n  before: {old}\n  after:  {new}")
    print(f"{len(names)} tests, {different} with another outcome")
    return int(different > 0 or not names)


if __name__ == "__main__":
    sys.exit(main())
