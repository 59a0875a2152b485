"Routings that need no votes, held against themselves with all votes."

import math
import pytest
import torch
from torch.testing import assert_close
from capsnb.engine.dstep import CapsNorm, _bias_of, _brk_bias
from capsnb.routing.dstep import votes
from capsnb.zoo.routers import Router, SharedVotes, all_routings, routing_layer

each = pytest.mark.parametrize('name', sorted(all_routings()))
both = pytest.mark.parametrize('n_inp', [None, 7])
squared = ['bayes', 'em', 'full', 'kmeans-hard', 'student', 'vmf']
linear = sorted(k for k, kind in all_routings().items() if getattr(kind, 'linear', False))


def layer_of(name, **kw):
    torch.manual_seed(0)
    layer = all_routings()[name](4, 3, 5, **{'n_out': 6, **kw}).double()
    with torch.no_grad():  # what starts at 0 would hide a mistake
        for p in layer.parameters():
            p.add_(torch.randn_like(p) / 3)
    a = torch.randn(2, 3, 7).double()
    a[1, :, 4:] = -torch.inf
    return layer, a, torch.randn(2, 3, 7, 4, 3).double().requires_grad_()


def routed(layer, a, V):
    "As a layer gives it: what is absent has no shares."
    out = layer.route(a, V)
    return out._replace(R=out.R.masked_fill(a.isneginf()[..., None], 0))


@both
@pytest.mark.parametrize('bias, norm', [(False, 'none'), (True, 'batch')])
@each
def test_parameters_begin_anew(name, bias, norm, n_inp):
    "What transformers leaves as it lay in memory, and what was made on 'meta'."
    bias = bias or name == 'vectors'  # whose maps are others
    make = lambda: all_routings()[name](4, 3, 2, n_inp, 5, bias=bias, norm=norm)
    torch.manual_seed(3)
    want = make().state_dict()
    with torch.device('meta'):
        layer = make()
    layer = layer.to_empty(device='cpu')
    for v in layer.state_dict().values():
        v.fill_(9)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert want and layer.state_dict().keys() == want.keys()
    for k, v in layer.state_dict().items():
        assert_close(v, want[k].to(v))


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(
    'name, own', [*((k, {}) for k in squared + linear), ('bayes', dict(cov='full'))]
)
def test_the_same_without_votes(name, own, bias, monkeypatch):
    layer, a, mu = layer_of(name, bias=bias, **own)
    assert isinstance(layer.votes_of(mu), SharedVotes)
    found = []
    for made in (False, True):
        if made:
            monkeypatch.setattr(layer, 'votes_of', layer.cast)
        out = layer(a, mu, return_R=True)
        loss = out.scores.sin().sum() + (2 * out.mu).sin().sum()
        known = [mu, *layer.parameters()]
        found.append([*out[:2], out.R, *torch.autograd.grad(loss, known, allow_unused=True)])
    for without, with_votes in zip(*found):
        assert (without is None) == (with_votes is None)
        if without is not None:
            assert_close(without, with_votes, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('far', [1e4, 1e10])
@pytest.mark.parametrize(
    'name, own', [*((k, {}) for k in squared if k != 'em'), ('bayes', dict(cov='full'))]
)
def test_where_absent_parts_lie_does_not_matter(name, own, far):
    layer, a, mu = layer_of(name, **own)
    a, mu, there = torch.randn(2, 3, 7).double(), mu.detach(), torch.ones(7).double()
    a[..., :2], there[:2] = -torch.inf, far
    found = []
    for x in (mu, mu * there[:, None, None]):
        x = x.clone().requires_grad_()
        out = layer(a, x)
        (g,) = torch.autograd.grad(out.scores.sum() + out.mu.sin().sum(), x)
        found.append([*out[:2], g[..., 2:, :, :]])
        assert not g[..., :2, :, :].any()
    for got, want in zip(*found):
        assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('name', squared + linear)
def test_memory_does_not_hold_votes(name):
    layer = all_routings()[name](4, 4, 4, n_out=20)
    a, mu = torch.randn(2, 500), torch.randn(2, 500, 4, 4)
    votes, kept = 2 * 500 * 20 * 16 * 4, {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = layer(a, mu)
    assert out.scores.requires_grad and max(kept.values()) <= votes / (1 if name in squared else 8)


@each
def test_second_derivatives(name):
    layer, a, mu = layer_of(name)
    weight, moves = torch.randn(2, 3, 6, 4, 5).double(), torch.randn(2, *mu.shape).double()

    def along(t):
        out = layer(a, mu.detach() + torch.einsum('m,m...->...', t, moves))
        return (out.mu**3 * weight).sum()

    at = torch.tensor([0.1, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(along, at)


@pytest.mark.parametrize('kind', ['batch', 'layer'])
@each
def test_norm_is_an_option_of_every_routing(name, kind):
    "Scores and poses as `CapsNorm` behind the layer leaves them; all else as without."
    layer, a, mu = layer_of(name)
    normed = all_routings()[name](4, 3, 5, n_out=6, norm=kind).double()
    assert normed.load_state_dict(layer.state_dict(), strict=False).unexpected_keys == []
    after = CapsNorm(6, kind).double()
    for train in (True, False):  # then by the running means of the batch before
        normed.train(train), after.train(train)
        was, got = layer(a, mu, return_R=True), normed(a, mu, return_R=True)
        for g, w in zip(got[:2], after(was.scores, was.mu)):
            assert_close(g, w)
        assert (got.sig2 is None) == (was.sig2 is None)
        assert_close(got.R, was.R)
        if was.sig2 is not None:
            assert_close(got.sig2, was.sig2)
    assert not torch.allclose(got.scores, was.scores) and normed.normed.kind == kind
    kept = normed.state_dict()
    assert any('running_var' in k for k in kept) == (kind == 'batch')
    again = all_routings()[name](4, 3, 5, n_out=6, norm=kind).double().eval()
    again.load_state_dict(kept)
    assert_close(again(a, mu).scores, got.scores)


def test_a_frozen_norm_stays_frozen_and_one_sample_has_no_variance():
    layer, a, mu = layer_of('em', norm='batch')
    layer(a, mu)
    layer.normed.eval()  # its parent trains
    before = layer.normed.of_a.running_mean.clone()
    layer(a, mu)
    assert layer.normed.of_a.running_mean.equal(before) and not layer.normed.training
    layer.train()
    one = layer(a[0, :1], mu[0, :1])
    assert_close(one.scores, layer.eval()(a[0, :1], mu[0, :1]).scores)
    assert layer.normed.of_a.running_mean.equal(before)


@both
@pytest.mark.parametrize('name', ['em', 'student', 'vectors', 'dynamic', 'bayes'])
def test_the_number_of_iterations_can_be_changed(name, n_inp):
    layer, a, mu = layer_of(name, n_inp=n_inp)
    once = type(layer)(4, 3, 5, n_inp, 6, n_iters=1).double()
    once.load_state_dict(layer.state_dict())
    layer.n_iters = 1
    assert_close(layer(a, mu).scores, once(a, mu).scores)


@pytest.mark.parametrize('n_inp', [None, 300])
def test_agreement_of_long_votes_in_half_precision(n_inp):
    "squares of sums overflow float16 from a length of 256 on"
    layer = routing_layer('agreement', 4, 4, 4, n_inp, 5)
    a, mu = torch.zeros(2, 300), 5 * torch.randn(2, 300, 4, 4) + 5
    want = layer(a, mu)
    got = layer.half()(a.half(), mu.half())
    assert got.mu.dtype == torch.float16
    long = lambda out: out.mu.float().flatten(-2).norm(dim=-1)
    assert_close(long(got), long(want), atol=2e-3, rtol=0)
    assert_close(got.scores.float(), want.scores, rtol=2e-2, atol=0)


@each
def test_a_layer_casts_its_votes_and_routes_them(name):
    "`route` of votes, or of what a routing wants instead, is what the layer does with its inputs."
    layer, a, mu = layer_of(name, n_iters=2)
    heinsen = name in ('dstep', 'kmeans-soft')
    seen = votes(mu, layer.W, _bias_of(layer)) if heinsen else layer.seen(mu)
    for got, want in zip(layer(a, mu, return_R=True), routed(layer, a, seen)):
        assert got is want is None or assert_close(got, want, rtol=1e-8, atol=1e-9) is None
    assert layer.route(a, seen).R.shape == (2, 3, 7, 6)
    none = layer.float()(torch.zeros(2, 0), torch.zeros(2, 0, 4, 3))  # no parts are no error
    assert none.scores.shape == (2, 6) and none.scores.isfinite().all() and none.mu.isfinite().all()


@pytest.mark.parametrize(
    'kw', [dict(single_beta=True), dict(n_out=None), dict(n_inp=7, pooled=True, eps=0.1)], ids=str
)
def test_heinsens_loop_takes_votes_as_the_layer_takes_capsules(kw):
    layer, a, mu = layer_of('dstep', **kw)
    n = [9] if layer.n_out is None else []
    B = _brk_bias(_bias_of(layer), layer.B_brk, 9) if n else _bias_of(layer)
    V = votes(mu, layer.W, B)
    for got, want in zip(routed(layer, a, V), layer(a, mu, *n, return_R=True)):
        assert_close(got, want, rtol=1e-8, atol=1e-9)
    with torch.autocast('cpu', torch.bfloat16):  # which would round sums
        as_usual = layer.float().route(a.float(), V.float())
    assert_close(as_usual.mu.double(), layer.double().route(a, V).mu, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r'votes \[..., (i|7), (j|6), 4, 5\], got \(2, 3, 7\) and'):
        layer.route(a, V[..., :4])


@pytest.mark.parametrize('how', [dict(lam=0.3, n_iters=1), dict(lam=[0.1, 0.5]), dict(eps=1e-3)])
def test_em_without_votes_and_with_other_settings(how):
    layer, a, mu = layer_of('em', **dict(n_iters=2) | how)
    for _ in range(2):
        found, want = layer(a, mu, return_R=True), layer.route(a, layer.cast(mu))
        assert_close(tuple(found), tuple(want), rtol=1e-9, atol=1e-10)
        a[0] = -torch.inf  # nobody is there
    narrow = layer.float()(a.float(), mu.float(), return_R=True)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in narrow)


def test_votes_are_made_where_moments_are_more():
    mu, make = torch.randn(2, 7, 1, 64), all_routings()
    for name, d, how in (('em', 64, {}), ('em', 8, dict(misfit='part')), ('full', 64, {})):
        assert torch.is_tensor(make[name](1, d, 8, n_out=5, **how).votes_of(mu[..., :d]))


@both
@pytest.mark.parametrize('name', sorted(set(all_routings()) - {'vectors'}))
def test_without_a_bias_votes_are_maps_alone(name, n_inp):
    one, none = (routing_layer(name, 2, 3, 3, n_inp, 5, bias=b).double() for b in (True, False))
    weights = one.state_dict()
    assert weights.pop('B').abs().max() == 0
    none.load_state_dict(weights)
    given = torch.randn(2, 7).double(), torch.randn(2, 7, 2, 3).double()
    want = one(*given).mu
    assert none.B is None and torch.equal(none(*given).mu, want)
    with torch.no_grad():
        one.B.copy_(torch.randn(one.B.shape))
    assert not torch.allclose(one(*given).mu, want)
    with torch.device('meta'):
        read = routing_layer(name, 2, 3, 3, n_inp, 5, bias=False).double()
    read.to_empty(device='cpu').load_state_dict(weights)  # as transformers reads a network
    assert torch.equal(read(*given).mu, want) and 'bias=False' in repr(read)


@both
@each
def test_what_is_no_number_is_refused_and_dtypes_go_in_and_come_out_alike(name, n_inp):
    layer = routing_layer(name, 4, 3, 5, n_inp, 6)
    a, mu, one = torch.randn(2, 7), torch.randn(2, 7, 4, 3), torch.arange(7) == 2
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match='mu_inp must be finite'):
            layer(a, torch.where(one[:, None, None], bad, mu))
    with pytest.raises(ValueError, match='a_inp must not contain NaN'):
        layer(torch.where(one, math.nan, a), mu)
    certain = layer(torch.where(one, math.inf, a), mu)
    assert all(t.isfinite().all() for t in certain if t is not None)
    half = layer(a.half(), mu.half())
    assert half.scores.dtype == half.mu.dtype == torch.float16
    want = layer(a.half().float(), mu.half().float())
    assert_close(half.scores.float(), want.scores, rtol=2e-3, atol=2e-3)
    with torch.autocast('cpu', torch.bfloat16):
        found = layer(a.bfloat16(), mu.bfloat16())
    assert found.scores.dtype == found.mu.dtype == torch.float32 and found.scores.isfinite().all()
    if isinstance(layer, Router):  # the D-step and soft k-means compute in float64
        with pytest.raises(ValueError, match='the layer computes in torch.float32, got'):
            layer(a.double(), mu.double())


@pytest.mark.parametrize(
    'name, own, told',
    [
        ('em', dict(n_inp=0), 'n_inp must be an integer >= 1, got 0'),
        ('student', dict(nu=math.inf), 'nu must be positive and finite'),
        ('student', dict(steps=0), 'steps must be an integer >= 1'),
        ('student', dict(lam=0.3), "lam=0.3 is a setting of loop='em', the loop is 'dstep'"),
        ('laplace', dict(tip=math.inf), 'tip must be positive and finite'),
        ('full', dict(loop='vb'), "loop must be 'dstep' or 'em'"),
        ('bayes', dict(least=-1), 'least must be a density'),
        ('bayes', dict(cov='full', nu0=19), 'nu0 must be more than 19'),
        ('dynamic', dict(norm='l2'), "norm must be one of 'none', 'batch', 'layer', got 'l2'"),
        ('dstep', dict(norm='batch', n_out=None), 'needs n_out'),
        ('vectors', dict(bias=False), 'own maps'),
    ],
)
def test_layers_that_cannot_be_are_refused_at_once(name, own, told):
    with pytest.raises(ValueError, match=told):
        routing_layer(name, 4, 3, 5, **dict(n_inp=7, n_out=6) | own)
