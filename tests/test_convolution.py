"""Large kernels: the same as PyTorch's convolution, whoever asks and in whatever order."""

import copy
import io
import pickle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from torch import nn
from torch.testing import assert_close
from capsnb.engine import convolution
from capsnb.engine.convolution import Conv2d, conv2d, conv2d_by_products, share_of_products
from capsnb.engine.convolution import transforms
from capsnb.engine.numerics import error_to


def pair(b=16, c=64, d=64, m=6, n=5, k=3, l=3, dtype=torch.float64, seed=0):
    make = torch.Generator().manual_seed(seed)
    sizes = (b, c, m, n), (d, c, k, l)
    return [torch.randn(*size, generator=make, dtype=dtype) for size in sizes]


@pytest.fixture
def by_products(monkeypatch):
    "Products wherever they are allowed; how often they ran."
    ran, way = [], convolution.conv2d_by_products
    monkeypatch.setattr(convolution, 'share_of_products', lambda *_: 0.0)
    monkeypatch.setattr(
        convolution, 'conv2d_by_products', lambda *a: ran.append(len(ran)) or way(*a)
    )
    convolution._transforms.cache_clear()
    yield ran
    convolution._transforms.cache_clear()


small = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(small, small, small, st.integers(1, 9), st.integers(1, 9), small, small, st.integers(1, 4))
def test_as_pytorch_says(b, c, d, m, n, k, l, s):
    k, l = min(3 * k - 2, m), min(2 * l, n)
    x, w = pair(b, c, d, m, n, k, l, seed=m * n)
    ins = x.requires_grad_(), w.requires_grad_()
    y, ref = conv2d_by_products(x, w, s), F.conv2d(x, w, stride=s)
    assert_close(y, ref)
    g = torch.randn_like(ref)
    assert_close(torch.autograd.grad(y, ins, g), torch.autograd.grad(ref, ins, g))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_products_are_counted(m, n, k, l):
    "Three for a pair of frequencies, one for each that is its own negative."
    assume(k <= m and l <= n)
    alone = (2 - m % 2) * (2 - n % 2)
    assert len(transforms((m, n), (k, l)).A) == alone + 3 * (m * n - alone) // 2


def test_float32_is_as_exact_as_the_direct_way():
    x, w = pair(2, 16, 16, 20, 20, 9, 9, torch.float32)
    truth = F.conv2d(x.double(), w.double(), stride=2)
    assert error_to(conv2d_by_products(x, w, 2), truth) < 1e-6


def test_second_derivatives_and_forward_mode():
    ins = [t.requires_grad_() for t in pair(1, 2, 2, 4, 5, 3, 2)]
    way = lambda x, w: conv2d_by_products(x, w, 2)
    assert torch.autograd.gradcheck(way, ins, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(way, ins)


def test_products_where_they_pay():
    x, w = pair(96, 96, 96, 10, 10, 5, 5, torch.float32)
    assert share_of_products(x, w) < 0.5 < share_of_products(x[:4], w)
    assert torch.equal(conv2d(x, w), conv2d_by_products(x, w))
    assert torch.equal(conv2d(x[:4], w), F.conv2d(x[:4], w))


def test_orders_of_memory(by_products):
    x, w = pair()
    for like in (x.to(memory_format=torch.channels_last), x.transpose(2, 3), x[::2, :, ::2]):
        assert_close(conv2d(like, w), F.conv2d(like, w))
    assert_close(conv2d(x, w.transpose(0, 1)), F.conv2d(x, w.transpose(0, 1)))
    assert len(by_products) == 4


def first_in_inference_mode(x, w):
    with torch.inference_mode():
        conv2d(x, w)


def first_with_another_default_device(x, w):
    with torch.device('meta'):
        conv2d(x, w)


def first_faked(x, w):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        conv2d_by_products(x, w)


def first_transformed(x, w):
    torch.func.grad(lambda v: conv2d_by_products(x, v).sum())(w)


def first_traced(x, w):
    torch.jit.trace(lambda x: conv2d(x, w), x, check_trace=False)


firsts = (
    first_in_inference_mode,
    first_with_another_default_device,
    first_faked,
    first_transformed,
    first_traced,
)


@pytest.mark.filterwarnings('ignore')  # tracing is going out of use
@pytest.mark.parametrize('first', firsts, ids=lambda f: f.__name__)
def test_whoever_was_first_the_next_one_trains(by_products, first):
    "The matrices are kept for all: they must be plain tensors."
    x, w = pair()
    first(x, w)
    x.requires_grad_(), w.requires_grad_()
    y = conv2d(x, w)
    assert_close(y, F.conv2d(x, w))
    y.sum().backward()
    kept = transforms((6, 5), (3, 3))
    assert all(type(t) is torch.Tensor and t.device.type == 'cpu' for t in kept)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in kept)


@pytest.mark.filterwarnings('ignore')
def test_graphs_hold_a_convolution(by_products):
    x, w = pair(dtype=torch.float32)
    net = Conv2d(64, 64, 3)
    f = torch.compile(conv2d, fullgraph=True, backend='eager')
    assert_close(f(x, w), F.conv2d(x, w))
    dynamic = dict(input={0: torch.export.Dim('b')})
    graph = torch.export.export(net, (x,), dynamic_shapes=dynamic)
    assert 'conv2d' in str(graph.graph) and 'matmul' not in str(graph.graph)
    traced = torch.jit.trace(net, x, check_trace=False)
    assert 'matmul' not in str(traced.inlined_graph)
    assert_close(traced(x[:3]), F.conv2d(x[:3], net.weight, net.bias))
    assert not by_products


def test_not_here(by_products):
    "Transforms of functions, other dtypes, no data: PyTorch's own way."
    x, w = pair(dtype=torch.float32)
    each = torch.func.vmap(lambda v: conv2d(v[None], w)[0])
    assert_close(each(x), F.conv2d(x, w))
    slope = lambda way: torch.func.grad(lambda v: way(x, v).square().mean())(w)
    assert_close(slope(conv2d), slope(F.conv2d))
    assert conv2d(x.half(), w.half()).dtype == torch.float16
    with torch.autocast('cpu', torch.float16):
        assert conv2d(x, w).dtype == torch.float16
    assert conv2d(x.to('meta'), w.to('meta')).shape == (16, 64, 4, 3)
    assert conv2d(x[:0], w).shape == (0, 64, 4, 3)
    assert conv2d(x[0], w).shape == (64, 4, 3)
    assert conv2d(x, w, None, (1, 2)).shape == (16, 64, 4, 2)
    large = torch.randn(1, 1, 33, 33)
    assert torch.equal(conv2d(large, large[:, :, :9, :9]), F.conv2d(large, large[:, :, :9, :9]))
    assert not by_products


def test_half_precision_errs_three_times_pytorchs_at_most(by_products):
    "Under autocast, values and gradients; the dtypes are those of PyTorch's way."
    x, w = (t.requires_grad_() for t in pair(4, 64, 64, 12, 12, 5, 5, torch.float32))
    bias = torch.randn(64, requires_grad=True)
    ins, g = (x, w, bias), torch.randn(4, 64, 8, 8)

    def found(way):
        y = way(x, w, bias)
        return y, *torch.autograd.grad(y, ins, g.to(y.dtype))

    truth = found(F.conv2d)
    with torch.autocast('cpu', torch.bfloat16):
        ours, theirs = found(conv2d), found(F.conv2d)
    assert len(by_products) == 1
    for name, a, b, t in zip('y x w bias'.split(), ours, theirs, truth):
        off = [((v - t).norm() / t.norm()).item() for v in (a, b)]
        assert a.dtype == b.dtype and off[0] < 3 * off[1] < 0.02, (name, off)


def test_tensors_of_half_precision(by_products):
    x, w = pair(4, 64, 64, 12, 12, 5, 5, torch.float32)
    y, truth = conv2d(x.bfloat16(), w.bfloat16()), F.conv2d(x, w)
    assert y.dtype == torch.bfloat16 and len(by_products) == 1
    assert (y - truth).norm() < 0.01 * truth.norm()


bad = {
    'kernel is larger': lambda x, w: (x[:, :, :2], w),
    'other maps': lambda x, w: (x, w[:, :32]),
    'no kernels': lambda x, w: (x, w[:0]),
    'empty kernels': lambda x, w: (x, w[:, :, :0]),
    'stride 0': lambda x, w: (x, w, None, 0),
    'stride -1': lambda x, w: (x, w, None, -1),
    'one bias for all': lambda x, w: (x, w, w[0, 0, 0, :1]),
    'bias of another dtype': lambda x, w: (x, w, torch.zeros(64)),
    'kernel of another dtype': lambda x, w: (x, w.float()),
}


@pytest.mark.parametrize('make', bad.values(), ids=bad)
def test_what_pytorch_refuses_is_refused_in_its_words(by_products, make):
    given = make(*pair())
    with pytest.raises(RuntimeError) as ours:
        conv2d(*given)
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(*given)
    assert str(ours.value) == str(theirs.value)


def test_what_does_not_fit_is_named():
    x, w = pair()
    for way in (conv2d_by_products, share_of_products):
        for a in ((x, w[:, :32]), (x[:, :, :2], w), (x[0], w), (x, w, 0), (x, w, (1, 1))):
            with pytest.raises(ValueError, match='expected pictures'):
                way(*a)
    assert conv2d_by_products(x[:0], w).shape == (0, 64, 4, 3)
    with pytest.raises(ValueError, match='stride must be an integer'):
        Conv2d(3, 4, 3, (1, 2))


def test_the_layer_is_a_convolution(by_products):
    x, _ = pair(dtype=torch.float32)
    net, ref = Conv2d(64, 8, 3, 2), nn.Conv2d(64, 8, 3, 2)
    net.load_state_dict(ref.state_dict())
    file = io.BytesIO(pickle.dumps(net))
    for same in (net, copy.deepcopy(net), pickle.load(file)):
        assert_close(same(x), ref(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        net.requires_grad_(False)(x)
    assert len(by_products) == 4


def test_a_damaged_picture_is_alone(by_products):
    x, w = pair()
    x[0, 0, 0, 0] = torch.nan
    y = conv2d(x, w)
    assert y[0].isnan().all() and y[1:].isfinite().all()
