"""Print the Markdown tables of the documentation from the files that the commands wrote.

Files of `bitsparse compare` and of `bitsparse bench codec` in any order:

    python benchmarks/table.py benchmarks/results/*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

HEADER = """\
| activation | memory | step, × dense | peak memory | × dense | kept by feed-forward | × dense | \
losses and weights as dense |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


CODEC_SIZES = """\
| method | {sources} |
| --- | {rules} |"""

CODEC_RATES = """\
| density | method | threads | bits per element | compress, GB/s | decompress, GB/s |
| --- | --- | --- | --- | --- | --- |"""


def rows(path: Path) -> list[str]:
    """The lines of a file's tables, without headers."""
    result = json.loads(path.read_text())
    if result.get("benchmark") == "codec":
        return [*codec_size_rows(result), *codec_rate_rows(result)]
    return compare_rows(result)


def compare_rows(result: dict[str, Any]) -> list[str]:
    """One line a memory mode."""
    modes = result["modes"]
    dense_peak = modes["dense"]["peak_bytes"]
    dense_kept = modes["dense"]["accounting"][-1]["kept_feed_forward"]
    lines = []
    for name, mode in modes.items():
        kept = mode["accounting"][-1]["kept_feed_forward"]
        same = mode["same_losses"] and mode["same_weights"]
        cells = [
            result["config"]["model"]["activation"],
            name,
            f"{mode['ratio_median']:.3f}",
            f"{mode['peak_bytes'] / 2**20:,.0f} MiB",
            f"{mode['peak_bytes'] / dense_peak:.2f}",
            f"{kept / 2**20:,.0f} MiB",
            f"{kept / dense_kept:.2f}",
            f"{'yes' if same else 'NO'}, {len(mode['losses'])} steps",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def codec_size_header(result: dict[str, Any]) -> str:
    """Two columns for each source of arrays."""
    counts = {s: sum(a["source"] == s for a in result["arrays"]) for s in result["summary"]}
    cells = [f"{source} ({count}): bits | × line" for source, count in counts.items()]
    return CODEC_SIZES.format(
        sources=" | ".join(cells), rules=" | ".join(["--- | ---"] * len(cells))
    )


def codec_size_rows(result: dict[str, Any]) -> list[str]:
    """One line a method that applies to all arrays but synthetic ones; mean over arrays."""
    counts = {s: sum(a["source"] == s for a in result["arrays"]) for s in result["summary"]}
    lines = []
    for method in result["methods"]:
        found = {source: summary.get(method) for source, summary in result["summary"].items()}
        real = [s for s in found if s != "synthetic"] or list(found)
        if any(found[s] is None or found[s]["arrays"] != counts[s] for s in real):
            continue
        cells = [method]
        for ratio in found.values():
            if ratio is None or ratio["mean"] is None:
                cells += ["–", "–"]
                continue
            cells += [
                f"{ratio['bits']:.2f}",
                f"{ratio['mean']:.2f} ({ratio['smallest']:.2f} to {ratio['largest']:.2f})",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def codec_rate_rows(result: dict[str, Any]) -> list[str]:
    """One line a copy, and one a method and density."""
    lines = []
    for copy in result["copies"]:
        density = f"{copy['density']:g}"
        cells = [[density, "copy", "", "16.00", f"{copy['gbps']:.2f}", ""]]
        cells += [
            [
                density,
                rate["method"],
                "" if rate["threads"] is None else str(rate["threads"]),
                f"{rate['bits_per_element']:.2f}",
                f"{rate['compress_gbps']:.2f}",
                f"{rate['decompress_gbps']:.2f}",
            ]
            for rate in result["rates"]
            if rate["density"] == copy["density"]
        ]
        lines += ["| " + " | ".join(line) + " |" for line in cells]
    return lines


def caption(path: Path) -> str:
    """What was measured, on what."""
    result = json.loads(path.read_text())
    if result.get("benchmark") == "codec":
        rows, cols = result["config"]["shape"]
        return (
            f"{path.stem}: rates on {rows} × {cols} bfloat16, median of "
            f"{result['config']['repetitions']}; {machine(result['environment'])}"
        )
    config, model = result["config"], result["config"]["model"]
    return (
        f"{path.stem}: {model['layers']} layers, d_model {model['d_model']}, d_ff {model['d_ff']}, "
        f"{config['batch_size']} × {model['seq_len']} tokens a step, {config['dtype']}; "
        f"{machine(result['environment'])}"
    )


def machine(env: dict[str, Any]) -> str:
    """Device, versions and commit."""
    packages = [f"{name} {env[name]}" for name in ("zstandard", "lz4") if env.get(name)]
    commit = env["git_commit"] or "unknown"
    changed = " with changes" if commit.endswith("-dirty") else ""
    return ", ".join(
        [
            env["device"],
            f"PyTorch {env['torch']}",
            f"Python {env['python']}",
            *packages,
            f"commit {commit[:12]}{changed}",
        ]
    )


def main() -> None:
    paths = [Path(p) for p in sys.argv[1:]]
    codec = []
    print(HEADER)
    for path in paths:
        result = json.loads(path.read_text())
        if result.get("benchmark") == "codec":
            codec.append(result)
        else:
            print("\n".join(compare_rows(result)))
    for result in codec:
        print("", codec_size_header(result), *codec_size_rows(result), sep="\n")
        print("", CODEC_RATES, *codec_rate_rows(result), sep="\n")
    print()
    for path in paths:
        print("-", caption(path))


if __name__ == "__main__":
    main()
