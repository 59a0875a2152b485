"What is not there has no part in anything, and what is weak counts as what it is."

import importlib.util
import pytest
import torch
from torch.testing import assert_close
from capsnb.engine.em import em_routing
from capsnb.engine.layers import ConvCaps, _alike, field_table
from capsnb.zoo.routers import routing_layer

f64 = torch.float64
no_numba = importlib.util.find_spec('numba') is None
compiled = pytest.param('compiled', marks=pytest.mark.skipif(no_numba, reason='needs numba'))
plans = ['votes', 'tiles', compiled, 'auto']


def place_by_place(layer, a, mu):
    "The definition of `compete='within'`: each field alone, of the parts that the grid has."
    fields, out = field_table(a.shape[1:3], layer.n_inp, layer.kernel, layer.stride, layer.padding)
    a, mu, W, found = a.flatten(1), mu.flatten(1, 3), layer.W.flatten(0, 2), []
    for field in fields:
        there, of = field >= 0, field[field >= 0]
        V = torch.einsum('bicd,ijdh->bijch', mu[:, of], W[there])
        if layer.bias:
            V = V + layer.B.flatten(0, 2)[there]
        how = dict(eps=layer.eps, act=layer.act, damping=layer.damping)
        found.append(em_routing(a[:, of], V, *layer.betas(V.dtype), layer.lam, **how)[:3])
    return [torch.stack(x, 1).unflatten(1, out) for x in zip(*found)]


@pytest.mark.parametrize('plan', plans)
@pytest.mark.parametrize('there', [1.0, 0.0], ids=['there', 'masked'])
@pytest.mark.parametrize(
    'grid, K, stride, padding, own',
    [
        ((4, 5), 3, 1, 1, dict(eps='auto', bias=True)),
        ((2, 3), (5, 3), (2, 1), (2, 1), dict(eps=1e-3, act='pi')),
        ((5, 5), 2, 2, 1, dict(eps='20%', damping=0.1)),
        ((4, 4), 3, 1, 0, dict(eps=1e-4)),
    ],
)
def test_places_outside_the_grid_are_no_parts(plan, there, grid, K, stride, padding, own):
    layer = ConvCaps(2, 3, K, stride, padding, plan=plan, compete='within', **own).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) / 3)
    a = (there * torch.rand(2, *grid, 2, dtype=f64)).requires_grad_()
    mu = (5 + torch.randn(2, *grid, 2, 4, 4, dtype=f64)).requires_grad_()
    given, ends = [a, mu, *layer.parameters()], []
    for run in (layer, lambda a, mu: place_by_place(layer, a, mu)):
        out = run(a, mu)[:3]
        loss = sum((x.sin() * torch.linspace(1, 2, x.numel()).view_as(x)).sum() for x in out)
        grads = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
        ends.append([*out, *grads])
    for got, want in zip(*ends):
        assert_close(got, want, rtol=1e-6, atol=1e-8)
    R = ConvCaps.forward(layer, a, mu, return_R=True).R if plan in ('votes', 'auto') else None
    if R is not None:
        inside = field_table(grid, 2, K, stride, padding)[0] >= 0
        assert_close(R.sum(-1).flatten(1, 2), inside.to(f64).expand(2, -1, -1))


def test_fields_that_are_alike_go_together():
    assert len(_alike((6, 6), (3, 3), (1, 1), (1, 1), (6, 6))) == 9  # corners, edges, the middle
    assert _alike((4, 4), (3, 3), (1, 1), (0, 0), (2, 2)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize('score', [-30.0, -80.0, -torch.inf])
@pytest.mark.parametrize('dtype', [torch.float32, f64], ids=str)
@pytest.mark.parametrize('scale', [1.0, 1e6])
@pytest.mark.parametrize('alike', [True, False])
@pytest.mark.parametrize('name', ['em', 'self', 'mean', 'full', 'dstep', 'bayes'])
def test_weak_and_absent_inputs_are_routed_as_their_votes_in_float64(
    name, score, dtype, scale, alike
):
    "an origin at 0, or a sum of weights with something added, loses what agrees far away"
    layer = routing_layer(name, 3, 4, 3, None, 4, **dict(eps=1e-4) if name == 'em' else {})
    a = torch.full((1, 20), score, dtype=dtype)
    mu = (scale * torch.randn(1, 1 if alike else 20, 3, 4, dtype=dtype)).expand(1, 20, 3, 4)
    ends = []
    for exact in (False, True):
        layer = layer.double() if exact else layer.to(dtype)
        kind = f64 if exact else dtype
        x = mu.detach().to(kind).clone().requires_grad_()
        if exact and name != 'dstep':
            out = layer.route(a.to(kind), x if name == 'self' else layer.cast(x))
        else:
            layer.plan = 'votes' if exact else 'moments' if name == 'dstep' else 'auto'
            out = layer(a.to(kind), x, return_R=True)
        (g,) = torch.autograd.grad(out.mu.sum(), x)
        R = out.R * (score > -torch.inf) if exact else out.R  # layers give what is absent none
        ends.append([out.mu / scale, R, g])
    for got, want in zip(*ends):
        close = dict(rtol=1e-3, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-6, atol=1e-7)
        assert_close(got.double(), want, **close)


def test_the_tables_of_many_sizes_are_not_all_kept():
    layer = ConvCaps(1, 1, 2, d_cov=2, d_inp=2, d_out=2)
    for n in range(2, 40):
        layer(torch.rand(1, n, n, 1), torch.randn(1, n, n, 1, 2, 2))
    assert len(layer._tables) == 16 and (39, 39, 'cpu') in layer._tables
