"""Compiled kernels of routing against the definition: values, gradients, second derivatives."""

import itertools
import subprocess
import sys
import pytest
import torch
from torch.testing import assert_close
from capsnb.engine.dstep import Problem, Routing, Sizes, choose_plan, plans
from capsnb.engine.dynamic import _fastest, _of_maps, route_capsules
from capsnb.engine.numerics import assert_as_exact
from capsnb.routing.dynamic import dynamic_routing_ref
from capsnb.routing.em import as_floor
from test_moments import assert_as_exact_in_total, define, exact_sizes, inputs, names, step

pytest.importorskip('numba')
from capsnb.engine import compiled_routing as fast  # noqa: E402  it needs numba
from capsnb.engine.compiled_routing import _agreement, _votes  # noqa: E402

run = plans['compiled'].run
f64 = torch.float64


# ---- votes ----


@pytest.mark.parametrize('shared', [True, False])
@pytest.mark.parametrize('pooled', [True, False])
@pytest.mark.parametrize('p_model', ['gaussian', 'skm'])
@pytest.mark.parametrize('n, i, j', [(2, 11, 5), (1, 1, 1), (2, 70, 33), (3, 40, 16)])
@pytest.mark.parametrize('n_iters', [1, 3])
def test_same_numbers_in_float64(shared, pooled, p_model, n, i, j, n_iters):
    s = Sizes(n, i, j, 2, 3, 2, shared)
    kw = dict(n_iters=n_iters, p_model=p_model, pooled=pooled)
    for name, p, q in zip(names, step(run, inputs(s), **kw), step(define, inputs(s), **kw)):
        assert_close(p, q, rtol=1e-10, atol=1e-12, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('chunk', [1, 37, 4096])
@pytest.mark.parametrize('shared', [True, False])
def test_chunks_change_nothing_but_rounding(monkeypatch, chunk, shared):
    s = Sizes(2, 150, 5, 2, 3, 2, shared)
    monkeypatch.setattr(fast, '_CHUNK', chunk)
    for p, q in zip(step(run, inputs(s)), step(define, inputs(s))):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('s', exact_sizes, ids=str)
@pytest.mark.parametrize('eps', ['auto', 1e-5])
@pytest.mark.parametrize('few', [0, fast._FEW])
def test_float32_is_as_exact_as_the_definition(monkeypatch, s, eps, few):
    monkeypatch.setattr(fast, '_FEW', few)
    monkeypatch.setitem(plans, 'checked', plans['compiled']._replace(run=lambda p, tiling: run(p)))
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1e-3, 1.0, 1e3)):
        assert_as_exact_in_total('checked', s, n_iters, mean, scale, eps, seeds=2)


def test_absent_parts_count_for_nothing():
    s = Sizes(2, 40, 6, 2, 3, 2, True)
    X = [x.detach() for x in inputs(s)]
    X[0][:, 30:] = -torch.inf
    less = [X[0][:, :30], X[1][:, :30], *X[2:]]
    how = 3, 'gaussian', as_floor('auto', 4), False
    for p, q in zip(run(Problem(*X, *how))[:3], run(Problem(*less, *how))[:3]):
        assert_close(p, q)


def test_R_is_that_of_the_last_iteration_and_differentiable():
    s = Sizes(2, 21, 5, 2, 3, 2, True)
    how = 3, 'gaussian', as_floor('auto', 4), False, True
    for n_iters in (1, 3):
        X, Y = inputs(s), inputs(s)
        R, want = run(Problem(*X, n_iters, *how[1:]))[3], define(Problem(*Y, n_iters, *how[1:]))[3]
        assert_close(R, want)
        if n_iters > 1:
            g = torch.randn_like(R)
            got = torch.autograd.grad(R, X[:4], g)
            for p, q in zip(got, torch.autograd.grad(want, Y[:4], g)):
                assert_close(p, q, rtol=1e-8, atol=1e-10)


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


def small(has_model=True, own=False):
    g = torch.Generator().manual_seed(0)
    n, i, G, J, K = 2, 5, 2, 16, 5 if own else 1
    shapes = (n, i, G, J), (n, i), (n, J), (n, G, J), (n, G, J), (K, J), (K, J)
    X = [torch.rand(s, generator=g, dtype=f64) + 0.5 for s in shapes]
    if not has_model:
        X[2:5] = [x[..., :0] for x in X[2:5]]
    return [x.requires_grad_() for x in X]


@pytest.mark.parametrize('has_model', [True, False])
@pytest.mark.parametrize('own', [True, False])
def test_gradients_of_the_op(has_model, own):
    X = small(has_model, own)
    assert torch.autograd.gradcheck(lambda *X: _votes(*X, 16), X)
    few = [x.detach() for x in X]

    def of_some(*Y):
        return _votes(*[y if y.numel() else x for x, y in zip(few, Y)], 16)[2]

    assert torch.autograd.gradgradcheck(of_some, X, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize('has_model', [True, False])
def test_opcheck(has_model):
    X = [x.detach().requires_grad_() for x in small(has_model)]
    torch.library.opcheck(_votes.forward, (*X, 16))
    outs = [o.detach() for o in _votes(*X, 16)]
    args = *X, outs, [torch.ones_like(o) for o in outs], 16
    torch.library.opcheck(_votes.backward, args)


@pytest.mark.graphs
@pytest.mark.parametrize('shared', [True, False])
def test_the_layer_in_a_graph_and_under_functional_transforms(shared):
    torch._dynamo.reset()
    n_inp = None if shared else 30
    layer = Routing(2, 3, 2, n_inp=n_inp, n_out=5, plan='compiled')
    a, mu = torch.randn(2, 30), torch.randn(2, 30, 2, 3)
    want = layer(a, mu)
    graph = torch.compile(layer, fullgraph=True, backend='aot_eager')
    for p, q in zip(graph(a, mu), want):
        assert_close(p, q)
    one = torch.func.vmap(lambda a, mu: tuple(layer(a, mu)))(a, mu)
    for p, q in zip(one, want):
        assert_close(p, q)


def test_auto_takes_it_where_it_wins_and_can_serve():
    treebank = Sizes(5, 1850, 64, 1, 64, 2, True)
    assert choose_plan(treebank) == 'compiled'
    assert choose_plan(treebank._replace(device='cuda')) != 'compiled'
    assert choose_plan(treebank._replace(device='meta')) != 'compiled'
    assert choose_plan(Sizes(20, 16, 10, 4, 4, 4, False)) == 'votes'
    assert 'votes would be' in plans['compiled'].refuses(Sizes(1, 1024, 30000, 1, 64, 2, True))


def test_other_devices_are_refused_in_words():
    layer = Routing(2, 3, 2, n_out=5, plan='compiled').to('meta')
    with pytest.raises(ValueError, match='for the CPU, not for meta'):
        layer(torch.empty(1, 4, device='meta'), torch.empty(1, 4, 2, 3, device='meta'))


without = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == 'numba' else find(name, *args)
sys.modules['numba'] = None
import torch
from capsnb.engine.dstep import Routing, Sizes, choose_plan, plans
from capsnb.engine.dynamic import faster, route_capsules
import capsnb.engine
assert 'compiled' not in plans and not faster
assert choose_plan(Sizes(5, 1850, 64, 1, 64, 2, True)) == 'stream'
Routing(1, 64, 2, n_out=3)(torch.randn(1, 9), torch.randn(1, 9, 1, 64))
route_capsules(torch.randn(20, 3, 2), torch.randn(3, 4, 2, 5))
try:
    Routing(1, 64, 2, n_out=3, plan='compiled')
except ImportError as e:
    assert "capsnb[fast]" in str(e)
else:
    raise AssertionError('plan compiled without numba')
print('fine')
"""


def test_without_numba_all_works_as_before():
    done = subprocess.run([sys.executable, '-c', without], capture_output=True, text=True)
    assert done.stdout.strip().endswith('fine'), done.stderr


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
    def f(u, W):
        return _agreement(u, W, n_iters, detach, True)

    return f


def written_out(n_iters):
    def f(u, W):
        out = dynamic_routing_ref(torch.einsum('nid,ijdh->nijh', u, W), n_iters)
        return out.v, out.R.mT

    return f


@pytest.mark.parametrize('size', [(3, 5, 2, 3, 4), (17, 33, 10, 8, 16), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize('n_iters', [1, 2, 3, 5])
def test_dynamic_routing_in_float64(size, n_iters):
    for p, q in zip(both(agreed(n_iters), maps(*size)), both(written_out(n_iters), maps(*size))):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('n_iters', [1, 2, 4])
def test_shares_taken_as_given(n_iters):
    size = 9, 20, 4, 5, 6

    def plain(u, W):
        return _of_maps(u, W, n_iters, True, True)

    for p, q in zip(both(agreed(n_iters, True), maps(*size)), both(plain, maps(*size))):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('scale', [1e-3, 1.0, 30.0])
def test_dynamic_routing_in_float32(scale):
    def scaled(dtype):
        return [
            (x.detach() * s).requires_grad_()
            for x, s in zip(maps(20, 300, 10, 8, 16, dtype), (1, scale))
        ]

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


def test_votes_in_any_layout():
    X = [x.detach() for x in small()]
    V = X[0].movedim(-1, 0).contiguous().movedim(0, -1)  # an op may be called with any strides

    def grads(V):
        Y = [V.requires_grad_(), *(x.clone().requires_grad_() for x in X[1:])]
        return torch.autograd.grad(sum(o.sin().sum() for o in _votes(*Y, 16)), Y)

    for p, q in zip(grads(V), grads(X[0])):
        assert_close(p, q)


def test_dynamic_op():
    X = maps(3, 4, 2, 3, 2)
    assert torch.autograd.gradcheck(lambda u, W: _agreement(u, W, 3, False, False)[0], X)
    assert torch.autograd.gradgradcheck(lambda u, W: _agreement(u, W, 2, False, False)[0], X)
    for shares in (False, True):
        torch.library.opcheck(_agreement.forward, (*X, 3, False, shares))
    outs = [o.detach() for o in _agreement.forward(*X, 3, False, False)]
    args = *X, outs, [torch.ones_like(outs[0]), torch.zeros_like(outs[1])], 3, False, False
    torch.library.opcheck(_agreement.backward, args)


def test_route_capsules_takes_it_for_enough_samples():
    u, W = maps(16, 4, 2, 3, 2)
    assert _fastest(_of_maps, [u, W]) is _agreement
    assert _fastest(_of_maps, [u[:4], W]) is _of_maps
    assert _fastest(_of_maps, [u.to('meta'), W.to('meta')]) is _of_maps
    got = route_capsules(u.view(2, 8, 4, 3), W, return_R=True)
    assert got.v.shape == (2, 8, 2, 2) and not got.R.requires_grad
    for p, q in zip(got, dynamic_routing_ref(torch.einsum('nid,ijdh->nijh', u, W))):
        assert_close(p.flatten(0, 1), q)
