"""Routing: against the author's module, corner cases, dtypes, errors, sweeps."""

from pathlib import Path
import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb import Routing
from capsnb.engine.dstep import Sizes, choose_plan, plans

golden = torch.load(Path(__file__).parent / 'data' / 'heinsen2019_routing.pt', weights_only=True)


def usable(layer_args):
    own = layer_args.get('n_inp')
    return [p for p in plans if not p.startswith('triton') and not (p == 'moments' and own)]


@pytest.mark.parametrize('case', golden)
def test_published_module_and_weights(case):
    g = golden[case]
    for plan in usable(g['args']):
        layer = Routing(**g['args'], eps='paper', plan=plan)
        layer.load_state_dict(g['weights'])  # its constant buffers and tied beta are dropped
        out = layer(g['a_inp'], g['mu_inp'], return_R=True, **g.get('forward', {}))
        for got, want in zip(out, g['out']):
            assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_missing_weight_is_named():
    weights = {k: v for k, v in golden['published_1']['weights'].items() if k != 'beta_use'}
    with pytest.raises(RuntimeError, match='beta_use'):
        Routing(**golden['published_1']['args']).load_state_dict(weights)


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
models = [
    dict(),
    dict(p_model='skm'),
    dict(eps=1e-5),
    dict(single_beta=True),
    dict(pooled=True),
    dict(n_out=None),
]


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('kw', models, ids=str)
def test_padding_is_absence_in_values_and_gradients(plan, kw):
    layer, given_j = make(plan, **kw), dict(n_out=4) if kw.get('n_out', 4) is None else {}
    a, mu = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, 2, 3, dtype=torch.float64)
    pad_a = torch.cat([a, torch.full((3, 4), -torch.inf, dtype=torch.float64)], 1)
    pad_mu = torch.cat([mu, 1e4 * torch.randn(3, 4, 2, 3, dtype=torch.float64)], 1)
    (out, g), (pad_out, pad_g) = (
        with_grads(layer, a, mu, **given_j),
        with_grads(layer, pad_a, pad_mu, **given_j),
    )
    for p, q in zip(out, pad_out):
        assert_close(p, q)
    assert (pad_g[0][:, 6:] == 0).all() and (pad_g[1][:, 6:] == 0).all()
    for p, q in zip(g, (pad_g[0][:, :6], pad_g[1][:, :6], *pad_g[2:])):
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
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_permuting_inputs_changes_nothing_and_outputs_permute_along(
    plan, n_inp, n_out, n_iters, seed
):
    layer = make(plan, n_out=n_out, n_iters=n_iters)
    torch.manual_seed(seed)
    a, mu, order = (
        torch.randn(n_inp).double(),
        torch.randn(n_inp, 2, 3).double(),
        torch.randperm(n_inp),
    )
    out = layer(a, mu, return_R=True)
    moved = layer(a[order], mu[order], return_R=True)
    for p, q in zip(out[:3], moved[:3]):
        assert_close(p, q)
    assert_close(out.R[order], moved.R)
    assert_close(out.R.sum(-1), torch.ones(n_inp).double())


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('n_inp', [None, 7])
def test_leading_dimensions_are_batches(plan, n_inp):
    if plan == 'moments' and n_inp:
        pytest.skip('moments need shared maps')
    layer = make(plan, n_inp=n_inp)
    a, mu = torch.randn(2, 3, 7).double(), torch.randn(2, 3, 7, 2, 3).double()
    out = layer(a, mu, return_R=True)
    for p in range(2):
        for q in range(3):
            for whole, one in zip(out, layer(a[p, q], mu[p, q], return_R=True)):
                assert_close(whole[p, q], one)
    assert layer(a[:0], mu[:0]).a.shape == (0, 3, 4)


@pytest.mark.parametrize('plan', plan_names)
@pytest.mark.parametrize('scale', [1e-4, 1.0, 1e4])
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
    assert out.a.dtype == out.mu.dtype == dtype and out.sig2.dtype == torch.float32
    layer.load_state_dict(half.state_dict())  # the same rounded weights in float32
    want = layer(a.to(dtype).float(), mu.to(dtype).float())
    for p, q in zip(out, want):
        assert_close(p, q.to(p.dtype), rtol=2e-3, atol=1e-3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        auto = layer(a.to(dtype), mu.to(dtype))
    assert {x.dtype for x in auto} == {torch.float32}


def test_mixed_precision_inputs_under_autocast_train():
    layer = make('auto', torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        h = torch.nn.Linear(3, 3)(torch.randn(2, 9, 2, 3))
        loss = layer(torch.zeros(2, 9), h).a.square().sum()
    loss.backward()
    assert layer.W.grad.dtype == torch.float32 and layer.W.grad.isfinite().all()


def test_scaling_the_votes_changes_no_routing():
    for plan in ('votes', 'moments', 'stream'):
        layer = make(plan)
        with torch.no_grad():
            layer.B.zero_()
        a, mu = torch.randn(2, 9).double(), torch.randn(2, 9, 2, 3).double()
        one, big = (layer(a, k * mu, return_R=True) for k in (1.0, 1e3))
        assert_close(one.R, big.R)
        assert_close(one.a, big.a)
        assert_close(1e3 * one.mu, big.mu)


@pytest.mark.parametrize(
    'kw, words',
    [
        (dict(n_iters=0), 'n_iters'),
        (dict(n_out=0), 'n_out'),
        (dict(n_inp=-1), 'n_inp'),
        (dict(d_cov=2.5), 'd_cov'),
        (dict(p_model='em'), 'p_model'),
        (dict(plan='triton!'), 'plan'),
        (dict(n_inp=3, plan='moments'), 'n_inp=None'),
        (dict(eps=0.0), 'eps'),
        (dict(eps=-1.0), 'eps'),
        (dict(eps=math.nan), 'eps'),
        (dict(eps=math.inf), 'eps'),
        (dict(eps='ten%'), 'eps'),
        (dict(init=math.nan), 'init'),
        (dict(init='zero'), 'init'),
        (dict(init=None), 'init'),
        (dict(init=True), 'init'),
        (dict(n_out=True), 'n_out'),
    ],
)
def test_wrong_arguments_are_named(kw, words):
    with pytest.raises(ValueError, match=words):
        Routing(**{**dict(d_cov=2, d_inp=3, d_out=2, n_out=4), **kw})


@pytest.mark.parametrize(
    'a, mu, words',
    [
        (torch.zeros(5), torch.zeros(5, 2, 4), r'5, 2, 4'),
        (torch.zeros(5), torch.zeros(6, 2, 3), r'6, 2, 3'),
        (torch.zeros(()), torch.zeros(2, 3), 'shapes'),
        (torch.zeros(2, 5), torch.zeros(5, 2, 3), 'shapes'),
        (torch.zeros(5, dtype=torch.long), torch.zeros(5, 2, 3), 'floating'),
        (torch.full((5,), math.nan), torch.zeros(5, 2, 3), 'NaN'),
        (torch.zeros(5), torch.full((5, 2, 3), math.inf), 'finite'),
    ],
)
def test_wrong_inputs_are_named(a, mu, words):
    with pytest.raises(ValueError, match=words):
        make('auto', torch.float32)(a, mu)


def test_what_is_not_a_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match='mu_inp must be a tensor, got ndarray'):
        make('auto', torch.float32)(torch.zeros(5), torch.zeros(5, 2, 3).numpy())


def test_a_broken_parameter_is_named():
    layer = make('auto', torch.float32)
    layer.W.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='parameter W must be finite'):
        layer(torch.zeros(5), torch.zeros(5, 2, 3))


def test_number_of_outputs_once_and_only_once():
    with pytest.raises(ValueError, match='missing'):
        make('auto', n_out=None)(torch.zeros(5), torch.zeros(5, 2, 3))
    with pytest.raises(ValueError, match='twice'):
        make('auto')(torch.zeros(5), torch.zeros(5, 2, 3), n_out=4)
    with pytest.raises(ValueError, match='n_out'):
        make('auto', n_out=None)(torch.zeros(5), torch.zeros(5, 2, 3), n_out=0)
    with pytest.raises(ValueError, match=r'\[..., 7\]'):
        make('auto', n_inp=7)(torch.zeros(5), torch.zeros(5, 2, 3))


def test_starts():
    paper, ours, mine = (
        Routing(2, 3, 2, n_inp=16, n_out=4, init=i) for i in ('paper', 'auto', 0.7)
    )
    assert (
        (paper.beta_use == 0).all()
        and (paper.beta_ign == 0).all()
        and (mine.beta_ign == torch.tensor(0.7)).all()
    )
    assert (ours.beta_use == 0.5).all() and (ours.beta_ign == 0).all()
    assert (Routing(2, 3, 2, init='paper').B_brk == 0).all() and (Routing(2, 3, 2).B_brk != 0).all()
    assert 'beta_ign' not in Routing(2, 3, 2, single_beta=True).state_dict()


def test_auto_takes_a_plan_that_serves():
    for shared in (True, False):
        for sizes in (
            (1, 1, 1, 1, 1, 1),
            (20, 5000, 64, 4, 4, 4),
            (1, 1000, 30000, 1, 64, 2),
            (0, 3, 3, 1, 1, 1),
        ):
            s = Sizes(*sizes, shared)
            assert not plans[choose_plan(s)].refuses(s)


@pytest.mark.parametrize('name', ['dstep', 'kmeans-soft', 'em'])
def test_maps_that_start_near_the_identity(name):
    from capsnb.zoo.routers import routing_layer

    torch.manual_seed(0)
    layer = routing_layer(name, 2, 3, 4, None, 5, start='identity')
    off = layer.W.detach() - torch.eye(3, 4)
    assert 0 < off.abs().max() < 0.2
    torch.manual_seed(0)
    usual = routing_layer(name, 2, 3, 4, None, 5)
    assert_close(off, usual.W.detach() / 10, rtol=1e-5, atol=1e-7)  # the same noise
    assert "start='identity'" in repr(layer)
    layer.reset_parameters()
    assert (layer.W.detach() - torch.eye(3, 4)).abs().max() < 0.2
    with pytest.raises(ValueError, match="start must be 'normal' or 'identity', got 'zero'"):
        routing_layer(name, 2, 3, 4, None, 5, start='zero')


def test_auto_counts_what_an_output_costs():
    "with few parts and many outputs, moments are ten times slower than votes"
    assert choose_plan(Sizes(80, 8, 10_000, 1, 4, 4, True)) != 'moments'
    assert choose_plan(Sizes(20, 5000, 64, 4, 4, 4, True)) == 'moments'
