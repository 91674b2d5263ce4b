"""Train a model of transformers plain and converted, eager and compiled, and compare every loss:

    python benchmarks/converted.py --output-json converted.json

Random weights, the source code of Python's standard library as bytes, AdamW, bfloat16 autocast.
Each run starts from the same weights and has the same batches. The default is a Nemotron of about
a billion parameters, whose feed-forward blocks have squared ReLU. Memory is measured on CUDA only.
"""

import argparse
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import bitsparse
from bitsparse.training.compare import environment
from bitsparse.training.data import load_corpus
from bitsparse.training.step import be_deterministic

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
MODES = ["eager", "compiled"]
UNTIMED = 5
"""Steps at the start of a run, with compilation and warm-up in them."""


def digest(parameters: Iterable[Tensor]) -> str:
    """Of all their bits."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def run(
    args: argparse.Namespace,
    weights: dict[str, Tensor],
    config: Any,
    converted: bool,
    compiled: bool,
) -> dict[str, Any]:
    """One training run: losses, times of the steps, peak memory."""
    device = torch.device(args.device)
    model = AutoModelForCausalLM.from_config(config).to(device)
    model.load_state_dict(weights)
    model.train()
    found = {}
    if converted:
        report = bitsparse.convert(model)
        found = {"converted": len(report.converted), "left": len(report.skipped)}
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=device.type == "cuda")
    text, _ = load_corpus([]).split(0.1)
    losses, seconds, peaks = [], [], []
    began = time.perf_counter()
    for step in range(args.steps):
        batch = text.batch(0, step, 0, args.batch_size, args.seq_len)
        tokens, targets = (t.to(device) for t in batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated())
        del loss
        if args.max_seconds and time.perf_counter() - began > args.max_seconds:
            break
    timed = seconds[UNTIMED:] or seconds
    quartiles = statistics.quantiles(timed, n=4) if len(timed) > 1 else timed * 3
    return {
        "converted": converted,
        "compiled": compiled,
        "losses": losses,
        "weights": digest(model.parameters()),
        "step_seconds": {"quartiles": quartiles, "first": seconds[0]},
        "peak_bytes": max(peaks[UNTIMED:] or peaks, default=None),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-type", default="nemotron")
    parser.add_argument("--hidden-act", default="relu2")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--hidden-size", type=int, default=SIZES["hidden_size"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--max-seconds", type=float, default=0, help="for each run; 0: no limit")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    sizes = {
        **SIZES,
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": 4 * args.hidden_size,
        "hidden_act": args.hidden_act,
    }
    be_deterministic()  # attention's backward pass, else, has other bits each time
    config = AutoConfig.for_model(args.model_type, **sizes)
    torch.manual_seed(0)
    with torch.device(args.device):
        first = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in first.parameters())
    weights = {name: tensor.cpu() for name, tensor in first.state_dict().items()}
    del first
    result: dict[str, Any] = {
        "benchmark": "converted",
        "environment": environment(torch.device(args.device)),
        "config": {**sizes, "model_type": args.model_type, "parameters": parameters}
        | {n: getattr(args, n) for n in ("steps", "batch_size", "seq_len", "lr")},
        "runs": [],
    }
    print(f"{args.model_type}, {parameters:,} parameters")
    for compiled in (mode == "compiled" for mode in args.modes):
        plain = None
        for converted in (False, True):
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            done = run(args, weights, config, converted, compiled)
            steps = len(done["losses"])
            if plain is not None:
                steps = min(steps, len(plain["losses"]))
                done["same_losses"] = sum(
                    a == b for a, b in zip(plain["losses"], done["losses"], strict=False)
                )
                done["same_weights"] = done["weights"] == plain["weights"]
            result["runs"].append(done)
            peak = done["peak_bytes"]
            print(
                f"{'compiled' if compiled else 'eager':9}{'converted' if converted else 'plain':10}"
                f" step {done['step_seconds']['quartiles'][1] * 1e3:8.1f} ms"
                + (f"  peak {peak / 2**20:9,.0f} MiB" if peak else "")
                + f"  loss {done['losses'][0]:.4f} to {done['losses'][-1]:.4f}"
                + (f"  {done['same_losses']} of {steps} losses the same" if plain else ""),
                flush=True,
            )
            plain = done if plain is None else None
            if args.output_json:
                args.output_json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
