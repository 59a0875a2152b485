"""Routing without iterations: against NumPy in a loop, at the edges, as layers of the zoo."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from capsnb.zoo.onestep import agree_once, _dice_at, _score_of_sum, squash_exp
from capsnb.zoo.routers import routing_layer, routings

f64 = dict(dtype=torch.float64)


def test_squash_and_score_at_the_edges():
    s = torch.tensor([0.0, 1e-5, 1e-3, 1, 15, 80, 5000])[:, None].requires_grad_()
    v, score = squash_exp(s), _score_of_sum(s)
    exact = -np.expm1(-s.detach().double().numpy())
    assert_close(v.detach().double(), torch.tensor(exact), rtol=1e-6, atol=0)
    assert_close(score.sigmoid()[2:5], v[2:5, 0], rtol=1e-4, atol=0)
    assert score.isfinite().all() and (score.diff() > 0).all()  # no two lengths look alike
    for out in (v, score):
        (g,) = torch.autograd.grad(out.sum(), s, retain_graph=True)
        assert g.isfinite().all()
    assert torch.autograd.grad(v[0, 0], s)[0][0, 0] == 1  # a capsule of length 0 can leave it


@pytest.mark.parametrize('n_inp', [7, None])
def test_the_layer_hears_only_who_is_there(n_inp):
    torch.manual_seed(1)
    layer = routings['agreement'](2, 3, 4, n_inp=n_inp, n_out=5).double()
    with torch.no_grad():
        layer.prior.normal_()
    a, mu = torch.randn(3, 7, **f64), torch.randn(3, 7, 2, 3, **f64)
    a[:, 4:] = -torch.inf
    out = layer(a, mu, return_R=True)
    V = layer.cast(mu)[:, :4] * a[:, :4].sigmoid()[..., None, None, None]
    s, R = agree_once(V, layer.prior[:4])
    assert_close(out.mu.flatten(-2), squash_exp(s.flatten(-2)))
    assert_close(out.scores.sigmoid(), out.mu.flatten(-2).norm(dim=-1))
    assert_close(out.R[:, :4], R)
    assert out.sig2 is None and layer.prior.shape == (n_inp or 1, 5)
    out.scores.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_self_routing_is_the_authors():
    "coder3000/SR-CapsNet at 7622d38, `SelfRouting2d` on maps of 1x1, values and gradients."
    told = np.load(Path(__file__).parent / 'data' / 'hahn2019_selfrouting.npz')
    dice, (A, B, C, D) = np.random.RandomState(0), (6, 4, 8, 5)
    normal = lambda *shape: torch.tensor(dice.standard_normal(shape))
    W1, W2, b2 = normal(A, B * D, C), normal(A, B, C), normal(1, 1, A, B)
    layer = routings['self'](1, C, D, n_inp=A, n_out=B, bias=False).double()
    with torch.no_grad():
        layer.W.copy_(W1.view(A, B, D, C).mT)
        layer.W_route.copy_(W2[:, :, None])
        layer.b_route.copy_(b2[0, 0])
    a = torch.tensor(dice.uniform(0.01, 1, (3, A, 1, 1))).flatten(1).requires_grad_()
    mu = normal(3, A * C, 1, 1).view(3, A, 1, C).requires_grad_()
    out = layer(a.logit(), mu)
    wa, wp = normal(3, B), normal(3, B * D).view(3, B, D)
    (out.scores.sigmoid() * wa).sum().add((out.mu[..., 0, :] * wp).sum()).backward()
    mine = dict(
        a=out.scores.sigmoid(), pose=out.mu[..., 0, :], grad_a=a.grad, grad_pose=mu.grad[:, :, 0]
    )
    mine |= dict(grad_W2=layer.W_route.grad[:, :, 0], grad_b2=layer.b_route.grad)
    mine['grad_W1'] = layer.W.grad.mT.reshape(A, B * D, C)
    assert set(mine) == set(told)
    for name, got in mine.items():
        assert_close(got, torch.tensor(told[name]), rtol=1e-10, atol=1e-12)


def test_random_links_are_fixed_even_and_their_own():
    u = _dice_at(4000, 5, 3)
    assert 0 < u.min() and u.max() < 1 and u.unique().numel() > 0.999 * u.numel()
    assert_close(u[:70], _dice_at(70, 5, 3), rtol=0, atol=0)  # whatever comes after
    assert_close(u[:70, :3], _dice_at(70, 3, 3), rtol=0, atol=0)
    assert _dice_at(2, 2, 0).mul(2**31).long().tolist() == [
        [1808717312, 1739546752],
        [966587328, 108316760],
    ]
    counts = (u * 20).long().flatten().bincount(minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi square, 19 degrees: p = .001
    other = _dice_at(4000, 5, 4)
    pairs = [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, other)]
    assert max(abs(np.corrcoef(x.flatten(), y.flatten())[0, 1]) for x, y in pairs) < 0.03
    a, mu, kw = torch.randn(3, 7), torch.randn(3, 7, 2, 3), dict(n_out=5)
    hard = routings['random'](2, 3, 4, **kw)(a, mu, return_R=True).R
    soft = routings['random'](2, 3, 4, spread=True, **kw)(a, mu, return_R=True).R
    assert ((hard == 0) | (hard == 1)).all()
    assert_close(soft.sum(-1), hard.sum(-1))
    assert hard.argmax(-1).equal(soft.argmax(-1))
    moved = routings['random'](2, 3, 4, seed=1, **kw)(a, mu, return_R=True).R
    assert not hard.equal(moved)


def test_pooling_is_attention_of_torch():
    torch.manual_seed(4)
    layer = routings['attention'](2, 3, 4, n_out=5).double()
    with torch.no_grad():
        layer.query.normal_()
        layer.offset.normal_()
    a, mu = torch.randn(3, 7, **f64), torch.randn(3, 7, 2, 3, **f64)
    out, V = layer(a, mu, return_R=True), layer.cast(mu).flatten(-2).movedim(2, 1)
    query = layer.query.flatten(1)[None, :, None].expand(3, -1, -1, -1)
    mask = a.sigmoid().log()[:, None, None]
    hand = torch.nn.functional.scaled_dot_product_attention(query, V, V, attn_mask=mask)[:, :, 0]
    assert_close(out.mu.flatten(-2), hand)
    assert_close(out.scores, (hand * layer.read.flatten(1)).sum(-1) + layer.offset)
    assert_close(out.R.sum(-2), torch.ones(3, 5, **f64))
    with torch.no_grad():
        layer.query.zero_()
    even = layer(torch.zeros(3, 7, **f64), mu)
    assert_close(even.mu, layer.cast(mu).mean(1))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('kind', ['dynamic', 'uniform', 'random', 'agreement'])
@pytest.mark.parametrize('whole', [False, True], ids=['autocast', 'module'])
def test_scores_of_long_capsules_are_finite_in_half_precision(kind, dtype, whole):
    "1 - 1e-6 is 1 in half precision, and 1e-12 is 0 in float16"
    layer = routing_layer(kind, 4, 4, 4, 64, 5, start='identity')
    a, mu = 2 + torch.randn(8, 64), 1 + 0.3 * torch.randn(8, 64, 4, 4)
    mu[0] = 0  # capsules of length 0
    exact = layer(a, mu).scores.detach()
    layer, a, mu = (x.to(dtype) if whole else x for x in (layer, a, mu))
    with torch.autocast('cpu', dtype, enabled=not whole):
        found = layer(a, mu).scores
    found.float().logsumexp(-1).sum().backward()
    assert found.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())
    close = 0.1 + 0.1 * exact.abs()
    assert ((found.float() - exact).abs() < close)[exact.abs() < 5].all()
