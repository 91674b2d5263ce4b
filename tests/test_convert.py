"""Converting whole models: plain PyTorch modules, and what does not depend on the family."""

import copy
import io
import subprocess
import sys
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import bitsparse
import bitsparse.conversion
from bitsparse.conversion import families
from bitsparse.conversion.families import FAMILIES, Family
from convert_helpers import Adapter, Step, assert_same_step, live_tensors, step, step_of

D, FF = 8, 32


def sequential(dropout: float | None = None, **kwargs) -> nn.Sequential:
    middle = [] if dropout is None else [nn.Dropout(dropout)]
    return nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, FF, **kwargs), nn.ReLU(), *middle, nn.Linear(FF, D, **kwargs)
    )


class Decoder(nn.Module):
    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(D, 2, FF, batch_first=True, **kwargs)

    def forward(self, x):
        return self.layer(x, x)


class Gated(nn.Module):
    """Of a user: with the names of many models."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, FF), nn.Linear(D, FF)
        self.act_fn = nn.ReLU()
        self.down_proj = nn.Linear(FF, D)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def encoder(dropout: float = 0.0, **kwargs) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, FF, dropout, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "sequential": sequential,
    "sequential, no bias": lambda: sequential(bias=False),
    "sequential, dropout 0": lambda: sequential(0.0),
    "sequential, in place": lambda: nn.Sequential(
        nn.Linear(D, FF), nn.ReLU(inplace=True), nn.Linear(FF, D), nn.ReLU(), nn.Linear(D, D)
    ),
    "nested": lambda: nn.Sequential(sequential(), nn.ModuleDict({"a": sequential()})["a"]),
    "encoder": encoder,
    "encoder, module": lambda: encoder(activation=nn.ReLU()),
    "encoder, norm first": lambda: encoder(norm_first=True, bias=False),
    "decoder": lambda: Decoder(dropout=0.0),
    "gated": Gated,
    "decoder, torch.relu": lambda: Decoder(dropout=0.0, activation=torch.relu),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 7, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("codec", ["fast", "balanced", "small"])
def test_same_bits_and_compressed(model, x, codec):
    before = step(model, x)
    report = bitsparse.convert(model, codec=codec)
    assert len(report.converted) >= 1
    assert not report.already
    after = step(model, x)
    assert after.live == len(report.converted)
    assert before.live == 0
    assert_same_step(after, before)


def test_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        before = step(model, x)
    bitsparse.convert(model)
    with torch.autocast("cpu", torch.bfloat16):  # anew: it remembers what it cast
        after = step(model, x)
    assert after.live > 0
    assert_same_step(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model, x, dtype):
    model, x = model.to(dtype), x.to(dtype)
    before = step(model, x)
    bitsparse.convert(model)
    after = step(model, x)
    assert after.live > 0
    assert_same_step(after, before)


def test_converting_leaves_the_rest_alone(model, x):
    dicts = {name: dict(m.__dict__) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    report = bitsparse.convert(model)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == ids
    model.load_state_dict(model.state_dict())
    assert bitsparse.revert(model) == len(report.converted)
    assert bitsparse.revert(model) == 0
    for name, m in model.named_modules():
        assert list(m.__dict__) == list(dicts[name])
        assert all(m.__dict__[k] is v for k, v in dicts[name].items())
    assert step(model, x).live == 0


def test_copies_use_their_own_parameters(model, x):
    bitsparse.convert(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        after = step(other, x)
        assert after.live > 0
        assert all(p.grad is None for p in model.parameters())
        assert bitsparse.revert(other) > 0
        assert_same_step(after, step(other, x))
    assert bitsparse.revert(model) > 0


def test_evaluation(model, x):
    model.eval()
    with torch.no_grad():
        before = model(x)
        bitsparse.convert(model)
        after = model(x)
    assert torch.equal(before, after)
    assert live_tensors() == 0
    assert step(model, x).live > 0  # with gradients also in eval mode


def test_moving(model, x):
    bitsparse.convert(model)
    model.to(torch.float64)
    after = step(model, x.double())  # not a dtype that is compressed
    assert after.live == 0
    bitsparse.revert(model)
    assert_same_step(after, step(model, x.double()))


def test_meta_device(x):
    with torch.device("meta"):
        model = encoder()
    assert len(bitsparse.convert(model).converted) == 2
    assert model(x.to("meta")).device.type == "meta"
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    assert step(model, x).live == 2


def test_frozen_and_one_token(model, x):
    x.requires_grad_()
    token = x.detach()[:1, :1].clone()
    for p in model.parameters():
        p.requires_grad_(False)
    before = step(model, x)
    bitsparse.convert(model)
    assert_same_step(step(model, x), before)
    assert step(model, token.requires_grad_()).live == 0


@pytest.mark.parametrize("which", [1, 3])
@pytest.mark.parametrize("wrap", [Adapter, nn.utils.parametrizations.weight_norm])
def test_children_replaced_afterwards(x, which, wrap):
    model = sequential()
    bitsparse.convert(model)
    model[which] = wrap(model[which])
    after = step(model, x)
    assert after.live == 0
    bitsparse.revert(model)
    assert_same_step(after, step(model, x))


HOOKS = {
    "forward": lambda m, f: m.register_forward_hook(lambda *_: f()),
    "forward pre": lambda m, f: m.register_forward_pre_hook(lambda *_: f()),
    "backward": lambda m, f: m.register_full_backward_hook(lambda *_: f()),
    "backward pre": lambda m, f: m.register_full_backward_pre_hook(lambda *_: f()),
}


@pytest.mark.parametrize("child", ["linear1", "dropout", "linear2", "activation"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_called(x, child, hook):
    model = nn.TransformerEncoderLayer(D, 2, FF, 0.0, nn.ReLU(), batch_first=True)
    bitsparse.convert(model)
    calls = []
    handle = HOOKS[hook](getattr(model, child), lambda: calls.append(1))
    after = step(model, x)
    assert after.live == 0
    assert calls
    handle.remove()
    assert step(model, x).live == 1
    bitsparse.revert(model)
    assert_same_step(after, step(model, x))


def test_global_hooks_are_called(x):
    model = sequential()
    bitsparse.convert(model)
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(type(m)))
    try:
        assert step(model, x).live == 0
    finally:
        handle.remove()
    assert called == [nn.LayerNorm, nn.Linear, nn.ReLU, nn.Linear, nn.Sequential]


def decoder(dropout: float) -> nn.Module:
    return Decoder(dropout=dropout)


@pytest.mark.parametrize("make", [sequential, encoder, decoder])
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_active_dropout_drops_the_same(x, make, p, autocast):
    model = make(p)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = step(model, x)
    drawn = torch.get_rng_state()
    count = len(bitsparse.convert(model).converted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = step(model, x)
    assert after.live == count
    assert_same_step(after, before)
    assert torch.equal(torch.get_rng_state(), drawn)  # backward has put it back
    model.eval()
    assert step(model, x).live > 0


@pytest.mark.parametrize("frozen", ["0.weight", "2.weight", "3.weight", "3.bias"])
def test_active_dropout_with_frozen_parameters(frozen):
    model = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Dropout(0.4), nn.Linear(FF, D))
    parameters = dict(model.named_parameters())
    if frozen in parameters:
        parameters[frozen].requires_grad_(False)
    x = torch.randn(6, D)
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    before = step(model, x)
    bitsparse.convert(model)
    assert_same_step(step(model, x), before)


def test_active_dropout_twice_backward():
    """The elements that were dropped are known as long as the graph lives."""
    model = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Dropout(0.4), nn.Linear(FF, D))
    bitsparse.convert(model)
    loss = model(torch.randn(6, D)).square().sum()
    assert live_tensors() == 1
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    torch.rand(3)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = model(torch.randn(6, D)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, weights, create_graph=True)


def test_active_dropout_in_place_runs_as_before():
    model = nn.Sequential(
        nn.Linear(D, FF), nn.ReLU(), nn.Dropout(0.4, inplace=True), nn.Linear(FF, D)
    )
    bitsparse.convert(model)
    x = torch.randn(6, D)
    out = model(x)
    assert out.requires_grad
    assert live_tensors() == 0


def test_dropout_after_the_block_draws_the_same(x):
    model = encoder(0.3)
    for layer in model.layers:
        layer.dropout.p = 0.0
    before = step(model, x)
    bitsparse.convert(model)
    after = step(model, x)
    assert after.live == 2
    assert_same_step(after, before)


def test_twice_changes_nothing(model):
    first = bitsparse.convert(model)
    dicts = {name: dict(m.__dict__) for name, m in model.named_modules()}
    second = bitsparse.convert(model, codec="small", strict=True)
    assert second.converted == ()
    assert second.already == first.converted
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == dicts


def test_filter(x):
    model = encoder()
    seen = []

    def last(name: str, module: nn.Module) -> bool:
        seen.append((name, module))
        return name == "layers.1"

    report = bitsparse.convert(model, filter=last)
    assert [c.name for c in report.converted] == ["layers.1"]
    assert [s.name for s in report.skipped] == ["layers.0"]
    assert seen == [("layers.0", model.layers[0]), ("layers.1", model.layers[1])]
    assert step(model, x).live == 1


def test_report():
    model = nn.ModuleDict(
        {
            "block": sequential(),
            "gelu": nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D)),
            "other": nn.TransformerEncoderLayer(D, 2, FF, activation="gelu"),
            "adapted": nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(D, FF)),
                nn.ReLU(),
                nn.Linear(FF, D),
            ),
        }
    )
    model["patched"] = sequential()
    model["patched"].forward = lambda x: x
    report = bitsparse.convert(model)
    assert str(report).splitlines() == [
        "1 converted, 4 skipped",
        "converted  block[1:4]    relu  torch Sequential",
        "skipped    gelu[0:3]           1 is GELU, not ReLU or squared ReLU",
        "skipped    other               activation is gelu, not ReLU or squared ReLU",
        "skipped    adapted[0:3]        0 is ParametrizedLinear, not nn.Linear",
        "skipped    patched[1:4]        its forward is not the one that is known",
        "expected at density 0.1: 15 of 128 bytes of hidden activations a token",
    ]
    assert isinstance(report, bitsparse.ConversionReport)
    assert "forward" not in model["gelu"].__dict__


@pytest.mark.parametrize(("activation", "dense"), [("relu", 1), ("relu2", 2), ("reglu", 3)])
def test_expected_bytes(activation, dense):
    block = bitsparse.conversion.Converted("", "", activation, FF, 2)
    assert block.dense_bytes == dense * FF * 2
    assert block.expected_bytes(0) == 0
    assert block.expected_bytes(0.5) == FF * (1 / 8 + (1 + (activation == "reglu")))
    with pytest.raises(ValueError, match=r"density: got 2, allowed: from 0 to 1"):
        block.expected_bytes(2)


def test_nothing_to_convert():
    model = nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))
    with pytest.warns(UserWarning, match=r"looked for: torch Sequential.*Llama[\s\S]*is GELU"):
        report = bitsparse.convert(model)
    assert report.converted == ()
    with pytest.raises(ValueError, match="looked for: torch Sequential"):
        bitsparse.convert(model, strict=True)
    with pytest.warns(UserWarning, match="looked for"):
        assert str(bitsparse.convert(nn.Linear(2, 2))) == "0 converted, 0 skipped"


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"codec": "x"}, ValueError, "codec: got 'x', allowed: 'fast', 'balanced', 'small'"),
        ({"filter": 3}, TypeError, "filter: got 3, allowed: None, a callable"),
        ({"strict": 1}, TypeError, "strict: got 1, allowed: True, False"),
    ],
)
def test_bad_arguments_change_nothing(kwargs, error, message):
    model = sequential()
    with pytest.raises(error, match=message):
        bitsparse.convert(model, **kwargs)
    assert bitsparse.revert(model) == 0


@pytest.mark.parametrize("call", [bitsparse.convert, bitsparse.revert])
def test_not_a_module(call):
    with pytest.raises(TypeError, match=r"model: got dict, allowed: torch.nn.Module"):
        call({})


def test_a_filter_that_raises_changes_nothing():
    model = encoder()

    def bad(name, module):
        if name == "layers.1":
            raise RuntimeError("no")
        return True

    with pytest.raises(RuntimeError, match="no"):
        bitsparse.convert(model, filter=bad)
    assert bitsparse.revert(model) == 0


def test_subclasses_are_others(x):
    class Mine(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return x

    with pytest.warns(UserWarning, match="looked for"):
        assert not bitsparse.convert(Mine(D, 2, FF)).converted


def test_subclasses_that_compute_the_same(x):
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, x):
            return super().forward(x) + 1

    model = Mine(D, 2, FF, 0.0)
    before = step(model, x)
    assert len(bitsparse.convert(model, strict=True).converted) == 1
    after = step(model, x)
    assert after.live == 1
    assert_same_step(after, before)


counted = []
OTHERS = {
    "adds": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 1,
    "scales": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x * 2)) * self.up_proj(x)),
    "other gate": lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
    "other order": lambda self, x: self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x))),
    "no activation": lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)),
    "two inputs": lambda self, x, y: self.down_proj(self.act_fn(self.gate_proj(x)) * y),
    "depends on values": lambda self, x: self.down_proj(
        self.act_fn(self.gate_proj(x)) * self.up_proj(x) if x else x
    ),
    "an effect": lambda self, x: (
        counted.append(1) or self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    ),
    "inner function": lambda self, x: (lambda: self.down_proj(self.act_fn(self.gate_proj(x))))(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_computation_under_the_same_names(other):
    model = type("Other", (Gated,), {"forward": OTHERS[other]})()
    with pytest.warns(UserWarning, match="its forward is not the one that is known"):
        assert not bitsparse.convert(model).converted
    assert not counted


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("act", [F.relu, torch.relu, nn.ReLU()])
def test_a_new_family_is_one_entry(x, monkeypatch, p, act):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(D, FF), nn.Linear(FF, D), act

        def forward(self, x):
            hidden = self.act(self.fc1(F.layer_norm(x, (D,))))
            return x + self.fc2(F.dropout(hidden, p=p, training=self.training))

    name = families.class_name(Layer)
    family = Family("mine", frozenset({name}), up="fc1", act="act", down="fc2", inline=True)
    monkeypatch.setitem(families.BY_CLASS, name, family)
    monkeypatch.setitem(families.BY_NAME, "mine", family)
    model = Layer()
    before = step(model, x)
    bitsparse.convert(model, strict=True)
    after = step(model, x)
    assert after.live == 1
    assert_same_step(after, before)
    assert bitsparse.revert(model) == 1
    assert_same_step(step(model, x), before)


def test_function_transforms_and_tracing_run_as_before(x):
    model = sequential()
    bitsparse.convert(model)
    params = dict(model.named_parameters())

    def loss(params):
        return torch.func.functional_call(model, params, x).square().sum()

    model(x).square().sum().backward()
    grads = torch.func.grad(loss)(params)
    assert all(torch.equal(grads[name], p.grad) for name, p in params.items())
    torch.func.jvp(loss, (params,), (params,))
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.parametrize("name", ["sequential", "encoder", "decoder", "gated"])
def test_compiled_as_one_graph(x, name):
    model = Gated() if name == "gated" else MODELS[name]()
    before = step(model, x)
    count = len(bitsparse.convert(model).converted)
    operators = Counter()

    def backend(graph, inputs):
        operators.update(str(n.target) for n in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    after = step_of(model, lambda: (out := compiled(x), out.float().square().mean()), x)
    assert after.live == count
    assert_same_step(after, before)
    assert operators["bitsparse.feed_forward.default"] == count
    assert operators["bitsparse.feed_forward_backward.default"] == count


def test_exported_as_before(x):
    model = nn.ModuleList([encoder()])[0]
    bitsparse.convert(model, filter=lambda name, module: name == "layers.0")
    program = torch.export.export(model, (x,))
    assert not any("bitsparse" in str(n.target) for n in program.graph.nodes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(model, x, reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for m in self:
                x = torch.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant)
            return x

    model = Checkpointed(model, encoder())
    x.requires_grad_()
    before = step(model, x)
    bitsparse.convert(model)
    assert_same_step(step(model, x), before)


def test_a_block_that_is_given_another_class_still_compresses(x):
    """As `fully_shard` does."""
    model = nn.TransformerEncoderLayer(D, 2, FF, 0.0)
    before = step(model, x)
    bitsparse.convert(model)
    model.__class__ = type("Sharded", (type(model),), {})
    after = step(model, x)
    assert after.live == 1
    assert_same_step(after, before)


def test_nested_tensors_run_as_before():
    model = sequential()
    nested = torch.nested.nested_tensor([torch.randn(2, D), torch.randn(3, D)])
    expected = model(nested)
    bitsparse.convert(model)
    assert torch.equal(model(nested).to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
    assert live_tensors() == 0


def test_one_linear_as_both_projections(x):
    linear = nn.Linear(D, D)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    before = step(model, x)
    bitsparse.convert(model)
    after = step(model, x)
    assert after.live == 1
    assert_same_step(after, before)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-42])
def test_special_values(model, x, special):
    x[0, 0] = special
    before = step(model, x)
    bitsparse.convert(model)
    after = step(model, x)
    assert after.live > 0
    # Any NaN equals any: the payload of a computed one is not specified.
    plain = [torch.nan_to_num(t, nan=7.0) for t in (before.output, *grads_of(before))]
    assert all(
        torch.equal(torch.nan_to_num(a, nan=7.0), p)
        for a, p in zip((after.output, *grads_of(after)), plain, strict=True)
    )


def grads_of(done: Step) -> list[torch.Tensor]:
    return [g for g in done.grads.values() if g is not None]


def test_families_are_consistent():
    names = [name for family in FAMILIES for name in family.classes]
    assert len(names) == len(set(names))
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)


def test_importing_does_not_import_transformers():
    code = (
        "import sys, bitsparse, torch; bitsparse.revert(torch.nn.ReLU())\n"
        "bitsparse.convert(torch.nn.TransformerEncoderLayer(4, 2, 8))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_functional_relu_is_that_of_torch():
    assert nn.TransformerEncoderLayer(D, 2, FF).activation is F.relu
