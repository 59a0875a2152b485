"Densities of votes: they integrate to 1, their fits are best, and the Gaussian is the book's."

import math
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from capsnb.routing.dstep import routing_ref
from capsnb.routing.em import Floor
from capsnb.zoo.noise import Full, Gaussian, KMeans, Laplace, _Model, Student
from capsnb.zoo.noise import VonMisesFisher, _dstep_loop, _vmf_norm
from capsnb.zoo.routers import all_routings, routing_layer

close = torch.testing.assert_close
routings = all_routings()
no_floor, some = Floor(0.0, 1e-12, 1e-12), Floor(0.3, 1e-12, 1e-12)
densities = [Gaussian(), Student(), Laplace(), Full()]
names = ['student', 'laplace', 'full', 'vmf', 'kmeans-hard']


def votes(*lead, i=7, j=3, c=2, h=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    V = torch.randn(*lead, i, j, c, h, generator=gen, dtype=torch.float64)
    return torch.randn(*lead, i, generator=gen, dtype=torch.float64), V


def with_grads(f, *inputs):
    inputs = [t.clone().requires_grad_() for t in inputs]
    outs = f(*inputs)
    loss = sum((o * torch.linspace(1, 2, o.numel()).view_as(o).to(o)).sum() for o in outs)
    return [*outs, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize('eps', ['auto', '10%', 1e-3])
@pytest.mark.parametrize('p_model', ['gaussian', 'skm'])
def test_gaussians_by_the_dstep_are_the_books(p_model, eps):
    a, V = votes()
    a[2] = -math.inf
    use, ign = torch.rand(2, 7, 3, dtype=torch.float64)
    none, W = torch.zeros(7, 2, 1).double(), torch.zeros(7, 3, 1, 2).double()
    noise = KMeans() if p_model == 'skm' else Gaussian()
    ours = with_grads(lambda *t: _dstep_loop(t[0], t[1], noise, *t[2:], 4, eps), a, V, use, ign)
    book = lambda a, V, *betas: routing_ref(a, none, W, V, *betas, 4, p_model, eps)
    for x, y in zip(ours, with_grads(book, a, V, use, ign)):
        close(x, y, rtol=1e-10, atol=1e-12)


def test_log_densities_are_scipys():
    V = votes(i=50, j=1, c=1, h=2)[1]
    mu, sig2 = torch.tensor([[[[0.3, -0.2]]], [[[0.5, 2.0]]]]).double()
    model, x = _Model(mu, sig2, mu), V.flatten(1).numpy()
    m, s2 = mu.flatten().numpy(), sig2.flatten().numpy()
    t = scipy.stats.multivariate_t(m, np.diag(s2), df=3.5)
    close(Student(3.5).log_p(V, model)[:, 0].numpy(), t.logpdf(x))
    hyperbolic = scipy.stats.genhyperbolic(1, 0.1, 0)  # its δ is 1, ours is κ = 0.1
    z = (x - m) / np.sqrt(s2) / 0.1
    truth = (hyperbolic.logpdf(z) - math.log(0.1) - np.log(s2) / 2).sum(-1)
    close(Laplace(0.1).log_p(V, model)[:, 0].numpy(), truth)
    sharp = scipy.stats.laplace(m, np.sqrt(s2)).logpdf(x).sum(-1)
    close(Laplace(1e-5).log_p(V, model)[:, 0].numpy(), sharp, atol=1e-3, rtol=0)
    cov = np.array([[0.5, 0.6], [0.6, 2.0]])
    tilted = model._replace(scale=torch.from_numpy(np.linalg.cholesky(cov))[None])
    normal = scipy.stats.multivariate_normal(m, cov)
    close(Full().log_p(V, tilted)[:, 0].numpy(), normal.logpdf(x))


@pytest.mark.parametrize('p', [1, 2, 3, 16, 33])
def test_normaliser_on_the_sphere_is_scipys(p):
    kappa = np.array([1e-3, 0.1, 1, 3, 10, 30, 100, 1e3, 1e5])
    log_c, A = _vmf_norm(torch.from_numpy(kappa).requires_grad_(), p)
    nu, ive = p / 2 - 1, scipy.special.ive
    truth = nu * np.log(kappa) - p / 2 * math.log(2 * math.pi) - np.log(ive(nu, kappa))
    known = np.isfinite(truth) & (ive(nu, kappa) > 0)
    close(log_c.detach().numpy()[known], truth[known], rtol=1e-10, atol=1e-10)
    close(A.detach().numpy()[known], (ive(p / 2, kappa) / ive(nu, kappa))[known], rtol=1e-9, atol=0)
    at = torch.tensor([0.0, 0.3, 4.0, 70.0]).double().requires_grad_()
    log_c, A = _vmf_norm(at, p)
    close(1 - torch.autograd.grad(log_c.sum(), at)[0], A, rtol=1e-7, atol=1e-9)
    area = 2 * math.pi ** (p / 2) / math.gamma(p / 2)
    close(log_c[0].item(), -math.log(area))
    close(_vmf_norm(at.float(), p)[0].double(), log_c, rtol=1e-5, atol=1e-5)


def objective(noise, r, V, model):
    "J: weighted log-likelihood less the penalty of the floor."
    ll = (r * noise.log_p(V, model)).sum(-2) / r.sum(-2)
    if isinstance(noise, Full):
        inverse = torch.cholesky_inverse(model.scale)
        trace = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
        return ll - 0.5 * model.floor.expand(model.mu.shape)[..., 0, 0] * trace
    return ll - (model.floor / (2 * model.scale)).sum((-2, -1))


@pytest.mark.parametrize('kind', [some, Floor(0.0, 1e-2, 1e-2)], ids=['relative', 'absolute'])
@pytest.mark.parametrize('noise', densities, ids=lambda o: type(o).__name__)
def test_no_fit_is_worse_and_the_last_is_flat(noise, kind):
    _, V = votes(2, i=12)
    r = torch.rand(2, 12, 3, dtype=torch.float64)
    model, worth = noise.m_step(r, V, 0.0, kind), []
    for _ in range(1000 if isinstance(noise, Student) else 2):
        worth.append(objective(noise, r, V, model))
        model = noise.m_step(r, V, 0.0, kind, model)
    assert (torch.stack(worth).diff(dim=0) > -1e-11).all()
    if isinstance(noise, Student):
        assert (worth[-1] - worth[0]).min() > 1e-4
    mu, scale = (t.clone().requires_grad_() for t in model[:2])
    L = scale.tril() if isinstance(noise, Full) else scale
    J = objective(noise, r, V, _Model(mu, L, model.floor)).sum()
    for g in torch.autograd.grad(J, (mu, scale)):
        assert g.abs().max() < 1e-8


def test_full_and_spherical_costs_end_in_the_gaussians():
    _, V = votes(2)
    straight = torch.cat(
        [V * s.view(2, 2) for s in torch.cartesian_prod(*[torch.tensor([-1, 1])] * 4)], 1
    )
    r = torch.rand(2, 7, 3, dtype=torch.float64).repeat(1, 16, 1)  # no correlations
    full, plain = (o.m_step(r, straight, 0.0, some) for o in (Full(), Gaussian()))
    close(Full().log_p(V, full), Gaussian().log_p(V, plain))
    close(Full().nats(full), Gaussian().nats(plain))
    narrow = _Model(torch.ones(1, 2, 2).double() / 2, torch.tensor([1e5]).double(), None)
    close(VonMisesFisher().nats(narrow), -1.5 * narrow.scale.log(), rtol=1e-4, atol=0)


def layer(name, loop, i=4, j=2, **settings):
    torch.manual_seed(1)
    made = routings[name](2, 2, 2, n_inp=i, n_out=j, loop=loop, **settings).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.rand_like(p))
    a, V = votes(2, i=i, j=1)
    return made, a, V[:, :, 0]


@pytest.mark.parametrize('loop', ['dstep', 'em'])
@pytest.mark.parametrize('name', names)
def test_one_input_one_output(name, loop):
    made, a, mu = layer(name, loop, i=1)
    unit = lambda t: torch.nn.functional.normalize(t.flatten(-2), dim=-1).view_as(t)
    vote = made.cast(mu)[:, 0]
    out = made(a, mu, return_R=True)
    has = out.R[:, 0] > 0  # hard k-means gives it to one output, and by the D-step others have 0
    assert has.any(-1).all() and (has.all() or name == 'kmeans-hard')
    hand = unit(vote) if name == 'vmf' else vote
    close(out.mu[has], hand[has], rtol=1e-5, atol=1e-5)
    made, a, mu = layer(name, loop, j=1)
    out = made(a, mu, return_R=True)
    assert (out.R == 1).all() and all(o.isfinite().all() for o in out)
    close(made(a[0], mu[0]).mu, out.mu[0])


@pytest.mark.parametrize('own', [dict(name='full', eps='paper'), dict(name='bayes', cov='full')])
def test_covariances_of_far_votes_are_positive_in_float32(own):
    "six votes span no space of twenty dimensions, and the floor is a billionth of the rest"
    own = dict(own)
    torch.manual_seed(0)
    layer = routing_layer(own.pop('name'), 4, 4, 4, 6, 5, **own)
    mu = (100 * torch.randn(2, 6, 4, 4)).requires_grad_()
    scores, found, _ = layer(torch.zeros(2, 6), mu)
    scores.sum().backward()
    assert found.dtype == torch.float32 and scores.isfinite().all() and mu.grad.isfinite().all()
    want = layer.double()(torch.zeros(2, 6).double(), mu.double())
    close(scores.double(), want.scores, rtol=1e-4, atol=1e-2)
