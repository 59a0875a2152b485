"""Compiled kernels of routing against the definition: values, gradients, second derivatives."""

import itertools
import subprocess
import sys
import pytest
import torch
from torch.testing import assert_close
from capsnb.engine.dstep import Sizes, choose_plan, plans
from capsnb.engine.dynamic import _fastest, _of_maps, route_capsules
from capsnb.engine.numerics import assert_as_exact
from capsnb.routing.dynamic import dynamic_routing_ref
from test_moments import assert_as_exact_in_total, define, exact_sizes, inputs, names, step

pytest.importorskip('numba')
from capsnb.engine import compiled as fast  # noqa: E402  it needs numba
from capsnb.engine.compiled import _agreement  # noqa: E402

run = plans['compiled'].run
f64 = torch.float64


# ---- votes ----


@pytest.mark.parametrize('shared', [True, False])
@pytest.mark.parametrize('pooled', [True, False])
@pytest.mark.parametrize('p_model', ['gaussian', 'skm'])
@pytest.mark.parametrize('n, i, j', [(1, 1, 1), (2, 70, 33), (3, 40, 16)])
@pytest.mark.parametrize('n_iters', [1, 3])
def test_same_numbers_in_float64(shared, pooled, p_model, n, i, j, n_iters):
    s = Sizes(n, i, j, 2, 3, 2, shared)
    kw = dict(n_iters=n_iters, p_model=p_model, pooled=pooled, need_R=True)
    for name, p, q in zip(names, step(run, inputs(s), **kw), step(define, inputs(s), **kw)):
        assert_close(p, q, rtol=1e-10, atol=1e-12, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('chunk', [1, 37, 4096])
@pytest.mark.parametrize('shared', [True, False])
def test_chunks_change_nothing_but_rounding(monkeypatch, chunk, shared):
    s = Sizes(2, 150, 5, 2, 3, 2, shared)
    monkeypatch.setattr(fast, '_CHUNK', chunk)
    for p, q in zip(step(run, inputs(s)), step(define, inputs(s))):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize('s', exact_sizes, ids=str)
@pytest.mark.parametrize('eps', ['auto', 1e-5])
@pytest.mark.parametrize('few', [0, fast._FEW])
def test_float32_is_as_exact_as_the_definition(monkeypatch, s, eps, few):
    monkeypatch.setattr(fast, '_FEW', few)
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1e-3, 1.0, 1e3)):
        assert_as_exact_in_total('compiled', s, n_iters, mean, scale, eps, seeds=2)


def test_two_threads_give_the_same_bits():
    s, threads = Sizes(3, 1200, 20, 2, 3, 2, True), torch.get_num_threads()
    found = []
    try:
        for k in (1, 2, 3):
            torch.set_num_threads(k)
            found.append(step(run, inputs(s, dtype=torch.float32)))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(found[0][:3], found[1][:3]):
        assert torch.equal(a, b)
    for a, b in zip(found[1][:3], found[2][:3]):
        assert torch.equal(a, b)


def test_auto_takes_it_where_it_wins_and_can_serve():
    treebank = Sizes(5, 1850, 64, 1, 64, 2, True)
    assert choose_plan(treebank) == 'compiled'
    assert choose_plan(treebank._replace(device='cuda')) != 'compiled'
    assert choose_plan(treebank._replace(device='meta')) != 'compiled'
    assert choose_plan(Sizes(20, 16, 10, 4, 4, 4, False)) == 'votes'
    assert 'votes would be' in plans['compiled'].refuses(Sizes(1, 1024, 30000, 1, 64, 2, True))


without = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == 'numba' else find(name, *args)
sys.modules['numba'] = None
import torch
from capsnb import ClassCaps, ConvCaps
from capsnb.engine.dstep import Routing, Sizes, choose_plan, plans
from capsnb.engine.dynamic import route_capsules
import capsnb.engine
assert 'compiled' not in plans
a, mu = torch.rand(1, 4, 4, 2), torch.randn(1, 4, 4, 2, 4, 4)
ConvCaps(2, 3)(a, mu), ClassCaps(2, 3)(a, mu)
assert choose_plan(Sizes(5, 1850, 64, 1, 64, 2, True)) == 'stream'
Routing(1, 64, 2, n_out=3)(torch.randn(1, 9), torch.randn(1, 9, 1, 64))
route_capsules(torch.randn(20, 3, 2), torch.randn(3, 4, 2, 5))
try:
    Routing(1, 64, 2, n_out=3, plan='compiled')
except ImportError as e:
    assert "capsnb[fast]" in str(e)
else:
    raise AssertionError('plan compiled without numba')
"""


lazy = "import sys; from capsnb import ConvCaps; ConvCaps(2, 3); assert 'numba' not in sys.modules"


@pytest.mark.slow
@pytest.mark.parametrize('code', [without, lazy])
def test_without_numba_all_works_as_before_and_it_is_not_imported_before_it_is_used(code):
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


# ---- dynamic routing ----


def maps(n, i, j, d, h, dtype=f64, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(n, i, d, generator=g, dtype=f64)
    W = torch.randn(i, j, d, h, generator=g, dtype=f64) / d
    return [x.float().to(dtype).requires_grad_() for x in (u, W)]


def both(f, X):
    v, R = f(*X)
    g = torch.Generator().manual_seed(1)
    w = torch.randn(v.shape, generator=g, dtype=f64).to(v)
    return [v.detach(), R.detach(), *torch.autograd.grad(v, X, w)]


def agreed(n_iters, detach=False):
    return lambda u, W: _agreement(u, W, n_iters, detach, True)


def written_out(n_iters):
    def f(u, W):
        out = dynamic_routing_ref(torch.einsum('nid,ijdh->nijh', u, W), n_iters)
        return out.v, out.R.mT

    return f


@pytest.mark.parametrize('size', [(3, 5, 2, 3, 4), (17, 33, 10, 8, 16), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize('n_iters', [1, 2, 3, 5])
def test_dynamic_routing_in_float64(size, n_iters):
    "also with shares taken as given"
    given = lambda u, W: _of_maps(u, W, n_iters, True, True)
    for f, want in ((agreed(n_iters), written_out(n_iters)), (agreed(n_iters, True), given)):
        for p, q in zip(both(f, maps(*size)), both(want, maps(*size))):
            assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('scale', [1e-3, 1.0, 30.0])
def test_dynamic_routing_in_float32(scale):
    def scaled(dtype):
        u, W = maps(20, 300, 10, 8, 16, dtype)
        return u, (scale * W.detach()).requires_grad_()

    truth = both(written_out(3), scaled(f64))
    found = both(agreed(3), scaled(torch.float32)), both(written_out(3), scaled(torch.float32))
    for name, *three in zip(('v', 'R', 'du', 'dW'), *found, truth):
        assert_as_exact(*three, factor=3.0, name=name)  # some processors' products err less: 2.4


@pytest.mark.parametrize('order', [(2, 3, 0, 1), (3, 0, 2, 1)])
@pytest.mark.parametrize('h', [1, 3])
def test_dynamic_routing_with_maps_in_any_layout(order, h):
    u, W = (x.detach() for x in maps(13, 6, 3, 4, h))
    W = W.permute(order).contiguous().permute([order.index(k) for k in range(4)])
    for some in (W, W.contiguous()):
        X, Y = ([u.clone().requires_grad_(), some.detach().requires_grad_()] for _ in range(2))
        for p, q in zip(both(agreed(3), X), both(written_out(3), Y)):
            assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_route_capsules_takes_it_for_enough_samples():
    u, W = maps(16, 4, 2, 3, 2)
    assert _fastest(_of_maps, [u, W], False) is _agreement
    assert _fastest(_of_maps, [u[:4], W], False) is _of_maps
    assert _fastest(_of_maps, [u.to('meta'), W.to('meta')], False) is _of_maps
    got = route_capsules(u.view(2, 8, 4, 3), W, return_R=True)
    assert got.v.shape == (2, 8, 2, 2) and not got.R.requires_grad
    for p, q in zip(got, dynamic_routing_ref(torch.einsum('nid,ijdh->nijh', u, W))):
        assert_close(p.flatten(0, 1), q)
