"""Print the Markdown tables of the documentation from the files that the commands wrote.

Files of `bitsparse compare` and of `bitsparse bench` in any order:

    python benchmarks/table.py benchmarks/results/*.json
    python benchmarks/table.py --compact benchmarks/results/h200-*.json

`--compact`: of feed-forward blocks and of kernels, tables with a column for each peer or backend.
"""

import argparse
import json
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

CONVERTED = """\
| model | | | step, ms | × plain | peak, MiB | × plain | losses the same |
| --- | --- | --- | --- | --- | --- | --- | --- |"""

MISSING = "–"
PLAIN = "none"  # no precision in FP8


def tables(path: Path) -> list[tuple[str, list[str]]]:
    """All tables of a file: header and lines of each."""
    return [*long_tables(path), *compact_tables(path)]


def compact_tables(path: Path) -> list[tuple[str, list[str]]]:
    """Those with a column for each of what is compared."""
    result = load(path)
    compact = {"ffn": compact_ffn, "kernels": compact_kernels}.get(result.get("benchmark"))
    return [] if compact is None else compact(result)


def load(path: Path) -> dict[str, Any]:
    """The content of a file; one of an earlier version as the present one writes it."""
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("benchmark") == "ffn" and "density" in result["config"]:
        result["config"]["densities"] = [result["config"].pop("density")]
        result["config"]["precisions"] = [PLAIN]
        for case in result["cases"]:
            case |= {
                "density": result["config"]["densities"][0],
                "precision": PLAIN,
                "first": "eager",
            }
            case["peers"] = [
                {name.replace("ratio_eager", "ratio_first"): value for name, value in peer.items()}
                for peer in case["peers"]
            ]
    return result


def long_tables(path: Path) -> list[tuple[str, list[str]]]:
    """Those with a line for each figure that was measured."""
    result = load(path)
    kind = result.get("benchmark")
    if kind == "codec":
        return [
            (codec_size_header(result), codec_size_rows(result)),
            (CODEC_RATES, codec_rate_rows(result)),
        ]
    if kind == "kernels":
        return [(KERNELS, kernels_rows(result))]
    if kind == "ffn":
        found = [
            (
                FFN.replace("eager", first),
                ffn_rows(result, [c for c in result["cases"] if c["first"] == first]),
            )
            for first in ("eager", "dense")
        ]
        return [(header, lines) for header, lines in found if lines]
    if kind == "model":
        return [(model_header(result), model_rows(result))]
    if kind == "converted":
        return [(CONVERTED, converted_rows(result))]
    return [(HEADER, compare_rows(result))]


def converted_rows(result: dict[str, Any]) -> list[str]:
    """Runs in pairs, the plain one first."""
    config, runs = result["config"], result["runs"]
    model = f"{config['model_type']}, {config['parameters'] / 1e9:.2f} B parameters"
    found = []
    for plain, converted in zip(runs[::2], runs[1::2], strict=False):
        for run in (plain, converted):
            step, first = (r["step_seconds"]["quartiles"][1] for r in (run, plain))
            same = f"{run['same_losses']} of {len(run['losses'])}" if run is converted else ""
            found.append(
                line(
                    model,
                    "compiled" if run["compiled"] else "eager",
                    "converted" if run["converted"] else "plain",
                    f"{step * 1e3:.1f}",
                    f"{step / first:.3f}",
                    f"{run['peak_bytes'] / 2**20:,.0f}" if run["peak_bytes"] else MISSING,
                    f"{run['peak_bytes'] / plain['peak_bytes']:.2f}"
                    if run["peak_bytes"]
                    else MISSING,
                    same,
                )
            )
    return found


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


def ffn_shape(case: dict[str, Any]) -> str:
    """Of a stack."""
    shape = " × ".join(str(case[name]) for name in ("tokens", "d_model", "d_ff"))
    return f"{shape}, {case['layers']}"


def ffn_rows(result: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """One line a peer; of one that failed, why."""
    lines = []
    for case in cases:
        what = [ffn_shape(case), ", ".join([case["activation"], *ffn_setting(result, case)])]
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
                    ratio(peer["ratio_first"]),
                    ratio(peer["ratio_best"]),
                    mib(peer["peak_bytes"]),
                    ratio(peer["peak_ratio_first"], 2),
                    mib(peer["kept_bytes"]),
                    ratio(peer["kept_ratio_first"], 2),
                    same_bits(peer),
                )
            )
    return lines


def same_bits(peer: dict[str, Any]) -> str:
    """Whether output and gradients have the bits of the first peer's."""
    if peer["same_output"] is None:
        return MISSING
    return "yes" if peer["same_output"] and peer["same_gradients"] else "NO"


def ffn_setting(result: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """What tells a case from others of its shape and activation, where there are any."""
    config, found = result["config"], []
    if len(config["densities"]) > 1:
        found.append(f"density {case['density']:g}")
    if case["precision"] != PLAIN and len(config["precisions"]) > 1:
        found.append(case["precision"])
    return found


COMPACT_FFN = {
    "step, × {first}": ("ms", "ratio_first", 3),
    "step, × best of {first}, compile": ("ms", "ratio_best", 3),
    "peak, × {first}": ("MiB", "peak_ratio_first", 2),
    "kept, × {first}": ("MiB", "kept_ratio_first", 2),
}
"""By title: the unit of the first peer's own figure, and the ratio of all others."""


def compact_ffn(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """For each precision: times, peaks and what is kept, a column for each peer."""
    found = []
    for precision in result["config"]["precisions"]:
        cases = [c for c in result["cases"] if c["precision"] == precision]
        names = list(dict.fromkeys(p["peer"] for c in cases for p in c["peers"]))
        for title, (unit, key, digits) in COMPACT_FFN.items():
            if not cases or (key == "ratio_best" and "compile" not in names):
                continue
            first = cases[0]["first"]
            what = title.format(first=first) + ("" if precision == PLAIN else f" ({precision})")
            columns = [what, "activation", "density", f"{first}, {unit}"]
            shown = [name for name in names if name != first or key == "ratio_best"]
            columns += shown
            header = f"{line(*columns)}\n|{' --- |' * len(columns)}"
            lines = []
            for case in cases:
                peers = {peer["peer"]: peer for peer in case["peers"]}
                cells = [ffn_shape(case), case["activation"], f"{case['density']:g}"]
                cells.append(own_figure(peers[first], key))
                cells += [compact_cell(peers.get(name), key, digits) for name in shown]
                lines.append(line(*cells))
            found.append((header, lines))
    return found


def own_figure(peer: dict[str, Any], key: str) -> str:
    """What the others' ratios are to."""
    if key in ("ratio_first", "ratio_best"):
        return MISSING if peer["seconds"] is None else f"{peer['seconds']['median'] * 1e3:.3f}"
    return mib(peer["peak_bytes" if key.startswith("peak") else "kept_bytes"])


def compact_cell(peer: dict[str, Any] | None, key: str, digits: int) -> str:
    """The ratio of a peer; *: its results have other bits."""
    if peer is None or peer["failed"] is not None or peer[key] is None:
        return MISSING
    return ratio(peer[key], digits) + ("*" if same_bits(peer) == "NO" else "")


def compact_kernels(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Times of each step, two columns for each backend."""
    names = list(dict.fromkeys(s["backend"] for c in result["cases"] for s in c["steps"]))
    columns = ["activation", "inputs", "density", "step", "copy, ms"]
    columns += [cell for name in names for cell in (f"{name}, ms", f"{name}, floor / time")]
    lines = []
    for case in result["cases"]:
        found = {(s["step"], s["backend"]): s for s in case["steps"]}
        for step in dict.fromkeys(s["step"] for s in case["steps"]):
            cells = [case["activation"], case["inputs"], f"{case['density']:.3f}", step]
            cells.append(f"{case['copy']['median'] * 1e3:.3f}")
            for name in names:
                one = found.get((step, name))
                cells += (
                    [MISSING, MISSING]
                    if one is None
                    else [f"{one['seconds']['median'] * 1e3:.3f}", f"{one['share']:.2f}"]
                )
            lines.append(line(*cells))
    return [(f"{line(*columns)}\n|{' --- |' * len(columns)}", lines)] if lines else []


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


def fitting(fit: dict[str, Any]) -> str:
    """The largest batch under a limit; ~: predicted, not tried."""
    return f"{'' if fit.get('verified', True) else '~'}{fit['batch_size']}"


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
            fits = {f["memory_gb"]: fitting(f) for f in mode["fits"]}
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
    result = load(path)
    describe = {"codec": about_codec, "kernels": about_kernels, "ffn": about_ffn}
    describe |= {"model": about_model, "converted": about_converted}
    about = describe.get(result.get("benchmark"), about_compare)(result["config"])
    return f"{path.stem}: {about}; {machine(result['environment'])}"


def about_compare(config: dict[str, Any]) -> str:
    model = config["model"]
    return (
        f"{model['layers']} layers, d_model {model['d_model']}, d_ff {model['d_ff']}, "
        f"{config['batch_size']} × {model['seq_len']} tokens a step, {config['dtype']}"
    )


def about_converted(config: dict[str, Any]) -> str:
    return (
        f"{config['num_hidden_layers']} layers, d_model {config['hidden_size']}, "
        f"d_ff {config['intermediate_size']}, {config['hidden_act']}, {config['batch_size']} × "
        f"{config['seq_len']} tokens a step, {config['steps']} steps, bfloat16 autocast"
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
    dtypes = [config["dtype"] if p == PLAIN else p for p in config["precisions"]]
    density = ", ".join(f"{d:g}" for d in config["densities"])
    return f"density {density}, {', '.join(dtypes)}, median of at most {config['repeats']}"


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
    parser = argparse.ArgumentParser(description="Print Markdown tables of result files.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--compact", action="store_true", help="a column for each peer or backend")
    options = parser.parse_args()
    paths: list[Path] = options.files
    grouped: dict[str, list[str]] = {}
    for path in paths:
        compact = compact_tables(path) if options.compact else []
        for header, lines in compact or long_tables(path):
            grouped.setdefault(header, []).extend(lines)
    for header, lines in grouped.items():
        print(header, *lines, "", sep="\n")
    for path in paths:
        print("-", caption(path))


if __name__ == "__main__":
    main()
