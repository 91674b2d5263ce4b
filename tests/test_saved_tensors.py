"""Compression of what autograd saves: bit-identical gradients, and what is left alone."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bitsparse
from helpers import assert_same_values

SMALL = {"min_bytes": 256}


def live() -> int:
    return bitsparse.memory_stats()["live_tensors"]


def gradients(model, x, context=None, autocast=None):
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bool(autocast)):
        if context is None:
            y = model(x)
        else:
            with context:
                y = model(x)
    used = live()
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}, used


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 32, 3, padding=1)
        self.b = nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.c = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.a(x) - 0.5)
        x = F.relu(x + self.norm(self.b(x)) - 0.7)
        return self.c(x.mean((2, 3)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64, padding_idx=0)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        x = x * (x > 0.5)  # a padded batch
        h = F.dropout(F.relu(self.up(x) - 0.5), 0.3)
        first, second = h.chunk(2, -1)
        y = self.down(torch.cat([first * second, second], -1))
        return y.transpose(0, 1) @ y + self.embed.weight[:1].sum()


MODELS = {
    "convolutions": (ResNet, (4, 3, 24, 24)),
    "mixed": (Mixed, (96, 64)),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 128, batch_first=True), (4, 16, 32)),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        (300, 16),
    ),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("codec", ["fast", "balanced", "small"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_same_bits(device, name, codec, autocast, monkeypatch):
    # Some of cuDNN's convolutions add up in another order each time.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    expected, _ = gradients(model, x, autocast=autocast)
    context = bitsparse.compressed_saved_tensors(codec=codec, **SMALL)
    gc.collect()  # of other tests
    before = live()
    actual, used = gradients(model, x, context, autocast)
    assert used > before
    assert actual.keys() == expected.keys()
    for n, e in expected.items():
        if e is None:
            assert actual[n] is None
        else:
            assert_same_values(actual[n], e, n)
    gc.collect()
    assert live() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "layout",
    {
        "contiguous": lambda x: x.contiguous(),
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "part": lambda x: torch.cat([x, x])[: len(x)],
        "expanded": lambda x: x[:1, :, :1].expand_as(x),
        "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "one column": lambda x: x.reshape(-1, 1, 1, 1).contiguous(),
    }.items(),
    ids=lambda item: item[0],
)
def test_strides_and_bits_come_back(layout, dtype):
    x = torch.randn(4, 8, 6, 16) * (torch.rand(4, 8, 6, 16) < 0.1)
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    x = layout[1](x.to(dtype))
    seen = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf, t):
            ctx.save_for_backward(t)
            return leaf.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad, None

    leaf = torch.ones((), requires_grad=True)
    before = live()
    with bitsparse.compressed_saved_tensors(min_bytes=1):
        y = Keep.apply(leaf, x)
    whole = layout[0] not in ("part", "expanded", "every other") and dtype != torch.float64
    assert live() - before == whole
    y.backward()
    assert seen[0].stride() == x.stride() or x.numel() == max(x.shape)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(seen[0].contiguous().view(integer), x.contiguous().view(integer))


def test_what_is_saved_twice_is_compressed_once():
    x = torch.randn(64, 64, requires_grad=True)
    w = [torch.randn(64, 8, requires_grad=True) for _ in range(3)]
    before = live()
    with bitsparse.compressed_saved_tensors(**SMALL):
        h = F.relu(x - 1)  # saved by itself and by every product
        loss = sum((h @ v).square().sum() for v in w) + (h.view(32, 128) * 2).exp().sum()
        assert live() == before + 1
        del h
    loss.backward()


def test_memory_is_not_confused_with_what_was_there_before():
    w = torch.randn(64, 8, requires_grad=True)
    results = []
    with bitsparse.compressed_saved_tensors(**SMALL):
        for i in range(20):
            h = F.relu(torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) - 1)
            results.append(h @ w)
            del h
    for i, y in enumerate(results):
        h = F.relu(torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) - 1)
        (grad,) = torch.autograd.grad(y.sum(), w)
        assert torch.equal(grad, h.t() @ torch.ones(64, 8))


def test_a_changed_tensor_is_another():
    w = torch.randn(64, 8, requires_grad=True)
    h = F.relu(torch.randn(64, 64) - 1)
    with bitsparse.compressed_saved_tensors(**SMALL):
        a = h @ w
        first = h.clone()
        h.mul_(2)
        b = h @ w
    for y, e in ((a, first), (b, first * 2)):
        (grad,) = torch.autograd.grad(y.sum(), w)
        assert torch.equal(grad, e.t() @ torch.ones(64, 8))


def test_a_change_in_place_of_what_is_left_alone_is_an_error():
    w = torch.randn(64, 8, requires_grad=True)
    h = torch.randn(64, 64)  # dense
    with bitsparse.compressed_saved_tensors(**SMALL):
        y = h @ w
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_kept_alive_by_itself():
    """An output that its own node saves, dense or not."""
    for offset in (0.0, 1.0):
        x = torch.randn(64, 64, requires_grad=True)
        with bitsparse.compressed_saved_tensors(**SMALL):
            y = (x - offset).exp() if offset == 0 else F.relu(x - offset)
        gone = weakref.ref(y)
        gc.collect()
        gc.disable()
        try:
            del y
            assert gone() is None
        finally:
            gc.enable()


def test_double_backward_and_retained_graphs():
    x = torch.randn(64, 64, dtype=torch.float32, requires_grad=True)

    def run():
        y = (F.relu(x - 1).square() * x.exp()).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, retain_graph=True)
        (second,) = torch.autograd.grad(g.sum(), x)
        return g.detach(), again, second

    expected = run()
    with bitsparse.compressed_saved_tensors(**SMALL):
        actual = run()
    for a, e in zip(actual, expected, strict=True):
        assert_same_values(a, e)


@pytest.mark.parametrize("inside", [False, True])
def test_with_checkpointing(inside):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    compressed = bitsparse.compressed_saved_tensors(**SMALL)

    def within(t):
        with bitsparse.compressed_saved_tensors(**SMALL):
            return block(t)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, t):
            return checkpoint(within if inside else self.block, t, use_reentrant=False)

    # deepcopy would leave `within` with the original.
    def run(context):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        if context is None:
            y = Wrapped()(leaf)
        else:
            with context:
                y = Wrapped()(leaf)
        y.square().sum().backward()
        return [leaf.grad.clone(), *(p.grad.clone() for p in block.parameters())]

    plain = x.clone().requires_grad_()
    block.zero_grad()
    block(plain).square().sum().backward()
    expected = [plain.grad.clone(), *(p.grad.clone() for p in block.parameters())]
    for a, e in zip(run(None if inside else compressed), expected, strict=True):
        assert_same_values(a, e)


def test_with_our_own_block():
    torch.manual_seed(0)
    m = bitsparse.nn.FeedForward(64, 256, "relu2")
    x = torch.randn(128, 64)
    expected, _ = gradients(m, x)
    actual, _ = gradients(m, x, bitsparse.compressed_saved_tensors(**SMALL))
    for n, e in expected.items():
        assert_same_values(actual[n], e, n)


def test_what_has_no_ordinary_memory_is_left_alone():
    nested = torch.nested.nested_tensor([torch.randn(30, 8), torch.randn(20, 8)])
    with bitsparse.compressed_saved_tensors(min_bytes=0):
        F.relu(nested.requires_grad_())
        F.relu(torch.randn(0, requires_grad=True)).sum().backward()
        x = torch.randn(20, 20, requires_grad=True)
        (x * torch._efficientzerotensor(20, 20)).sum()


def test_another_tensor_at_the_same_address():
    np = pytest.importorskip("numpy")
    memory = np.zeros((64, 64), np.float32)
    memory[:3] = 1
    w = torch.randn(64, 8, requires_grad=True)
    with bitsparse.compressed_saved_tensors(**SMALL):
        first = torch.from_numpy(memory)
        y = first @ w
        memory[:] = 0
        memory[5:8] = 2
        second = torch.from_numpy(memory)
        z = second @ w
    assert first.data_ptr() == second.data_ptr() and y.shape == z.shape
    (grad,) = torch.autograd.grad(z.sum(), w)
    assert torch.equal(grad, second.t() @ torch.ones(64, 8))


def test_inside_a_compiled_function():
    torch._dynamo.reset()

    def plain(q):
        return ((q.relu() @ q).relu() * q).sum()

    @torch.compile(backend="eager")
    def compiled(q):
        with bitsparse.compressed_saved_tensors(**SMALL):
            return plain(q)

    grads = []
    for f in (plain, compiled):
        q = torch.randn(60, 60, generator=torch.Generator().manual_seed(0)).sub(1).requires_grad_()
        f(q).backward()
        grads.append(q.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"codec": "tiny"}, "codec: got 'tiny', allowed"),
        ({"min_bytes": -1}, "min_bytes: got -1, allowed"),
        ({"min_bytes": 1.5}, "min_bytes: got 1.5, allowed"),
        ({"min_bytes": True}, "min_bytes: got True, allowed"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message), bitsparse.compressed_saved_tensors(**arguments):
        pass
