"""Variational Bayes routing: the authors' module, scikit-learn, its bound, its limits."""

import json
from pathlib import Path
import numpy as np
import pytest
import torch
from sklearn.mixture import BayesianGaussianMixture
from torch.testing import assert_close
from capsnb.routing.mixture import e_step, em
from capsnb.engine.dstep import CapsNorm
from capsnb.zoo.bayes import (
    BayesRouting,
    _as_prior,
    _expected_log_p,
    _posterior,
    _share,
    vb_routing,
)

published = np.load(Path(__file__).parent / 'data' / 'ribeiro2020_routing.npz')
cases = sorted({k.split('/')[0] for k in published})


def double(case, key):
    return torch.from_numpy(published[f'{case}/{key}'].astype(np.float64))


@pytest.mark.parametrize('case', cases)
def test_published_module(case):
    "values and gradients; classes, or fields of a convolution, each of them a routing"
    how = json.loads(str(published[f'{case}/settings']))
    norm, n_iters = how.pop('norm'), how.pop('n_iters')
    cov = how['cov'] = {'diag': 'published', 'full': 'full'}[how['cov']]
    names = 'a', 'V', 'beta_a', 'beta_u'
    inputs = [double(case, k).requires_grad_() for k in names]
    a, V, *betas = inputs
    prior = _as_prior(V.shape[-2] * V.shape[-1], **how)
    out = vb_routing(a.logit(), V, prior, *betas, n_iters, cov=cov, least=1e-11)
    assert case != 'fading' or (out.R.sum(-1) < 0.5).any()
    score, mu = out.scores, out.mu
    if norm:
        score, mu = CapsNorm(V.shape[-3], 'batch').double()(score, mu)
    act = score.sigmoid()
    assert_close(act, double(case, 'act'), rtol=1e-12, atol=1e-14)
    assert_close(mu, double(case, 'mu'), rtol=1e-12, atol=1e-14)
    loss = (act * double(case, 'w_act')).sum() + (mu * double(case, 'w_mu')).sum()
    for name, g in zip(names, torch.autograd.grad(loss, inputs)):
        assert_close(g, double(case, f'd_{name}'), rtol=1e-10, atol=1e-12)
        assert not (norm and 'beta' in name) or g.abs().max() < 1e-12  # never trained


@pytest.mark.parametrize('cov, theirs', [('full', 'full'), ('published', 'diag')])
def test_scikit_learn_has_the_same_steps(cov, theirs):
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(c, 0.5, (30, 3)) for c in (-1, 0, 2)])
    prior = _as_prior(3, 0.7, 0.5, 5.0, 2.0, cov)
    scale = np.eye(3) / prior.Psi0
    sk = BayesianGaussianMixture(
        n_components=3,
        covariance_type=theirs,
        weight_concentration_prior_type='dirichlet_distribution',
        weight_concentration_prior=prior.alpha0,
        mean_precision_prior=prior.kappa0,
        mean_prior=np.zeros(3),
        degrees_of_freedom_prior=prior.nu0,
        covariance_prior=scale if theirs == 'full' else scale.diagonal().copy(),
        reg_covar=0,
        max_iter=4,
        tol=0,
        init_params='random',
        random_state=0,
    )
    with pytest.warns(match='converge'):
        sk.fit(X)
    start = np.random.RandomState(0).uniform(size=(90, 3))
    R = torch.from_numpy(start / start.sum(1, keepdims=True))
    V = torch.from_numpy(X)[:, None].expand(-1, 3, -1)
    for _ in range(1 + 4):  # the start is an M-step too
        q = _posterior(R, V, prior, cov)
        R = _share(_expected_log_p(q, V, cov))
    nu = q.nu.view(-1, *[1] * (q.inv_Psi.ndim - 1))
    assert_close(q.m.numpy(), sk.means_, rtol=1e-10, atol=1e-12)
    assert_close((q.inv_Psi / nu).numpy(), sk.covariances_, rtol=1e-10, atol=1e-12)
    assert_close(R.numpy(), sk.predict_proba(X), rtol=1e-9, atol=1e-12)


def test_many_votes_leave_em():
    "with a weak prior, means, variances and shares are a mixture's; the error falls as 1/n"
    V, R = torch.randn(12, 3, 2).double(), torch.rand(12, 3).double().softmax(-1)
    prior, errors = _as_prior(2, 1e-3, 1e-3, 1e-3, 1e3), []
    last = em(V, R, 3)[-1]
    for n in (1e3, 1e4):
        share_ = R
        for _ in range(3):
            q = _posterior(n * share_, V, prior)
            share_ = _share(_expected_log_p(q, V))
        sig2 = q.inv_Psi / q.nu[:, None]
        assert_close(q.m, last.mu, rtol=0, atol=30 / n)
        assert_close(sig2, last.sig2, rtol=0, atol=30 / n)
        errors.append((share_ - last.R).abs().max().item())
    assert errors[0] < 0.05 and 8 < errors[0] / errors[1] < 12
    assert_close(e_step(V, last.pi, last.mu, last.sig2)[0], last.R)


def test_the_layer_is_the_function():
    layer = BayesRouting(4, 4, 4, n_inp=7, n_out=3, cov='published', least=1e-11, alpha0=2.0)
    a, mu = torch.randn(5, 7), torch.randn(5, 7, 4, 4)
    want = vb_routing(a, layer.cast(mu), _as_prior(16, 2.0), cov='published', least=1e-11)
    for p, q in zip(layer(a, mu, return_R=True), want):
        assert_close(p, q)
    assert "cov='published'" in repr(layer) and 'nu0=17' in repr(layer)
