"""Print the Markdown tables of the documentation from the files that `bitsparse compare` wrote.

    python benchmarks/table.py benchmarks/results/*.json
"""

import json
import sys
from pathlib import Path

HEADER = """\
| activation | memory | step, × dense | peak memory | × dense | kept by feed-forward | × dense | \
losses and weights as dense |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def rows(path: Path) -> list[str]:
    """One line a memory mode."""
    result = json.loads(path.read_text())
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


def caption(path: Path) -> str:
    """What was measured, on what."""
    result = json.loads(path.read_text())
    config, model, env = result["config"], result["config"]["model"], result["environment"]
    return (
        f"{path.stem}: {model['layers']} layers, d_model {model['d_model']}, d_ff {model['d_ff']}, "
        f"{config['batch_size']} × {model['seq_len']} tokens a step, {config['dtype']}; "
        f"{env['device']}, PyTorch {env['torch']}, Python {env['python']}, "
        f"commit {(env['git_commit'] or 'unknown')[:12]}"
    )


def main() -> None:
    paths = [Path(p) for p in sys.argv[1:]]
    print(HEADER)
    for path in paths:
        print("\n".join(rows(path)))
    print()
    for path in paths:
        print("-", caption(path))


if __name__ == "__main__":
    main()
