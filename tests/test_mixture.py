"Sweeps and property tests of the mixture of Gaussians: nbs/engine/12_mixture and the book's."

import math
import warnings
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from capsnb.engine.mixture import (
    GaussianMixture,
    Params,
    covariances,
    data_moments,
    em,
    em_sweep,
    features,
    from_moments,
    kmeans_pp,
    n_features,
    natural,
    start_params,
)
from capsnb.routing import mixture as book

f32, f64 = torch.float32, torch.float64
devices = ['cpu'] + (['cuda'] if torch.cuda.is_available() else [])
few = settings(max_examples=40, deadline=None, derandomize=True)


def points(seed, N, D, J=3, spread=3.0, dtype=f64, device='cpu'):
    g = torch.Generator().manual_seed(seed)
    mu = spread * torch.randn(J, D, generator=g, dtype=f64)
    x = mu[torch.randint(J, (N,), generator=g)] + torch.randn(N, D, generator=g, dtype=f64)
    return x.to(device, dtype)


def start(x, J, cov, seed=0, least=1e-3):
    g = torch.Generator(x.device).manual_seed(seed)
    return Params(*(q[0] for q in start_params(x[None], J, cov, generator=g, least=least)))


def as_full(p, cov):
    "The same mixture with covariance matrices."
    eye = torch.eye(p.mu.shape[-1], dtype=p.mu.dtype)
    sig2 = {
        'full': lambda s: s,
        'diag': torch.diag_embed,
        'spherical': lambda s: s[..., None, None] * eye,
    }[cov](p.sig2)
    return torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(p.pi), torch.distributions.MultivariateNormal(p.mu, sig2)
    )


# ---- the two products ----


@pytest.mark.parametrize('cov', covariances)
@pytest.mark.parametrize('D', [1, 2, 5, 16])
@pytest.mark.parametrize('device', devices)
def test_products_are_the_density(cov, D, device):
    x = points(0, 200, D, device=device)
    p = start(x, 4, cov)
    assert features(x, cov).shape == (200, n_features(D, cov))
    assert_close(
        (features(x, cov) @ natural(p, cov)).logsumexp(-1),
        as_full(Params(*(q.cpu() for q in p)), cov).log_prob(x.cpu()).to(device),
    )


@pytest.mark.parametrize('cov', covariances)
def test_features_and_natural_are_differentiable(cov):
    x, p = points(0, 6, 3), start(points(0, 50, 3), 2, cov)
    inputs = [q.clone().requires_grad_() for q in (x, *p)]
    if cov == 'full':  # perturb along symmetric directions only
        half = torch.linalg.cholesky(p.sig2).requires_grad_()
        inputs[-1] = half
    f = lambda x, pi, mu, s: (
        features(x, cov) @ natural(Params(pi, mu, s @ s.mT if cov == 'full' else s), cov)
    )
    assert torch.autograd.gradcheck(f, inputs)


@few
@given(
    st.integers(1, 300),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(covariances),
    st.booleans(),
    st.sampled_from([1, 500, 10**6]),
)
def test_sweep_is_independent_of_the_tile(N, D, J, b, cov, weighted, tile):
    g = torch.Generator().manual_seed(N)
    x, w = (
        torch.randn(b, N, D, generator=g, dtype=f64),
        torch.rand(b, N, generator=g, dtype=f64) if weighted else None,
    )
    p = Params(
        torch.rand(b, J, generator=g, dtype=f64).softmax(-1),
        torch.randn(b, J, D, generator=g, dtype=f64),
        {
            'diag': torch.ones(b, J, D, dtype=f64),
            'spherical': torch.ones(b, J, dtype=f64),
            'full': torch.eye(D, dtype=f64).expand(b, J, D, D),
        }[cov],
    )
    S, ll = em_sweep(x, natural(p, cov), cov, w, tile=tile)
    R, log_p = book.e_step(x[..., None, :], p.pi, p.mu, torch.ones(b, J, D, dtype=f64))
    one = torch.ones(b, N, dtype=f64) if w is None else w
    assert_close(S, features(x, cov).mT @ (R * one[..., None]))
    assert_close(ll, (one * log_p).sum(-1))


class Largest(TorchDispatchMode):
    "Bytes of the largest storage created while active."

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, inputs = func(*args, **(kwargs or {})), (*args, *(kwargs or {}).values())
        given = {a.untyped_storage().data_ptr() for a in inputs if isinstance(a, torch.Tensor)}
        for o in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, o.untyped_storage().nbytes())
        return out


def test_memory_does_not_depend_on_the_number_of_points():
    "from an explicit start"
    largest = set()
    for N in (5_000, 20_000, 80_000):
        x = points(0, N, 8, 64)
        with Largest() as seen:
            GaussianMixture(64, start=start(x[:500], 64, 'diag'), max_iter=2, tile=2**14).fit(x)
        largest.add(seen.size)
    assert len(largest) == 1 and largest.pop() <= 2**14 * 8


# ---- the book's four functions ----


@few
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_the_bound_of_the_book_never_falls(seed, J, D, own_views):
    "on points, and on votes that differ by Gaussian"
    g = torch.Generator().manual_seed(seed)
    V = torch.randn(40, J if own_views else 1, D, generator=g, dtype=f64)
    R = torch.rand(40, J, generator=g, dtype=f64).softmax(-1)
    last = -math.inf
    for step in book.em(V, R, 10, least=1e-3):
        for shares in (R, step.R):
            now = book.bound(V, shares, *step[:3]).item()
            assert now >= last - 1e-9
            last = now
        assert_close(step.log_p.sum().item(), now)
        R = step.R


# ---- likelihood never falls ----


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_likelihood_never_falls_on_any_data(data):
    "Exact M-steps under a clamped variance: also for equal or collinear points, empty components."
    D, J, cov = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from(covariances)),
    )
    coordinate = st.one_of(st.integers(-3, 3).map(float), st.floats(-10, 10, allow_nan=False))
    rows = data.draw(
        st.lists(st.lists(coordinate, min_size=D, max_size=D), min_size=J, max_size=25)
    )
    w = data.draw(
        st.one_of(st.none(), st.lists(st.floats(0.01, 5), min_size=len(rows), max_size=len(rows)))
    )
    x = torch.tensor(rows, dtype=f64)
    gm = GaussianMixture(
        J, cov, max_iter=15, tol=0, reg_covar=0, min_var=1e-3, seed=data.draw(st.integers(0, 99))
    )
    gm.fit(x, None if w is None else torch.tensor(w, dtype=f64))
    assert (gm.history.diff() >= -1e-8).all(), gm.history
    least = gm.sig2 if cov != 'full' else torch.linalg.eigvalsh(gm.sig2)
    assert (least >= 1e-3 * (1 - 1e-6)).all()


def worst_fall(x, J, cov, least, seed):
    "Greatest fall of the log-likelihood per point in a fit, and the rounding of the number itself."
    gm = GaussianMixture(J, cov, max_iter=25, tol=0, reg_covar=0, min_var=least, seed=seed)
    h = gm.fit(x).history
    rounding = 4 * torch.finfo(x.dtype).eps * h.abs().max().clamp(min=1).item()
    return -h.diff().min().item(), rounding


def noise(x):
    "eps*r**2, with r the greatest distance of a point from the mean."
    return (torch.finfo(x.dtype).eps * (x - x.mean(0)).square().sum(-1).max()).item()


@pytest.mark.parametrize('dtype', [f32, f64], ids=str)
@pytest.mark.parametrize('cov', covariances)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_likelihood_falls_by_no_more_than_rounding(cov, dtype, data):
    "By eps*r**2/min_var a point at most, if that is 1/16 or less: equal points collapse often."
    D, J = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    fine = st.integers(-3000, 3000).map(lambda i: i / 1000)
    number = data.draw(st.sampled_from([st.integers(0, 3), st.integers(-1, 1), fine]))
    row = st.lists(number, min_size=D, max_size=D)
    rows = data.draw(st.lists(row, min_size=4, max_size=25).filter(lambda r: r != r[:1] * len(r)))
    x = torch.tensor(rows, dtype=dtype) * data.draw(st.sampled_from([1e-2, 1.0, 100.0]))
    x = x + data.draw(st.sampled_from([0.0, 1.0, 10.0])) * x.max()
    seed = data.draw(st.integers(0, 99))
    for share in (1 / 16, 1 / 256, 1e-4, 1e-6):
        fall, rounding = worst_fall(x, J, cov, noise(x) / share, seed)
        assert fall <= share + rounding, (share, fall)


# ---- what must change nothing, and what must change as foreseen ----


def fits_equal(a, b, tol=1e-7):
    for p, q in zip(a.params, b.params):
        assert_close(p, q, rtol=tol, atol=tol)
    assert_close(a.lower_bound, b.lower_bound, rtol=tol, atol=tol)


@few
@given(
    st.integers(0, 10**6),
    st.sampled_from(covariances),
    st.lists(st.integers(0, 3), min_size=60, max_size=60),
)
def test_integer_weights_are_repetitions(seed, cov, w):
    x, w = points(seed, 60, 2), torch.tensor(w)
    w[:5] = 2
    p, kw = start(x, 3, cov), dict(max_iter=10, tol=0)
    rep = x.repeat_interleave(w, 0)
    fits_equal(
        GaussianMixture(3, cov, start=p, **kw).fit(x, w),
        GaussianMixture(3, cov, start=p, **kw).fit(rep),
    )
    fits_equal(
        GaussianMixture(3, cov, start=p, **kw).fit(x, w),
        GaussianMixture(3, cov, start=p, **kw).fit(x, 1e-6 * w.double()),
    )
    # also from k-means++: the same draws pick the same points
    one, two = (torch.Generator().manual_seed(seed) for _ in range(2))
    assert_close(
        kmeans_pp(x[None], 3, w[None].double(), one)[0], kmeans_pp(rep[None], 3, None, two)[0]
    )


@few
@given(st.integers(0, 10**6), st.sampled_from(covariances))
def test_order_of_points_and_components_is_nothing(seed, cov):
    x = points(seed, 80, 3)
    p = start(x, 3, cov)
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randperm(80, generator=g), torch.randperm(3, generator=g)
    a = GaussianMixture(3, cov, start=p, max_iter=8, tol=0).fit(x)
    fits_equal(a, GaussianMixture(3, cov, start=p, max_iter=8, tol=0).fit(x[i]))
    b = GaussianMixture(3, cov, start=[q[j] for q in p], max_iter=8, tol=0).fit(x)
    for q, r in zip(a.params, b.params):
        assert_close(q[j], r, rtol=1e-7, atol=1e-7)


@few
@given(
    st.integers(0, 10**6),
    st.sampled_from(covariances),
    st.sampled_from([1e-2, 1.0, 1e2]),
    st.sampled_from([0.0, -50.0, 1e4]),
)
def test_moving_and_scaling_the_data_moves_and_scales_the_fit(seed, cov, scale, shift):
    x = points(seed, 80, 2)
    p = start(x, 3, cov)
    q = Params(p.pi, p.mu * scale + shift, p.sig2 * scale**2)
    kw = dict(max_iter=8, tol=0, reg_covar=0, min_var=0)
    a, b = (
        GaussianMixture(3, cov, start=p, **kw).fit(x),
        GaussianMixture(3, cov, start=q, **kw).fit(x * scale + shift),
    )
    assert_close(b.pi, a.pi, rtol=1e-5, atol=1e-6)
    assert_close(b.sig2, a.sig2 * scale**2, rtol=1e-4, atol=1e-5 * scale**2)
    assert_close(b.mu, a.mu * scale + shift, rtol=1e-6, atol=1e-5 * scale)
    assert_close(b.lower_bound, a.lower_bound - 2 * math.log(scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('cov', covariances)
@pytest.mark.parametrize('lead', [(), (1,), (3,), (2, 3)])
def test_leading_dimensions(cov, lead):
    n = math.prod(lead)
    x = torch.stack([points(s, 50, 2) for s in range(n)]).reshape(*lead, 50, 2)
    gm = GaussianMixture(3, cov, n_init=3, seed=0).fit(x)
    assert gm.pi.shape == lead + (3,) and gm.mu.shape == lead + (3, 2)
    assert gm.sig2.shape == lead + {'diag': (3, 2), 'spherical': (3,), 'full': (3, 2, 2)}[cov]
    assert (
        gm.lower_bound.shape
        == gm.n_iter.shape
        == gm.converged.shape
        == gm.history.shape[:-1]
        == lead
    )
    assert gm.predict_proba(x).shape == lead + (50, 3) and gm.score_samples(x).shape == gm.predict(
        x
    ).shape == lead + (50,)
    assert_close(gm.predict_proba(x).sum(-1), torch.ones(lead + (50,), dtype=f64))
    new, j = gm.sample(7)
    assert new.shape == lead + (7, 2) and j.shape == lead + (7,)
    one = GaussianMixture(3, cov, seed=0).fit(points(9, 50, 2))  # one mixture, many data sets
    assert_close(one.score_samples(x), as_full(one.params, cov).log_prob(x))


@few
@given(st.integers(0, 10**6), st.sampled_from(covariances), st.integers(2, 5))
def test_a_batch_is_its_members(seed, cov, b):
    x = torch.stack([points(seed + s, 60, 2, spread=1 + s) for s in range(b)])
    ps = [start(q, 3, cov) for q in x]
    batch = GaussianMixture(3, cov, start=[torch.stack(q) for q in zip(*ps)], tol=1e-4).fit(x)
    for k in range(b):
        alone = GaussianMixture(3, cov, start=ps[k], tol=1e-4).fit(x[k])
        assert alone.n_iter == batch.n_iter[k] and alone.converged == batch.converged[k]
        for q, r in zip(alone.params, batch.params):
            assert_close(q, r[k], rtol=1e-7, atol=1e-7)


def test_restarts_keep_the_best_of_each_data_set():
    x = torch.stack([points(s, 100, 2, J=6) for s in range(5)])
    g = torch.Generator().manual_seed(3)
    bounds = torch.stack(
        [em(x, start_params(x, 6, generator=g, least=1e-6)).lower_bound for _ in range(6)]
    )
    many = GaussianMixture(6, n_init=6, seed=3).fit(x)
    assert_close(many.lower_bound, bounds.max(0).values)
    assert bounds.argmax(0).unique().numel() > 1  # no single start was the best for all
    last = many.history.gather(-1, (many.n_iter - 1)[:, None])[:, 0]
    assert last.equal(many.lower_bound)
    again = GaussianMixture(6, n_init=6, seed=3).fit(x)
    assert again.mu.equal(many.mu)  # a seed repeats the fit


# ---- the same answers as scikit-learn ----


@pytest.mark.parametrize('cov', covariances)
@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('D,J', [(1, 2), (3, 5), (8, 4)])
def test_sklearn(cov, seed, D, J):
    sk = pytest.importorskip('sklearn.mixture')
    x = points(seed, 400, D, J) + 20 * seed
    p = start(x, J, cov, seed)
    precision = torch.linalg.inv(p.sig2) if cov == 'full' else 1 / p.sig2
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ref = sk.GaussianMixture(
            J,
            covariance_type=cov,
            weights_init=p.pi.numpy(),
            means_init=p.mu.numpy(),
            precisions_init=precision.numpy(),
            max_iter=60,
            tol=1e-6,
        ).fit(x.numpy())
    gm = GaussianMixture(J, cov, start=p, max_iter=60, tol=1e-6).fit(x)
    assert gm.n_iter == ref.n_iter_ and bool(gm.converged) == ref.converged_
    for a, b in (
        (gm.pi, ref.weights_),
        (gm.mu, ref.means_),
        (gm.sig2, ref.covariances_),
        (gm.lower_bound, ref.lower_bound_),
        (gm.predict_proba(x), ref.predict_proba(x.numpy())),
        (gm.score_samples(x), ref.score_samples(x.numpy())),
    ):
        assert_close(a, torch.as_tensor(b, dtype=f64), rtol=0, atol=1e-6)


# ---- numbers that are hard ----


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_degenerate_data_stay_finite(data):
    dtype, cov, J = (
        data.draw(st.sampled_from([f32, f64])),
        data.draw(st.sampled_from(covariances)),
        data.draw(st.integers(1, 4)),
    )
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e3, 1e4]))
    D = data.draw(st.integers(1, 4))
    rows = data.draw(
        st.lists(st.lists(st.integers(-2, 2), min_size=D, max_size=D), min_size=J, max_size=12)
    )
    x = torch.tensor(rows, dtype=dtype) * scale + data.draw(st.sampled_from([0.0, 1.0, 1e4]))
    gm = GaussianMixture(J, cov, max_iter=20, tol=0, seed=0).fit(x)
    assert all(
        q.isfinite().all()
        for q in (*gm.params, gm.history, gm.predict_proba(x), gm.score_samples(x))
    )
    assert_close(gm.pi.sum(), torch.ones((), dtype=dtype))


def test_an_emptied_component_keeps_its_parameters():
    x = points(0, 100, 2)
    p = Params(torch.tensor([0.5, 0.5]), torch.tensor([[0.0, 0], [1e4, 1e4]]), torch.ones(2, 2))
    for cov in covariances:
        s = {'diag': p.sig2, 'spherical': p.sig2[:, 0], 'full': p.sig2.diag_embed()}[cov]
        gm = GaussianMixture(2, cov, start=p._replace(sig2=s)).fit(x)
        assert_close(gm.mu[1], torch.full((2,), 1e4, dtype=f64))
        assert_close(gm.sig2[1], s[1].double())
        assert gm.pi[1] < 1e-12 and (gm.history.diff() >= -1e-12).all()
        one = GaussianMixture(1, cov, seed=0).fit(x)
        assert_close(gm.mu[0], one.mu[0])
        assert_close(gm.sig2[0], one.sig2[0])


@pytest.mark.parametrize('cov', covariances)
def test_one_component_is_the_sample(cov):
    x = points(0, 70, 3)
    gm = GaussianMixture(1, cov, reg_covar=0).fit(x)
    C = x.T.cov(correction=0)
    assert_close(gm.mu[0], x.mean(0))
    assert gm.pi.item() == 1
    assert_close(
        gm.sig2[0], {'full': C, 'diag': C.diagonal(), 'spherical': C.diagonal().mean()}[cov]
    )


@pytest.mark.parametrize('cov', covariances)
def test_samples_have_the_moments(cov):
    x = points(0, 500, 2)
    gm = GaussianMixture(3, cov, seed=0).fit(x)
    new, j = gm.sample(200_000, torch.Generator().manual_seed(0))
    assert_close(new.mean(0), x.mean(0), atol=0.05, rtol=0)
    assert_close(torch.bincount(j, minlength=3) / 200_000, gm.pi.float(), atol=0.01, rtol=0)
    k = gm.pi.argmax()
    C = {
        'full': lambda s: s,
        'diag': torch.diag,
        'spherical': lambda s: s * torch.eye(2, dtype=f64),
    }[cov](gm.sig2[k])
    assert_close(new[j == k].T.cov(), C, atol=0.05, rtol=0.05)


# ---- manners ----


def test_no_graph_no_autocast_no_change_to_the_input():
    x = points(0, 60, 2, dtype=f32).requires_grad_()
    before = x.detach().clone()
    w = torch.rand(60)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        a = GaussianMixture(3, 'full', seed=0).fit(x, w)
    b = GaussianMixture(3, 'full', seed=0).fit(before, w)
    assert a.mu.equal(b.mu) and not a.mu.requires_grad and x.detach().equal(before)


half = torch.tensor([0.5, 0.5])
wrong = {
    'n_components must be an integer of at least 1, got 0': lambda x: GaussianMixture(0),
    'n_components must be an integer of at least 1, got 2.5': lambda x: GaussianMixture(2.5),
    'n_components must be an integer of at least 1, got True': lambda x: GaussianMixture(True),
    'tol must be a finite number of at least 0, got nan': lambda x: GaussianMixture(
        2, tol=math.nan
    ),
    "tol must be a finite number of at least 0, got 'small'": lambda x: GaussianMixture(
        2, tol='small'
    ),
    'tile must be an integer': lambda x: GaussianMixture(2, tile=-1),
    "covariance must be one of .* got 'tied'": lambda x: GaussianMixture(2, 'tied'),
    'n_init must be 1': lambda x: GaussianMixture(2, start=(1, 2, 3), n_init=2),
    r"start must be \(pi, mu, sig2\), got 'abc'": lambda x: GaussianMixture(2, start='abc').fit(x),
    'start: mu must be numbers that fit .2, 2., got': lambda x: fit(x, half, 'a', x[:2] ** 2),
    'sum to 1, got sums .1.1': lambda x: fit(x, half + 0.05, x[:2], x[:2] ** 2),
    'sig2 must be positive$': lambda x: fit(x, half, x[:2], -(x[:2] ** 2)),
    'positive definite': lambda x: fit(x, half, x[:2], torch.ones(2, 2, 2), 'full'),
    'mu must be finite, got NaN or inf': lambda x: fit(x, half, x[:2] * math.nan, x[:2] ** 2),
    r'mu must be numbers that fit \(2, 2\), got \(2, 3\)': lambda x: fit(
        x, half, torch.ones(2, 3), x[:2]
    ),
    "tensor of PyTorch, got <class 'numpy.ndarray'>": lambda x: GaussianMixture(2).fit(x.numpy()),
    'got a tensor of torch.float16': lambda x: GaussianMixture(2).fit(x.half()),
    'not be empty, got': lambda x: GaussianMixture(2).fit(x[:0]),
    r'N >= 2 and not be empty, got \(1, 2\)': lambda x: GaussianMixture(2).fit(x[:1]),
    'x must be finite': lambda x: GaussianMixture(2).fit(torch.where(x > 0, math.inf, x)),
    'squares of its range': lambda x: GaussianMixture(1).fit(1e200 * x),
    'a column of x is constant': lambda x: GaussianMixture(1, reg_covar=0).fit(0 * x),
    'positive sample_weight, got 1': lambda x: GaussianMixture(2).fit(x, torch.eye(20)[0]),
    'sample_weight must be finite': lambda x: GaussianMixture(2).fit(
        x, torch.full((20,), math.nan)
    ),
    'sample_weight must be numbers that fit': lambda x: GaussianMixture(2).fit(
        x, torch.ones(3, 20)
    ),
    'must not be negative, got -1': lambda x: GaussianMixture(1).fit(x, -torch.ones(20)),
    'not fitted': lambda x: GaussianMixture(2).sample(3),
    'not fitted yet': lambda x: GaussianMixture(2).score_samples(x),
    'must have 2 columns': lambda x: GaussianMixture(2).fit(x).predict(x[:, :1]),
    '2 columns of torch.float64': lambda x: GaussianMixture(2).fit(x).predict(x.float()),
    'leading dimensions': lambda x: (
        GaussianMixture(2).fit(x.expand(3, 20, 2)).predict(x.expand(2, 20, 2))
    ),
}


def fit(x, *start, cov='diag'):
    *start, cov = start if isinstance(start[-1], str) else (*start, cov)
    return GaussianMixture(2, cov, start=start).fit(x)


@pytest.mark.parametrize('message', wrong)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        wrong[message](points(0, 20, 2))


@pytest.mark.parametrize('dtype', [f32, f64], ids=str)
@pytest.mark.parametrize('cov', ['diag', 'full'])
@pytest.mark.parametrize('what', ['columns of 1 and 1e4', 'a far point', 'far from 0'])
def test_hard_numbers_are_fitted_as_scikit_learn_does_in_float64(what, cov, dtype):
    "a floor from the widest column, and squares in float32, made variances 500 times too large"
    sk = pytest.importorskip('sklearn.mixture')
    g = torch.Generator().manual_seed(0)
    x = 0.05 * torch.randn(400, 2, generator=g, dtype=f64)
    x[:, 1] += torch.arange(400) % 2
    if what == 'a far point':
        x[0] = 1e4
    x = (x * torch.tensor([1e4, 1]) if what[0] == 'c' else x + 1e3 * (what == 'far from 0')).to(
        dtype
    )
    p = start(x, 2, cov)
    precision = torch.linalg.inv(p.sig2) if cov == 'full' else 1 / p.sig2
    own = dict(weights_init=p.pi, means_init=p.mu, precisions_init=precision)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ref = sk.GaussianMixture(2, covariance_type=cov, max_iter=20, tol=0, **own).fit(x.double())
    gm = GaussianMixture(2, cov, start=p, max_iter=20, tol=0).fit(x)
    close = dict(rtol=1e-4, atol=1e-6)  # a variance of one point 1e4 away is rounding's
    assert gm.mu.dtype == gm.history.dtype == dtype
    for got, want in zip(gm.params, (ref.weights_, ref.means_, ref.covariances_)):
        assert_close(got.double(), torch.as_tensor(want), **close)
    got, want = gm.score_samples(x)[1:], torch.from_numpy(ref.score_samples(x.double()))[1:]
    assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('cov', covariances)
def test_rounding_noise_is_no_variance(cov):
    "Far from the centre E[x^2] - mu^2 is noise of either sign, and must come out as its size."
    x = torch.full((37, 2), 1234.567, dtype=f32) + torch.tensor([0.0, 0.1])
    p = from_moments(features(x, cov).mT @ torch.ones(37, 1), 2, cov)
    eps = torch.finfo(f32).eps
    least = (torch.linalg.eigvalsh(p.sig2) if cov == 'full' else p.sig2).min()
    assert 3 * eps * 1234**2 < least < 50 * eps * 1235**2
    assert natural(p, cov).isfinite().all()


@pytest.mark.parametrize('weighted', [False, True])
def test_data_moments_in_float32_with_a_large_mean(weighted):
    x = (
        1e4 + torch.randn(1, 300_000, 2, generator=torch.Generator().manual_seed(0), dtype=f64)
    ).float()
    w = torch.rand(1, 300_000, generator=torch.Generator().manual_seed(1)) if weighted else None
    mean, var = data_moments(x, w, tile=2**12)
    w = torch.ones(1, 300_000, dtype=f64) if w is None else w.double()
    truth = (x.double() * w[..., None]).sum(1, keepdim=True) / w.sum()
    assert_close(mean.double(), truth, rtol=0, atol=1.5e-3)  # one unit in the last place is 1e-3
    assert_close(
        var.double(),
        (w[..., None] * (x.double() - truth) ** 2).sum(1, keepdim=True) / w.sum(),
        rtol=1e-4,
        atol=0,
    )


# ---- other devices, graphs, threads ----


@pytest.mark.parametrize('cov', covariances)
def test_on_meta_no_value_is_read(cov):
    x = torch.empty(3, 200, 4, device='meta')
    gm = GaussianMixture(5, cov, max_iter=3, n_init=2, seed=0).fit(x)
    assert gm.mu.shape == (3, 5, 4) and gm.history.shape == (3, 3)
    assert gm.predict_proba(x).shape == (3, 200, 5) and gm.sample(7)[0].shape == (3, 7, 4)


def test_without_looking_the_fit_is_the_same(monkeypatch):
    from capsnb.engine import mixture

    x = points(0, 300, 3)
    p = start(x, 3, 'diag')
    want = GaussianMixture(3, start=p, max_iter=30).fit(x)
    monkeypatch.setattr(mixture, 'may_look', lambda t: False)
    got = GaussianMixture(3, start=p, max_iter=30).fit(x)
    assert got.n_iter == want.n_iter < 30 and torch.equal(got.mu, want.mu)


def test_likelihoods_in_one_graph():
    x = points(0, 300, 3)
    gm = GaussianMixture(3, start=start(x, 3, 'diag')).fit(x)
    graph = torch.compile(gm.score_samples, fullgraph=True, backend='eager')
    assert_close(graph(x), gm.score_samples(x))


def test_threads_change_no_bit():
    x, threads = points(0, 4000, 3), torch.get_num_threads()
    found = []
    try:
        for k in (1, 2, 3):
            torch.set_num_threads(k)
            fit = GaussianMixture(3, start=start(x, 3, 'diag'), tile=2**9, max_iter=5).fit(x)
            assert torch.get_num_threads() == k
            found.append(fit.mu)
    finally:
        torch.set_num_threads(threads)
    assert_close(found[0], found[1], rtol=1e-12, atol=0)  # a product may be cut up by threads
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize('mode', [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_threads_are_in_the_mode_of_their_caller(mode):
    x, threads, found = torch.randn(20_000, 3, dtype=f64), torch.get_num_threads(), []
    for k in (1, 2):
        torch.set_num_threads(k)
        try:
            with mode():
                fit = GaussianMixture(2, max_iter=3, seed=0).fit(x)
                found.append([fit.mu, fit.sig2, fit.score_samples(x)])
        finally:
            torch.set_num_threads(threads)
    for p, q in zip(*found):
        assert_close(p, q)  # a product may be cut up by threads
        assert p.is_inference() == q.is_inference() == (mode is torch.inference_mode)
