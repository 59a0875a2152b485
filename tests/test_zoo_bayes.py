"""Variational Bayes routing: the authors' module, scikit-learn, its bound, its limits."""

import json
import math
from pathlib import Path
import numpy as np
import pytest
import torch
from scipy.stats import wishart
from sklearn.mixture import BayesianGaussianMixture
from torch.distributions import Gamma, kl_divergence
from torch.testing import assert_close
from capsnb.routing.mixture import e_step, em
from capsnb.zoo import bayes
from capsnb.engine.dstep import CapsNorm
from capsnb.zoo.bayes import (
    BayesRouting,
    as_prior,
    bound,
    covs,
    expected_log_p,
    kl_of_precisions,
    posterior,
    share,
    vb_routing,
)
from capsnb.zoo.routers import routings

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
    prior = as_prior(V.shape[-2] * V.shape[-1], **how)
    out = vb_routing(a.logit(), V, prior, *betas, n_iters, cov=cov, least=1e-11)
    assert case != 'fading' or (out.R.sum(-1) < 0.5).any()
    score, mu = out.a, out.mu
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
    prior = as_prior(3, 0.7, 0.5, 5.0, 2.0, cov)
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
        q = posterior(R, V, prior, cov)
        R = share(expected_log_p(q, V, cov))
    nu = q.nu.view(-1, *[1] * (q.inv_Psi.ndim - 1))
    assert_close(q.m.numpy(), sk.means_, rtol=1e-10, atol=1e-12)
    assert_close((q.inv_Psi / nu).numpy(), sk.covariances_, rtol=1e-10, atol=1e-12)
    assert_close(R.numpy(), sk.predict_proba(X), rtol=1e-9, atol=1e-12)


def test_a_diagonal_scale_is_a_looser_bound_of_the_full_model():
    torch.manual_seed(0)
    V, a, R = torch.randn(9, 3, 4).double(), torch.rand(9).double(), torch.rand(9, 3).double()
    R, prior = R / R.sum(-1, keepdim=True), as_prior(4, cov='full')
    full, loose = (
        bound(a, V, R, posterior(a[:, None] * R, V, prior, cov), prior, cov)
        for cov in ('full', 'published')
    )
    assert loose < full - 0.1


def test_divergences_of_precisions():
    "against PyTorch's Gamma distributions, and means over draws of SciPy's Wishart distributions"
    torch.manual_seed(0)
    r, V = torch.rand(9, 3).double(), torch.randn(9, 3, 4).double()
    prior = as_prior(4, nu0=5.5, Psi0=0.3)
    q = posterior(r, V, prior)
    after = Gamma((q.nu / 2)[:, None].expand_as(q.m), q.inv_Psi / 2)
    before = Gamma(torch.tensor(5.5 / 2).double(), torch.tensor(0.5 / 0.3).double())
    assert_close(kl_of_precisions(q, prior), kl_divergence(after, before).sum(-1))
    q = posterior(r, V, prior, 'full')
    for j, kl in enumerate(kl_of_precisions(q, prior, 'full')):
        after = wishart(q.nu[j].item(), q.inv_Psi[j].inverse().numpy())
        draws = np.moveaxis(after.rvs(2_000, random_state=0), 0, -1)
        gap = after.logpdf(draws) - wishart(5.5, 0.3 * np.eye(4)).logpdf(draws)
        assert abs(gap.mean() - kl.item()) < 4 * gap.std() / math.sqrt(2_000)


@pytest.mark.parametrize('cov', ['diag', 'full'])
def test_expected_logarithms_are_means_over_draws(cov):
    torch.manual_seed(0)
    r, V, N = torch.rand(9, 2).double(), torch.randn(9, 2, 3).double(), 40_000
    q = posterior(r, V, as_prior(3, cov=cov), cov)
    rng, want = np.random.default_rng(0), expected_log_p(q, V, cov)[0]
    log_pi = np.log(rng.dirichlet(q.alpha.numpy(), N))
    for j in range(2):
        nu, kappa = q.nu[j].item(), q.kappa[j].item()
        if cov == 'full':
            P = wishart(nu, q.inv_Psi[j].inverse().numpy()).rvs(N, random_state=0)
        else:
            P = rng.gamma(nu / 2, 2 / q.inv_Psi[j].numpy(), (N, 3))[..., None] * np.eye(3)
        noise = np.linalg.cholesky(np.linalg.inv(kappa * P)) @ rng.normal(size=(N, 3, 1))
        gap = (V[0, j] - q.m[j]).numpy() - noise[..., 0]
        log_p = np.linalg.slogdet(P)[1] - 3 * math.log(2 * math.pi)
        log_p = log_pi[:, j] + (log_p - np.einsum('nd,nde,ne->n', gap, P, gap)) / 2
        assert abs(log_p.mean() - want[j].item()) < 4 * log_p.std() / math.sqrt(N)


def test_many_votes_leave_em():
    "with a weak prior, means, variances and shares are a mixture's; the error falls as 1/n"
    torch.manual_seed(0)
    V, R = torch.randn(12, 3, 2).double(), torch.rand(12, 3).double().softmax(-1)
    prior, errors = as_prior(2, 1e-3, 1e-3, 1e-3, 1e3), []
    last = em(V, R, 3)[-1]
    for n in (1e3, 1e4):
        share_ = R
        for _ in range(3):
            q = posterior(n * share_, V, prior)
            share_ = share(expected_log_p(q, V))
        sig2 = q.inv_Psi / q.nu[:, None]
        assert_close(q.m, last.mu, rtol=0, atol=30 / n)
        assert_close(sig2, last.sig2, rtol=0, atol=30 / n)
        errors.append((share_ - last.R).abs().max().item())
    assert errors[0] < 0.05 and 8 < errors[0] / errors[1] < 12
    assert_close(e_step(V, last.pi, last.mu, last.sig2)[0], last.R)


@pytest.mark.parametrize('cov', covs)
def test_a_strong_prior_says_everything(cov):
    torch.manual_seed(0)
    V, strong = torch.randn(7, 3, 2, 2).double(), as_prior(4, 1e8, 1e8, 1e8, 1e-8, cov)
    out = vb_routing(torch.zeros(7).double(), V, strong, cov=cov)
    assert out.mu.abs().max() < 1e-6 and (out.sig2 - 1).abs().max() < 1e-6


def test_the_layer():
    torch.manual_seed(0)
    assert routings['bayes'] is BayesRouting
    layer = BayesRouting(4, 4, 4, n_inp=7, n_out=3, cov='published', least=1e-11, alpha0=2.0)
    a, mu = torch.randn(5, 7), torch.randn(5, 7, 4, 4)
    out = layer(a, mu, return_R=True)
    want = vb_routing(a, layer.cast(mu), as_prior(16, 2.0), cov='published', least=1e-11)
    for p, q in zip(out, want):
        torch.testing.assert_close(p, q)
    out.a.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert "cov='published'" in repr(layer) and 'nu0=17' in repr(layer)
    exact = layer.double()(a.double(), mu.double())
    assert_close(out.mu.double(), exact.mu, rtol=1e-4, atol=1e-5)
    assert_close(out.a.double(), exact.a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    'how, what',
    [
        (dict(cov='diagonal'), 'cov must be one of'),
        (dict(alpha0=0.0), 'alpha0 must be more than 0'),
        (dict(kappa0=-1.0), 'kappa0'),
        (dict(Psi0=math.inf), 'Psi0'),
        (dict(nu0=3, cov='full'), 'nu0 must be more than 3'),
    ],
)
def test_priors_that_cannot_be_normed(how, what):
    with pytest.raises(ValueError, match=what):
        BayesRouting(2, 2, 2, n_out=3, **how)
    assert as_prior(4, nu0=3).nu0 == 3


def test_inputs_that_do_not_fit():
    with pytest.raises(ValueError, match='must have shapes'):
        vb_routing(torch.zeros(5), torch.zeros(4, 3, 2, 2))
    with pytest.raises(ValueError, match='least'):
        bayes.share(torch.zeros(4, 3), -1.0)
