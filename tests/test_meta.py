"""Devices that are not at hand: shapes without values, and a GPU's path on the CPU."""

import itertools
import pytest
import torch
from test_moments import assert_as_exact_in_total, define, exact_sizes, far, inputs, names, squares
from test_moments import step
from torch.testing import assert_close
from capsnb import Routing, dynamic_routing, route_capsules
from capsnb.engine import dstep, dynamic, moments
from capsnb.engine.dstep import Sizes, plans
from capsnb.engine.moments import _Tiling
from capsnb.engine.numerics import error_to

rows = lambda *shape: torch.rand(*shape)
parts = lambda i=50: (rows(3, i), rows(3, i, 4, 4))
layers = {
    **{
        f'Routing {plan}': (lambda p=plan: Routing(4, 4, 4, n_out=8, plan=p), parts)
        for plan in plans
        if plan in ('votes', 'moments', 'stream')  # the others are for one device
    },
    'large': (lambda: Routing(4, 4, 4, n_out=64), lambda: parts(3000)),
    'own maps': (lambda: Routing(4, 4, 4, n_inp=50, n_out=8), parts),
    'skm, pooled': (lambda: Routing(4, 4, 4, n_out=8, p_model='skm', pooled=True), parts),
    'one iteration': (lambda: Routing(4, 4, 4, n_out=8, n_iters=1, plan='moments'), parts),
    'dynamic_routing': (lambda: dynamic_routing, lambda: (rows(2, 6, 3, 4),)),
    'route_capsules': (lambda: route_capsules, lambda: (rows(2, 6, 4), rows(6, 3, 4, 5))),
}


@pytest.mark.parametrize('shares', [False, True])
@pytest.mark.parametrize('name', layers)
def test_forward_back_and_back_again_on_meta(name, shares):
    make, x = layers[name]
    f, x = make(), [t.to('meta').requires_grad_() for t in x()]
    params = []
    if isinstance(f, torch.nn.Module):
        f = f.to('meta')
        params = list(f.parameters())
    out = [o for o in f(*x, return_R=shares) if o is not None]
    assert len(out) >= 2 and all(o.is_meta for o in out)
    loss = sum(o.square().sum() for o in out if o.requires_grad)
    g = torch.autograd.grad(loss, [*x, *params], create_graph=True, materialize_grads=True)
    for grad, t in zip(g, [*x, *params]):
        assert grad.is_meta and grad.shape == t.shape and grad.dtype == t.dtype
    sum(v.square().sum() for v in g).backward()
    assert all(t.grad.is_meta for t in x)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    "No value may be read: neither by a check, nor by an op."
    for module in (dstep, dynamic):
        monkeypatch.setattr(module, 'may_look', lambda t: False)
    monkeypatch.setattr(moments, '_on_cpu', lambda t: False)


@pytest.mark.parametrize('plan', ['moments', 'stream'])
@pytest.mark.parametrize(
    'kw', [{}, dict(p_model='skm'), dict(pooled=True), dict(n_iters=1)], ids=str
)
def test_a_gpus_path_is_the_definition(plan, kw, as_on_a_gpu):
    for shared in (True, False):
        s = Sizes(2, 30, 5, 2, 3, 2, shared)
        if not plans[plan].refuses(s):
            want = step(define, inputs(s), **kw)
            for name, p, q in zip(names, step(plans[plan].run, inputs(s), **kw), want):
                assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('s', exact_sizes, ids=str)
@pytest.mark.parametrize('plan', ['moments', 'stream'])
@pytest.mark.parametrize('eps', ['auto', 1e-5])
def test_a_gpus_path_is_as_exact_as_the_definition(plan, s, eps, as_on_a_gpu):
    "The sweep of `test_moments`: narrow wholes, far from the origin, at any scale."
    if plans[plan].refuses(s):
        pytest.skip('needs shared maps')
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1e-3, 1.0, 1e3)):
        assert_as_exact_in_total(plan, s, n_iters, mean, scale, eps, seeds=2)


@pytest.mark.parametrize('eps', ['auto', 1e-5])
def test_without_looking_moments_are_exact(eps, as_on_a_gpu):
    "Large or not, asked for or not: in float64, hence exact to the last digits of float32."
    s, never = Sizes(2, 800, 16, 4, 4, 4, True), _Tiling(float64=False)
    for mean, scale in itertools.product((0.0, 100.0), (1.0, 1e3)):
        X, X32 = inputs(s, mean, scale), inputs(s, mean, scale, dtype=torch.float32)
        truth = step(define, X, eps=eps)
        for name, p, q in zip(names, step(plans['moments'].run, X32, eps=eps, tiling=never), truth):
            assert error_to(p, q) < 1e-6, name


def test_a_gpus_gradients_are_finite_at_any_scale(as_on_a_gpu):
    for plan, power in itertools.product(('moments', 'stream'), range(-6, 7, 3)):
        for p_model in ('gaussian', 'skm'):
            got = squares(plans[plan].run, far(torch.float32, 60, 10.0**power), p_model)
            assert all(g.isfinite().all() for g in got), f'{plan} {power=} {p_model}'


def test_nothing_is_refused_where_nothing_is_read(as_on_a_gpu):
    layer = Routing(2, 3, 2, n_out=4)
    out = layer(torch.full((5,), torch.nan), torch.zeros(5, 2, 3))
    assert out.a.isnan().any()
