"""Print the Markdown tables of the documentation from the files that the commands wrote.

Files of `bitsparse compare` and of `bitsparse bench` in any order:

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


KERNELS = """\
| activation | inputs | density | bits per element | backend | step | MB | floor, ms | \
ms (quartiles) | floor / time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""

FFN = """\
| tokens × d_model × d_ff, layers | activation | peer | ms (quartiles) | × eager | \
× best of eager, compile | peak, MiB | × eager | kept, MiB | × eager | same bits as eager |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""

MODEL = """\
| model | batch | memory | tokens/s | step, × {first} | peak, MiB | × {first} |{limits}
| --- | --- | --- | --- | --- | --- | --- |{rules}"""

MISSING = "–"


def tables(path: Path) -> list[tuple[str, list[str]]]:
    """The tables of a file: header and lines of each."""
    result = json.loads(path.read_text())
    kind = result.get("benchmark")
    if kind == "codec":
        return [
            (codec_size_header(result), codec_size_rows(result)),
            (CODEC_RATES, codec_rate_rows(result)),
        ]
    if kind == "kernels":
        return [(KERNELS, kernels_rows(result))]
    if kind == "ffn":
        return [(FFN, ffn_rows(result))]
    if kind == "model":
        return [(model_header(result), model_rows(result))]
    return [(HEADER, compare_rows(result))]


def rows(path: Path) -> list[str]:
    """The lines of a file's tables, without headers."""
    return [line for _, lines in tables(path) for line in lines]


def line(*cells: str) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


def spread(seconds: dict[str, float] | None) -> str:
    """Median and quartiles, in ms."""
    if seconds is None:
        return MISSING
    return "{:.3f} ({:.3f} to {:.3f})".format(
        *(seconds[name] * 1e3 for name in ("median", "low", "high"))
    )


def mib(nbytes: int | None) -> str:
    """Bytes in MiB."""
    return MISSING if nbytes is None else f"{nbytes / 2**20:,.0f}"


def ratio(value: float | None, digits: int = 3) -> str:
    """A ratio."""
    return MISSING if value is None else f"{value:.{digits}f}"


def kernels_rows(result: dict[str, Any]) -> list[str]:
    """One line a copy, and one a step of a backend."""
    lines = []
    for case in result["cases"]:
        what = [case["activation"], case["inputs"], f"{case['density']:.3f}"]
        bits = case["bits_per_element"]
        what.append(MISSING if bits is None else f"{bits:.2f}")
        copied = case["copy_gbps"] * case["copy"]["median"] * 1e3
        lines.append(line(*what, "", "copy", f"{copied:,.1f}", "", spread(case["copy"]), ""))
        for step in case["steps"]:
            lines.append(
                line(
                    *what,
                    step["backend"],
                    step["step"],
                    f"{step['moved_bytes'] / 1e6:,.1f}",
                    f"{step['floor_seconds'] * 1e3:.3f}",
                    spread(step["seconds"]),
                    f"{step['share']:.2f}",
                )
            )
    return lines


def ffn_rows(result: dict[str, Any]) -> list[str]:
    """One line a peer; of one that failed, why."""
    lines = []
    for case in result["cases"]:
        shape = " × ".join(str(case[name]) for name in ("tokens", "d_model", "d_ff"))
        what = [f"{shape}, {case['layers']}", case["activation"]]
        for peer in case["peers"]:
            name = peer["peer"]
            if peer["failed"] is not None:
                lines.append(line(*what, name, f"failed: {peer['failed']}", *[""] * 7))
                continue
            lines.append(
                line(
                    *what,
                    name,
                    spread(peer["seconds"]),
                    ratio(peer["ratio_eager"]),
                    ratio(peer["ratio_best"]),
                    mib(peer["peak_bytes"]),
                    ratio(peer["peak_ratio_eager"], 2),
                    mib(peer["kept_bytes"]),
                    ratio(peer["kept_ratio_eager"], 2),
                    "yes" if peer["same_output"] and peer["same_gradients"] else "NO",
                )
            )
    return lines


def model_limits(result: dict[str, Any]) -> list[float]:
    """Under which the largest batch was looked for."""
    return sorted(
        {f["memory_gb"] for case in result["cases"] for m in case["modes"] for f in m["fits"]}
    )


def model_header(result: dict[str, Any]) -> str:
    """A column for each limit of memory."""
    limits = model_limits(result)
    return MODEL.format(
        first=result["config"]["modes"][0],
        limits="".join(f" batch in {limit:g} GiB |" for limit in limits),
        rules=" --- |" * len(limits),
    )


def model_rows(result: dict[str, Any]) -> list[str]:
    """One line a memory mode."""
    lines = []
    limits = model_limits(result)
    for case in result["cases"]:
        first = next(m for m in case["modes"] if m["mode"] == case["first"])
        what = [
            f"{case['preset']}, {case['activation']}",
            f"{case['batch_size']} × {case['seq_len']}",
        ]
        for mode in case["modes"]:
            fits = {f["memory_gb"]: str(f["batch_size"]) for f in mode["fits"]}
            speed, peak, base = mode["tokens_per_s"], mode["peak_bytes"], first["peak_bytes"]
            lines.append(
                line(
                    *what,
                    mode["mode"],
                    f"failed: {mode['failed']}" if speed is None else f"{speed:,.0f}",
                    ratio(mode["ratio_first"]),
                    mib(peak),
                    ratio(peak / base if peak and base else None, 2),
                    *(fits.get(limit, MISSING) for limit in limits),
                )
            )
    return lines


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
    describe = {"codec": about_codec, "kernels": about_kernels, "ffn": about_ffn}
    describe["model"] = about_model
    about = describe.get(result.get("benchmark"), about_compare)(result["config"])
    return f"{path.stem}: {about}; {machine(result['environment'])}"


def about_compare(config: dict[str, Any]) -> str:
    model = config["model"]
    return (
        f"{model['layers']} layers, d_model {model['d_model']}, d_ff {model['d_ff']}, "
        f"{config['batch_size']} × {model['seq_len']} tokens a step, {config['dtype']}"
    )


def about_codec(config: dict[str, Any]) -> str:
    rows, cols = config["shape"]
    return f"rates on {rows} × {cols} bfloat16, median of {config['repetitions']}"


def about_kernels(config: dict[str, Any]) -> str:
    rows, cols = config["shape"]
    return (
        f"{rows} × {cols} {config['dtype']}, codec {config['codec']}, median of {config['repeats']}"
    )


def about_ffn(config: dict[str, Any]) -> str:
    return (
        f"density {config['density']:g}, {config['dtype']}, median of at most {config['repeats']}"
    )


def about_model(config: dict[str, Any]) -> str:
    density = f"density {config['density']:g}" if config["density"] else "random weights"
    return (
        f"{density}, {config['dtype']}, codec {config['codec']}, median of {config['steps']} steps"
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
    grouped: dict[str, list[str]] = {}
    for path in paths:
        for header, lines in tables(path):
            grouped.setdefault(header, []).extend(lines)
    for header, lines in grouped.items():
        print(header, *lines, "", sep="\n")
    for path in paths:
        print("-", caption(path))


if __name__ == "__main__":
    main()
