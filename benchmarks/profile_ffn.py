"""Print what each kernel of a stack of feed-forward blocks takes, for some of the peers of
`bitsparse bench ffn`:

    python benchmarks/profile_ffn.py 65536x768x3072 relu eager compile compressed
"""

import argparse
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bitsparse.bench.ffn import PLAIN, Case, FfnConfig, Setting
from bitsparse.bench.peers import PEERS, Options

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="TOKENSxD_MODELxD_FF")
    parser.add_argument("activation")
    parser.add_argument("peers", nargs="+", choices=list(PEERS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.1)
    args = parser.parse_args()
    tokens, d_model, d_ff = map(int, args.shape.split("x"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = tokens, d_model, d_ff
    setting = Setting(shape, args.layers, args.activation, PLAIN, args.density)
    case = Case(FfnConfig(dtype="bfloat16"), device, setting)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    for name in args.peers:
        block = PEERS[name].build(args.activation, case.layers, Options())
        for _ in range(STEPS):
            case.clear()
            case.step(block)
        with profile(activities=[activity]) as found:
            for _ in range(STEPS):
                case.clear()
                case.step(block)
            if device.type == "cuda":
                torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        for event in found.events():
            if event.device_type == wanted:
                times[event.name[:80]].append(event.time_range.elapsed_us())
        print(f"{args.shape} {args.activation} {name}")
        for kernel, us in sorted(times.items(), key=lambda item: -sum(item[1]))[:20]:
            print(f"  {sum(us) / len(us):8.1f} us x {len(us) / STEPS:5.1f}  {kernel}")


if __name__ == "__main__":
    main()
