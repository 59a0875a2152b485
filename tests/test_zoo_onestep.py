"""Routing without iterations: against NumPy in a loop, at the edges, as layers of the zoo."""

import math
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from capsnb.zoo.onestep import agree_once, score_of_sum, squash_exp
from capsnb.zoo.routers import routings

f64 = dict(dtype=torch.float64)


def slowly(V, b):
    "Mazzia 2021, eqs. 5 to 8, one number at a time; V [i, j, h], b [i, j]."
    I, J, H = V.shape
    c, s = np.zeros((I, J)), np.zeros((J, H))
    for i in range(I):
        fit = [sum(V[i, j, h] * V[k, j, h] for k in range(I) for h in range(H)) for j in range(J)]
        e = np.exp([f / math.sqrt(H) for f in fit])
        c[i] = e / e.sum() + b[i]
        for j in range(J):
            s[j] += c[i, j] * V[i, j]
    r = np.linalg.norm(s, axis=-1, keepdims=True)
    return c, s, (1 - 1 / np.exp(r)) * s / r


def test_one_step_is_the_papers():
    torch.manual_seed(0)
    V, b = torch.randn(2, 6, 4, 5, **f64) / 2, torch.randn(6, 4, **f64)
    s, R = agree_once(V, b)
    for k in range(2):
        c, sums, v = map(torch.tensor, slowly(V[k].numpy(), b.numpy()))
        assert_close(R[k], c)
        assert_close(s[k], sums)
        assert_close(squash_exp(s[k]), v)
    small = (V[:, :3, :2, :2] / 2).requires_grad_(), b[:3, :2].clone().requires_grad_()
    torch.autograd.gradcheck(agree_once, small)


def test_squash_and_score_at_the_edges():
    s = torch.tensor([0.0, 1e-5, 1e-3, 1, 15, 80, 5000])[:, None].requires_grad_()
    v, score = squash_exp(s), score_of_sum(s)
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
    s, R = agree_once(V.flatten(-2), layer.prior[:4])
    assert_close(out.mu.flatten(-2), squash_exp(s))
    assert_close(out.a.sigmoid(), out.mu.flatten(-2).norm(dim=-1))
    assert_close(out.R[:, :4], R)
    assert out.sig2 is None and layer.prior.shape == (n_inp or 1, 5)
    out.a.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_without_prior_shares_sum_to_1():
    layer = routings['agreement'](2, 3, 4, n_out=5, prior=False)
    assert 'prior' not in layer.state_dict()
    out = layer(torch.randn(7), torch.randn(7, 2, 3), return_R=True)
    assert_close(out.R.sum(-1), torch.ones(7))
