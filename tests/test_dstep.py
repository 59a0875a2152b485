"""Routing: against the author's module, corner cases, dtypes, errors, sweeps."""

from pathlib import Path
import math
import pytest
import torch
from torch.testing import assert_close
from capsnb import Routing
from capsnb.engine.dstep import Sizes, choose_plan, plans
from capsnb.zoo.routers import routing_layer

golden = torch.load(Path(__file__).parent / 'data' / 'heinsen2019_routing.pt', weights_only=True)


def usable(layer_args):
    own = layer_args.get('n_inp')
    return [p for p in plans if not p.startswith('triton') and not (p == 'moments' and own)]


slow = pytest.mark.slow
cases = [pytest.param(k, marks=slow) if k.startswith('published') else k for k in golden]


@pytest.mark.parametrize('case', cases)
def test_published_module_and_weights(case):
    g = golden[case]
    for plan in usable(g['args']):
        layer = Routing(**g['args'], eps='paper', plan=plan)
        layer.load_state_dict(g['weights'])  # its constant buffers and tied beta are dropped
        out = layer(g['a_inp'], g['mu_inp'], return_R=True, **g.get('forward', {}))
        for got, want in zip(out, g['out']):
            assert_close(got, want, rtol=1e-4, atol=1e-5)


def make(plan, dtype=torch.float64, **kw):
    torch.manual_seed(0)
    layer = Routing(**{**dict(d_cov=2, d_inp=3, d_out=2, n_out=4, plan=plan), **kw}).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return layer


def with_grads(layer, a, mu, **kw):
    a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
    out = layer(a, mu, **kw)
    grads = torch.autograd.grad(
        sum((o * torch.arange(1, o.numel() + 1).view_as(o).to(o).sin()).sum() for o in out),
        [a, mu, *layer.parameters()],
        allow_unused=True,
    )
    return out, grads


plan_names = ['votes', 'moments', 'stream', 'auto']
models = [dict(p_model='skm'), dict(eps=1e-5, single_beta=True), dict(pooled=True, n_out=None)]


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('kw', models, ids=str)
def test_padding_is_absence_in_values_and_gradients(plan, kw):
    layer, given_j = make(plan, **kw), dict(n_out=4) if kw.get('n_out', 4) is None else {}
    a, mu = torch.randn(3, 6).double(), torch.randn(3, 6, 2, 3).double()
    pad_a = torch.cat([a, torch.full((3, 4), -torch.inf).double()], 1)
    pad_mu = torch.cat([mu, 1e4 * torch.randn(3, 4, 2, 3).double()], 1)
    out, g = with_grads(layer, a, mu, **given_j)
    pad_out, pad_g = with_grads(layer, pad_a, pad_mu, **given_j)
    assert not pad_g[0][:, 6:].any() and not pad_g[1][:, 6:].any()
    for p, q in zip((*out, *g), (*pad_out, pad_g[0][:, :6], pad_g[1][:, :6], *pad_g[2:])):
        assert_close(p, q)


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('eps', ['auto', 'paper'])
def test_a_sample_of_padding_is_a_sample_without_inputs(plan, eps):
    layer = make(plan, eps=eps)
    mu = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    a = torch.stack([torch.full((5,), -torch.inf), torch.zeros(5)]).double()
    out, g = with_grads(layer, a, mu)
    assert all(x.isfinite().all() for x in (*out, *g))
    nothing = layer(a[:1, :0], mu[:1, :0])
    for p, q in zip(out, nothing):
        assert_close(p[:1], q)
    assert (g[0][0] == 0).all() and (g[1][0] == 0).all()


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('scale', [1e-4, 1e4])
@pytest.mark.parametrize('eps', ['auto', 'paper'])
@pytest.mark.parametrize('case', ['one input', 'one output', 'identical', 'zeros', 'sure', 'far'])
def test_corner_cases_are_finite(plan, scale, eps, case):
    layer = make(plan, torch.float32, eps=eps, n_out=1 if case == 'one output' else 4, n_iters=5)
    n = 1 if case == 'one input' else 8
    mu = torch.randn(2, n, 2, 3) * scale
    if case == 'identical':
        mu = mu[:, :1].expand(2, n, 2, 3)
    if case == 'zeros':
        mu = 0 * mu
    if case == 'far':
        mu = mu + 100 * scale
    a = torch.full((2, n), torch.inf if case == 'sure' else 0.3)
    out, g = with_grads(layer, a, mu)
    assert all(x.isfinite().all() for x in (*out, *g))


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(plan, dtype):
    layer = make(plan, torch.float32)
    a, mu = torch.randn(2, 9), 1e4 * torch.rand(2, 9, 2, 3)
    half = make(plan, torch.float32).to(dtype)
    out = half(a.to(dtype), mu.to(dtype))
    assert out.scores.dtype == out.mu.dtype == dtype and out.sig2.dtype == torch.float32
    layer.load_state_dict(half.state_dict())  # the same rounded weights in float32
    want = layer(a.to(dtype).float(), mu.to(dtype).float())
    for p, q in zip(out, want):
        assert_close(p, q.to(p.dtype), rtol=2e-3, atol=1e-3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        auto = layer(a.to(dtype), mu.to(dtype))
    assert {x.dtype for x in auto} == {torch.float32}


wrong = [
    *((dict(n_iters=0), 'n_iters'), (dict(n_out=True), 'n_out'), (dict(n_inp=-1), 'n_inp')),
    *((dict(d_cov=2.5), 'd_cov'), (dict(p_model='em'), 'p_model'), (dict(plan='fast'), 'plan')),
    *((dict(eps=math.nan), 'eps'), (dict(init=math.nan), 'init'), (dict(init=True), 'init')),
    (dict(n_inp=3, plan='moments'), 'n_inp=None'),
]


@pytest.mark.parametrize('kw, words', wrong)
def test_wrong_arguments_are_named(kw, words):
    with pytest.raises(ValueError, match=words):
        make(**dict(plan='auto') | kw)


some, poses = torch.zeros(5), torch.zeros(5, 2, 3)
misfits = [
    (dict(), (some, torch.zeros(5, 2, 4)), r'5, 2, 4'),
    (dict(), (torch.zeros(2, 5), poses), 'shapes'),
    (dict(), (some.long(), poses), 'floating'),
    (dict(), (some / 0, poses), 'NaN'),
    (dict(), (some, poses + math.inf), 'mu_inp must be finite'),
    (dict(), (some, poses.numpy()), 'mu_inp must be a tensor, got ndarray'),
    (dict(n_inp=7), (some, poses), r'\[..., 7\]'),
    (dict(n_out=None), (some, poses), 'n_out is missing'),
    (dict(), (some, poses, 4), 'twice'),
    (dict(n_out=None), (some, poses, 0), 'n_out'),
]


@pytest.mark.parametrize('kw, given, words', misfits)
def test_wrong_inputs_and_broken_parameters_are_named(kw, given, words):
    layer = make('auto', torch.float32, **kw)
    with pytest.raises((ValueError, TypeError), match=words):
        layer(*given)
    layer.W.data[0, 0] = math.nan
    if words == 'NaN':
        with pytest.raises(ValueError, match='parameter W must be finite'):
            layer(some, poses)


@pytest.mark.parametrize('name', ['dstep', 'em'])
def test_maps_that_start_near_the_identity(name):
    made = []
    for start in ('identity', 'normal'):
        torch.manual_seed(0)
        made.append(routing_layer(name, 2, 3, 4, None, 5, start=start))
    off = made[0].W.detach() - torch.eye(3, 4)
    assert_close(off, made[1].W.detach() / 10, rtol=1e-5, atol=1e-7)  # the same noise
    assert "start='identity'" in repr(made[0])
    with pytest.raises(ValueError, match="start must be 'normal' or 'identity', got 'zero'"):
        routing_layer(name, 2, 3, 4, None, 5, start='zero')


def test_auto_takes_a_plan_that_serves_and_counts_what_an_output_costs():
    "with few parts and many outputs, moments are ten times slower than votes"
    for sizes in ((1, 1, 1, 1, 1, 1), (20, 5000, 64, 4, 4, 4), (0, 3, 3, 1, 1, 1)):
        for s in (Sizes(*sizes, True), Sizes(*sizes, False)):
            assert not plans[choose_plan(s)].refuses(s)
    assert choose_plan(Sizes(80, 8, 10_000, 1, 4, 4, True)) != 'moments'
    assert choose_plan(Sizes(20, 5000, 64, 4, 4, 4, True)) == 'moments'
