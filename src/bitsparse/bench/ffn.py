"""The feed-forward benchmark: forward and backward of a stack of blocks, in many ways."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitsparse.activations import ACTIVATIONS, get_activation
from bitsparse.bench.inputs import alike_tokens, neuron_shifts
from bitsparse.bench.peers import (
    COMPILE,
    DEFAULT_PEERS,
    DENSE,
    EAGER,
    FP8_PEERS,
    PEERS,
    Block,
    Options,
    Peer,
    Unsupported,
    Weights,
    load_peer,
)
from bitsparse.bench.result import Progress, Result
from bitsparse.bench.timing import Spread, Task, TimeLimit, alternate, forget, reason, same_bits
from bitsparse.ops import fp8
from bitsparse.training.accounting import allocated_by, step_peak
from bitsparse.training.compare import environment
from bitsparse.training.errors import (
    UserError,
    check_at_least,
    check_choice,
    check_density,
    check_names,
    is_out_of_memory,
)
from bitsparse.training.step import DTYPES, get_device
from bitsparse.training.train import LARGEST_SEED

LARGEST_SIZE = 2**24
"""Tokens, d_model or d_ff."""

WARMUP = 1
"""Rounds that are not timed; before, each peer has done two steps, in which it was checked."""

_CONSTANT = 4.0
"""The feature that carries the shifts of the pre-activations."""
_GROWTH = 0.1
"""What a block adds to the stream, about, by the stream."""


PLAIN = "none"
"""In place of a precision in FP8: all in the dtype of the tensors."""

PRECISIONS = (PLAIN, *fp8.PRECISIONS)


class Setting(NamedTuple):
    """What tells one case from the others."""

    shape: tuple[int, int, int]
    """Tokens, d_model, d_ff."""
    layers: int
    activation: str
    precision: str
    density: float
    """Asked for."""

    @property
    def fp8_precision(self) -> str | None:
        """As :func:`bitsparse.ffn` takes it."""
        return None if self.precision == PLAIN else self.precision

    def __str__(self) -> str:
        fp8_name = "" if self.precision == PLAIN else f" {self.precision}"
        size = "x".join(map(str, self.shape))
        return f"{size} {self.activation}{fp8_name} {self.density:g}"


@dataclass(frozen=True)
class FfnConfig:
    """What is measured, on what."""

    shapes: tuple[tuple[int, int, int], ...] = ((2048, 256, 1024),)
    """Tokens, d_model, d_ff."""
    layers: tuple[int, ...] = (1,)
    """One number for all shapes, or one for each."""
    activations: tuple[str, ...] = ("relu", "relu2", "reglu")
    densities: tuple[float, ...] = (0.1,)
    """Of the hidden tensors, about."""
    dtype: str = "float32"
    precisions: tuple[str, ...] = (PLAIN,)
    """Of the products; those in FP8 are compared with the same computation kept dense."""
    peers: tuple[str, ...] = DEFAULT_PEERS
    own_peers: tuple[str, ...] = ()
    """``module:factory`` each."""
    tokens_per_chunk: int | None = None
    repeats: int = 10
    max_seconds: float | None = None
    """For the timed rounds of one case: no round begins later, but the first three."""
    time_limit: float | None = None
    """Seconds for everything: no case begins that would not end by then, if it took as long as the
    longest before."""
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        if not self.shapes:
            raise UserError("--shapes: got none, allowed: at least one TOKENSxD_MODELxD_FF")
        for shape in self.shapes:
            tokens, d_model, d_ff = shape
            if not (1 <= tokens <= LARGEST_SIZE and 2 <= d_model <= LARGEST_SIZE) or not (
                1 <= d_ff <= LARGEST_SIZE
            ):
                raise UserError(
                    f"--shapes: got {'x'.join(map(str, shape))}, allowed: TOKENSxD_MODELxD_FF of "
                    "at least 1x2x1 and at most 2**24 each"
                )
        for layers in self.layers:
            check_at_least("--layers", layers, 1, 1000)
        if len(self.layers) not in (1, len(self.shapes)):
            raise UserError(
                f"--layers: got {len(self.layers)} numbers for {len(self.shapes)} shapes, "
                "allowed: one for all, or one for each"
            )
        check_names("--activations", self.activations, tuple(ACTIVATIONS))
        if not self.densities:
            raise UserError("--densities: got none, allowed: at least one")
        check_density("--densities", *self.densities)
        check_choice("--dtype", self.dtype, DTYPES)
        check_names("--precisions", self.precisions, PRECISIONS)
        if self.precisions != (PLAIN,) and self.dtype != "bfloat16":
            raise UserError(
                f"--precisions: got {','.join(self.precisions)} with --dtype {self.dtype}, "
                f"allowed: {PLAIN}, or --dtype bfloat16"
            )
        check_names("--peers", self.peers, tuple(PEERS))
        if self.tokens_per_chunk is not None:
            check_at_least("--tokens-per-chunk", self.tokens_per_chunk, 1)
        check_at_least("--repeats", self.repeats, 1)
        if self.max_seconds is not None:
            check_at_least("--max-seconds", self.max_seconds, 0)
        if self.time_limit is not None:
            check_at_least("--time-limit", self.time_limit, 0)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)

    def cases(self) -> list[Setting]:
        """All cases, in order."""
        layers = self.layers * len(self.shapes) if len(self.layers) == 1 else self.layers
        return [
            Setting(shape, count, activation, precision, density)
            for shape, count in zip(self.shapes, layers, strict=True)
            for activation in self.activations
            for precision in self.precisions
            for density in self.densities
        ]

    def all_peers(self, precision: str = PLAIN) -> list[Peer]:
        """Those asked for; first the one that all are compared with: eager, or dense in FP8."""
        if precision != PLAIN:
            names = (DENSE, *(n for n in self.peers if n in FP8_PEERS and n != DENSE))
            return [FP8_PEERS[name] for name in names]
        names = (EAGER, *(name for name in self.peers if name != EAGER))
        own = dict.fromkeys(self.own_peers)
        return [PEERS[name] for name in names] + [load_peer(text) for text in own]


@dataclass
class PeerResult:
    """One peer in one case."""

    peer: str
    failed: str | None = None
    """Why there are no figures, or None."""
    rounds: list[float] = field(default_factory=list)
    """Seconds of each timed round, the same rounds for all peers."""
    seconds: Spread | None = None
    ratio_first: float | None = None
    """Median over rounds of this peer's time by the first one's in the same round."""
    ratio_first_quartiles: tuple[float, float] | None = None
    ratio_best: float | None = None
    """The same, by the faster of the first one and compile."""
    peak_bytes: int | None = None
    """Of the allocator within a step, above what stood before; weight gradients are in it."""
    peak_ratio_first: float | None = None
    peak_ratio_best: float | None = None
    """By the smaller one of the first one and compile."""
    kept_bytes: int | None = None
    """What the allocator holds after forward and did not before; the output is in it."""
    kept_ratio_first: float | None = None
    kept_ratio_best: float | None = None
    same_output: bool | None = None
    """Whether it has the bits of the first one's."""
    same_gradients: bool | None = None
    """Of the input and all weights."""
    differing: list[str] = field(default_factory=list)
    """Names of what differs."""

    @property
    def identical(self) -> bool | None:
        """Whether nothing differs; None: not known."""
        if self.same_output is None or self.same_gradients is None:
            return None
        return self.same_output and self.same_gradients


@dataclass
class FfnCase:
    """All peers on one stack."""

    tokens: int
    d_model: int
    d_ff: int
    layers: int
    activation: str
    precision: str
    density: float
    """Asked for."""
    first: str
    """The peer that the others are compared with: eager, or dense in FP8."""
    peers: list[PeerResult]
    densities: list[float] = field(default_factory=list)
    """By layer, as realised."""
    best: str | None = None
    """The faster of eager and compile; in FP8 the first."""
    allocated_before: int | None = None
    """Bytes that PyTorch's allocator had given out on a GPU before the case began."""
    took: float | None = None
    """Seconds for the whole of the case; None: it was not finished."""

    @property
    def setting(self) -> Setting:
        """What tells it from the others."""
        shape = (self.tokens, self.d_model, self.d_ff)
        return Setting(shape, self.layers, self.activation, self.precision, self.density)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FfnCase:
        """Of what :meth:`FfnResult.to_json` made of it."""
        peers = []
        for found in content["peers"]:
            seconds, quartiles = found["seconds"], found["ratio_first_quartiles"]
            peers.append(
                replace(
                    PeerResult(**found),
                    seconds=None if seconds is None else Spread(**seconds),
                    ratio_first_quartiles=None if quartiles is None else tuple(quartiles),
                )
            )
        return cls(**{**content, "peers": peers})


@dataclass
class FfnResult(Result[FfnConfig, FfnCase]):
    """All that was measured."""

    benchmark = "ffn"


def finished_cases(config: FfnConfig, content: dict[str, Any]) -> list[FfnCase]:
    """The cases that an earlier run with the same settings finished, from its result file.

    Raises:
        UserError: the file is of another benchmark, other settings, another device or version.
    """
    plain = json.loads(json.dumps(asdict(config)))
    here = environment(get_device(config.device))
    there = content.get("environment", {})
    differs = [
        *(["benchmark"] if content.get("benchmark") != FfnResult.benchmark else []),
        *(n for n in plain if n != "time_limit" and plain[n] != content.get("config", {}).get(n)),
        *(n for n in ("device", "torch", "git_commit") if here[n] != there.get(n)),
    ]
    if differs:
        raise UserError(
            f"--resume: got a file that differs in {', '.join(differs)}; "
            "allowed: one of the same settings, device and versions, or none"
        )
    return [FfnCase.from_json(c) for c in content["cases"] if c["took"] is not None]


def run_ffn(
    config: FfnConfig,
    on_progress: Callable[[Progress], None] | None = None,
    on_part: Callable[[FfnResult], None] | None = None,
    finished: Sequence[FfnCase] = (),
) -> FfnResult:
    """Measure all cases but those ``finished`` earlier, whose figures are taken over.

    ``on_part`` is told the result so far, after each peer of each case and after its rounds.

    Raises:
        UserError: a value is not allowed, or a case is too large for the first peer.
    """
    config.check()
    device = get_device(config.device)
    before = {case.setting: case for case in finished}
    settings = config.cases()
    result = FfnResult(config, environment(device), [before[s] for s in settings if s in before])
    limit = TimeLimit(config.time_limit)
    peers = {precision: config.all_peers(precision) for precision in config.precisions}
    compiles = any(peer.compiled for chosen in peers.values() for peer in chosen)
    compiled: dict[str, Callable[..., Any]] = {}
    compiled_for: object = None
    for i, setting in enumerate(settings):
        if setting in before:
            continue
        if not limit.allows_another():
            result.skipped.append(str(setting))
            continue
        each = len(peers[setting.precision]) + config.repeats

        def tell(what: str, done: int, i: int = i, each: int = each, on: object = setting) -> None:
            if on_progress is not None:
                on_progress(Progress(f"{on}: {what}", i * each + done, len(settings) * each))

        def save() -> None:
            if on_part is not None:
                on_part(result)

        if compiles and compiled_for != setting._replace(density=0):
            compiled_for = setting._replace(density=0)
            compiled.clear()
            torch.compiler.reset()  # else it gives up after some shapes
        options = Options(config.tokens_per_chunk, setting.fp8_precision, compiled)
        with limit.part():
            _measure(config, device, setting, options, peers[setting.precision], result, tell, save)
    if compiles:
        torch.compiler.reset()
    if on_part is not None:
        on_part(result)
    return result


def _measure(
    config: FfnConfig,
    device: torch.device,
    setting: Setting,
    options: Options,
    peers: list[Peer],
    result: FfnResult,
    tell: Callable[[str, int], None],
    save: Callable[[], None],
) -> None:
    """Add one case to the result. Nothing of it is left in memory."""
    began = time.perf_counter()
    found = FfnCase(
        *setting.shape,
        setting.layers,
        setting.activation,
        setting.precision,
        setting.density,
        peers[0].name,
        [PeerResult(peer.name) for peer in peers],
    )
    if device.type == "cuda":
        found.allocated_before = torch.cuda.memory_allocated(device)
    result.cases.append(found)
    try:
        Case(config, device, setting).measure(found, options, peers, tell, save)
    finally:
        forget()
    found.took = time.perf_counter() - began
    save()


class Case:
    """Inputs and weights of a case, and what is done with them."""

    def __init__(self, config: FfnConfig, device: torch.device, setting: Setting) -> None:
        self.config, self.device, self.setting = config, device, setting
        self.activation = setting.activation
        tokens, d_model, d_ff = setting.shape
        dtype = DTYPES[config.dtype]
        x = alike_tokens(tokens, d_model, device, config.seed)
        x[:, 0] = _CONSTANT
        self.x = x.to(dtype).requires_grad_()
        first = config.seed + 1000
        self.layers = [
            make_weights(d_model, d_ff, setting.activation, setting.density, dtype, device, seed)
            for seed in range(first, first + 10 * setting.layers, 10)
        ]
        generator = torch.Generator(device).manual_seed(config.seed + 1)
        self.grad = torch.randn(tokens, d_model, generator=generator, device=device).to(dtype)

    def leaves(self) -> dict[str, Tensor]:
        """All that gradients are computed of, by name."""
        named = {
            f"gradient of {name}, layer {i}": weight
            for i, weights in enumerate(self.layers)
            for name, weight in weights.items()
        }
        return {"gradient of x": self.x, **named}

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves().values():
            leaf.grad = None

    def step(self, block: Block) -> Tensor:
        """Forward and backward."""
        out = block(self.x)
        out.backward(self.grad)
        return out

    def measure(
        self,
        case: FfnCase,
        options: Options,
        peers: list[Peer],
        tell: Callable[[str, int], None],
        save: Callable[[], None],
    ) -> None:
        """Fill in the case, whose peers are these; ``save`` is called after each of them."""
        results = {found.peer: found for found in case.peers}
        case.densities = self.densities()
        blocks: dict[str, Block] = {}
        expected: dict[str, Tensor | None] = {}

        def drop(name: str, error: Exception) -> None:
            blocks.pop(name, None)
            self.clear()
            forget(error)
            if name == case.first:
                if not is_out_of_memory(error):
                    raise error
                raise UserError(
                    f"out of memory: {name} cannot run {'x'.join(map(str, self.setting.shape))}, "
                    "smaller --shapes or fewer --layers may fit"
                )
            why = str(error) if isinstance(error, Unsupported) else reason(error)
            results[name] = PeerResult(name, failed=why)
            case.peers = list(results.values())

        for i, peer in enumerate(peers):
            tell(peer.name, i)
            try:
                blocks[peer.name] = peer.build(self.activation, self.layers, options)
                self.check(results[peer.name], blocks[peer.name], expected)
                self.measure_memory(results[peer.name], blocks[peer.name])
            except Exception as error:
                drop(peer.name, error)
            finally:
                self.clear()
                forget()
            save()
        expected.clear()

        rounds = 0

        def count() -> None:
            nonlocal rounds
            rounds += 1
            tell("rounds", len(peers) + rounds)

        def task(block: Block) -> Task:
            return Task(lambda _: self.step(block), self.clear)

        times = alternate(
            {name: task(block) for name, block in blocks.items()},
            self.device,
            self.config.repeats,
            WARMUP,
            max_seconds=self.config.max_seconds,
            on_error=drop,
            on_round=count,
        )
        self.clear()
        for name, seconds in times.items():
            results[name].rounds = seconds
            results[name].seconds = Spread.of(seconds)
        case.best = judge(case.peers)

    @torch.no_grad()
    def densities(self) -> list[float]:
        """By layer, the share of the hidden tensor that is not zero before any rounding."""
        act = get_activation(self.activation)
        found = []
        y = self.x.detach()
        norm = torch.nn.functional.rms_norm
        for weights in self.layers:
            x = norm(y, (y.shape[-1],), eps=1e-6)
            fires = x @ weights["w_gate" if act.gated else "w_up"].t() > 0
            if act.relu_up:
                fires &= x @ weights["w_up"].t() > 0
            found.append(torch.count_nonzero(fires).item() / fires.numel())
            del fires
            y = PEERS[EAGER].build(self.activation, [weights], Options())(y)
        return found

    def check(self, result: PeerResult, block: Block, expected: dict[str, Tensor | None]) -> None:
        """One step; its results against those of the first peer."""
        self.clear()
        out = self.step(block)
        found = {"output": out.detach()} | {n: leaf.grad for n, leaf in self.leaves().items()}
        if not expected:
            expected |= found
        result.differing = [n for n, value in found.items() if not same_bits(value, expected[n])]
        result.same_output = "output" not in result.differing
        result.same_gradients = not set(result.differing) - {"output"}

    def measure_memory(self, result: PeerResult, block: Block) -> None:
        """What is held between forward and backward, and the peak of a whole step."""
        self.clear()
        out, result.kept_bytes = allocated_by(lambda: block(self.x), self.device)
        out.backward(self.grad)  # else what hooks keep (offload) may be a cycle that is never freed
        del out
        self.clear()
        _, result.peak_bytes = step_peak(self.device, lambda: self.step(block) is None)


def make_weights(
    d_model: int,
    d_ff: int,
    activation: str,
    density: float,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Weights:
    """Weights of one layer for which about ``density`` of the hidden tensor is not zero.

    Feature 0 of the stream is constant, and its weights shift the pre-activations, neuron by
    neuron (:func:`~bitsparse.bench.inputs.neuron_shifts`); no block adds to it.
    """
    act = get_activation(activation)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator, device=device)

    def projection(fires: float | None, seed: int) -> Tensor:
        weight = normal(d_ff, d_model).mul_((d_model - 1) ** -0.5)
        weight[:, 0] = 0
        if fires is not None:
            weight[:, 0] = neuron_shifts(d_ff, fires, device, seed) / _CONSTANT
        return weight

    both = density**0.5  # of each, where both have to fire
    weights = {"w_up": projection(both if act.relu_up else None, seed + 1)}
    if act.gated:
        weights["w_gate"] = projection(both if act.relu_up else density, seed + 2)
    else:
        weights["w_up"] = projection(density, seed + 1)
    down = normal(d_model, d_ff) * (_GROWTH / (d_ff * density) ** 0.5)
    down[0] = 0
    weights["w_down"] = down
    return {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}


def judge(results: list[PeerResult]) -> str:
    """Fill in all ratios; returns the faster one of the first and compile."""
    first = results[0]
    bases = [r for r in results if (r is first or r.peer == COMPILE) and r.failed is None]
    best = min(bases, key=lambda r: statistics.median(r.rounds))
    for r in results:
        if r.failed is not None:
            continue
        ratios = _ratios(r, first)
        r.ratio_first = statistics.median(ratios)
        quartiles = Spread.of(ratios)
        r.ratio_first_quartiles = (quartiles.low, quartiles.high)
        r.ratio_best = statistics.median(_ratios(r, best))
        r.peak_ratio_first = _ratio(r.peak_bytes, first.peak_bytes)
        r.peak_ratio_best = _ratio(r.peak_bytes, _smallest(b.peak_bytes for b in bases))
        r.kept_ratio_first = _ratio(r.kept_bytes, first.kept_bytes)
        r.kept_ratio_best = _ratio(r.kept_bytes, _smallest(b.kept_bytes for b in bases))
    return best.peer


def _ratios(a: PeerResult, b: PeerResult) -> list[float]:
    return [x / y for x, y in zip(a.rounds, b.rounds, strict=True)]


def _smallest(values: Any) -> int | None:
    return min((v for v in values if v is not None), default=None)


def _ratio(value: int | None, base: int | None) -> float | None:
    return value / base if value is not None and base else None
