"Misfits in the pose of the part, and tests that look several times."

import math
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal
from torch.func import functional_call
from torch.testing import assert_close
from capsnb.engine.em import em_routing, free_energy
from capsnb.lab.tasks import Digits
from capsnb.lab.objects import PairMixup
from capsnb.lab.report import Ground, candidates, variants
from capsnb.routing.em import m_step
from capsnb.zoo.routers import EMRouting, _log_volume

f64 = torch.float64


def made(how='part', n_inp=24, seed=0, **own):
    torch.manual_seed(seed)
    em = EMRouting(2, 3, 3, n_inp, 4, lam=0.3, misfit=how, **own).double()
    for p in em.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return em, torch.randn(2, 24, dtype=f64), torch.randn(2, 24, 2, 3, dtype=f64)


def density_of_parts(u, em, mu, sig2):
    "log p(u_i | j) [i, j], by inverses and full covariances: no determinant of ours."
    back, inverse = em.W.new_zeros(24, 4, 6, 6), torch.linalg.inv(em.W)
    back[..., :3, :3], back[..., 3:, 3:] = inverse, inverse
    cov = back.mT @ sig2.flatten(-2).diag_embed() @ back
    at = ((mu - em.B).flatten(-2)[..., None, :] @ back)[..., 0, :]
    return MultivariateNormal(at, (cov + cov.mT) / 2).log_prob(u.flatten(-2)[:, None])


def test_misfit_of_parts_is_em_by_densities_of_their_poses():
    em, a, u = made(eps=1e-10)
    got, act, n = em(a, u, return_R=True), a.sigmoid(), 6
    for k in range(2):  # a sample at a time
        R, V = torch.full((24, 4), 0.25, dtype=f64), em.cast(u[k])
        for t in range(3):
            r = R * act[k, :, None]
            mu, sig2 = m_step(r, V)
            L = density_of_parts(u[k], em, mu, sig2)
            beta_hat = n * (em.beta_u - 0.5 - 0.5 * math.log(2 * math.pi))
            score = 0.3 * (em.beta_a - (beta_hat * r.sum(0) - (r * L).sum(0)))  # eq. 4's cost
            R = (F.logsigmoid(score) + L).softmax(-1) if t < 2 else R
        assert_close(got.R[k], R, rtol=1e-5, atol=1e-7)
        assert_close(got.scores[k], score, rtol=1e-5, atol=1e-7)


def test_absent_parts_and_gradients():
    em, a, u = made(n_inp=None)
    with torch.no_grad():  # no whole is left without data, where `TINY` would be seen
        em.W.mul_(0.5).add_(torch.eye(3))
    a[:, 2], keep = -math.inf, torch.arange(24) != 2
    for x, y in zip(em(a, u), em(a[:, keep], u[:, keep])):
        assert_close(x, y, rtol=1e-6, atol=1e-9)
    em, a, u = made()
    f = lambda a, u, W: functional_call(em, dict(W=W), (a[:1], u[:1]))[:3]
    given = [t.detach().clone().requires_grad_() for t in (a, u, em.W)]
    assert torch.autograd.gradcheck(f, given, fast_mode=True, atol=1e-6)


def test_free_energy_counts_the_gain():
    em, a, u = made()
    gain, betas = _log_volume(em.W, 2), (em.beta_a, em.beta_u)
    how = dict(lam=0.3, eps=1e-2, gain=gain, free_energy=True)
    out = em_routing(a.sigmoid(), em.cast(u), *betas, **how)
    same = free_energy(a.sigmoid(), em.cast(u), out.R, *out[:3], *betas)
    saved = (out.R * a.sigmoid()[..., None] * gain).sum((-2, -1))
    assert saved.abs().min() > 1 and not torch.allclose(out.F[:, -1], same)
    assert_close(
        em_routing(a.sigmoid(), em.cast(u), *betas, **how | dict(gain=0 * gain)).mu,
        em_routing(a.sigmoid(), em.cast(u), *betas, lam=0.3, eps=1e-2).mu,
    )
    assert_close(out.F[:, -1], same - saved)


def test_a_variant_is_its_routing_with_settings():
    stem = dict(channels=(4, 4), strides=(1, 2), padding=1)
    g = Ground(Digits('digits'), stem, dict(n_types=2, n_parts=2), dict(epochs=1))
    options = lambda who: next(iter(candidates(g, who, (0.1,), ('none',)).values()))['options']
    assert options('em-part') == options('em') | dict(settings=dict(misfit='part'))
    for who, (routing, settings) in variants.items():
        assert options(who)['routing'] == routing and options(who)['settings'] == settings
        g.task.make('routing', 0, **options(who))  # each is a network


def test_whole_pictures_are_looked_at_shifted():
    x = torch.randint(0, 256, (3, 2, 48, 48), dtype=torch.uint8)
    views, wide = PairMixup().views(x, 3), F.pad(x.float(), (3, 3, 3, 3), 'replicate') / 255
    assert len(views) == 9
    for k, (r, c) in enumerate(torch.cartesian_prod(*[torch.tensor([6, 3, 0])] * 2).tolist()):
        assert_close(views[k], wide[:, :, r : r + 48, c : c + 48])
    assert len(PairMixup().views(x, 2)) == 4
    assert_close(PairMixup().views(x)[0], views[4])
