"The mixture of Gaussians: against the book and scikit-learn, its symmetries, hard numbers."

import math
import warnings
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from capsnb.engine import mixture
from capsnb.engine.mixture import GaussianMixture, Params

f32, f64 = torch.float32, torch.float64
few = settings(max_examples=15, deadline=None, derandomize=True)
all_kinds = 'diag', 'full'
seeds, kinds = st.integers(0, 10**6), st.sampled_from(all_kinds)
each_kind = pytest.mark.parametrize('cov', all_kinds)


def points(seed, N, D, J=3, spread=3.0, dtype=f64):
    g = torch.Generator().manual_seed(seed)
    mu = spread * torch.randn(J, D, generator=g, dtype=f64)
    x = mu[torch.randint(J, (N,), generator=g)] + torch.randn(N, D, generator=g, dtype=f64)
    return x.to(dtype)


def even(x):
    return mixture._weights(None, x, 1)


def start(x, J, cov, seed=0):
    g = torch.Generator().manual_seed(seed)
    return mixture._start_params(x, J, even(x), cov, g, 1e-3)


def density(p, cov):
    sig2 = p.sig2 if cov == 'full' else p.sig2.diag_embed()
    each = torch.distributions.MultivariateNormal(p.mu, sig2)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(p.pi), each)


@few
@given(
    st.integers(1, 300), st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([1, 500])
)
def test_a_sweep_is_the_steps_of_the_density_whatever_the_tile(N, D, full, weighted, tile):
    g, b, J = torch.Generator().manual_seed(N), 2, 3
    x, pi, mu, w, L = (
        torch.randn(s, generator=g, dtype=f64)
        for s in ((b, N, D), (b, J), (b, J, D), (b, N), (b, J, D, D))
    )
    sig2 = L @ L.mT + torch.eye(D) if full else L.diagonal(dim1=-2, dim2=-1).exp()
    p, w = Params(pi.softmax(-1), mu, sig2), w.exp() if weighted else even(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mixture._TILE, 'cpu', tile)
        S, ll = mixture._em_sweep(x, w, p)
    C = sig2 if full else sig2.diag_embed()
    each = torch.distributions.MultivariateNormal(mu[:, None], C[:, None]).log_prob(x[:, :, None])
    log_p = (each + p.pi.log()[:, None]).logsumexp(-1, keepdim=True)
    R = (each + p.pi.log()[:, None] - log_p).exp() * w[..., None]
    assert_close(S, mixture._features(x, full).mT @ R)
    assert_close(ll, (w * log_p[..., 0]).sum(-1))


class Largest(TorchDispatchMode):
    "Bytes of the largest storage created while active."

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for o in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, o.untyped_storage().nbytes())
        return out


def test_memory_does_not_depend_on_the_number_of_points(monkeypatch):
    monkeypatch.setitem(mixture._TILE, 'cpu', 2**14)
    largest = set()
    for N in (5_000, 20_000):
        x = points(0, N, 8, 64)
        with Largest() as seen:
            GaussianMixture(64, start=start(x[:500], 64, 'diag'), max_iter=2).fit(x)
        largest.add(seen.size)
    assert len(largest) == 1 and largest.pop() <= 2**14 * 8


@pytest.mark.parametrize('dtype', [f32, f64], ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(kinds, st.sampled_from([0, 1e-6]), st.data())
def test_any_data_are_fitted_and_likelihood_falls_by_no_more_than_rounding(dtype, cov, reg, data):
    "By 1/16 a point at most, where Gaussians collapse onto equal points."
    D, J = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    fine = st.integers(-3000, 3000).map(lambda i: i / 1000)
    number = data.draw(st.sampled_from([st.integers(0, 3), fine]))
    rows = st.lists(st.lists(number, min_size=D, max_size=D), min_size=J, max_size=25)
    x = torch.tensor(data.draw(rows), dtype=dtype)
    x = x * data.draw(st.sampled_from([1e-3, 1.0, 1e4]))
    x = x + data.draw(st.sampled_from([0.0, 1.0, 10.0])) * x.max()
    if reg == 0 and (x == x[0]).all(0).any():
        return  # a constant column is refused
    w = data.draw(st.none() | st.lists(st.floats(0.01, 5), min_size=len(x), max_size=len(x)))
    w = w if w is None else torch.tensor(w, dtype=dtype)
    gm = GaussianMixture(J, cov, max_iter=20, tol=0, reg_covar=reg, seed=0).fit(x, w)
    found = *gm.params, gm.history, gm.predict_proba(x), gm.score_samples(x)
    assert all(q.isfinite().all() for q in found)
    assert_close(gm.pi.sum(), torch.ones((), dtype=dtype))
    rounding = 4 * torch.finfo(dtype).eps * gm.history.abs().max().clamp(min=1)
    assert reg or (-gm.history.diff() <= 1 / 16 + rounding).all()


def fits_equal(a, b, tol=1e-7):
    for p, q in zip((*a.params, a.lower_bound), (*b.params, b.lower_bound)):
        assert_close(p, q, rtol=tol, atol=tol)


@few
@given(seeds, kinds, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_integer_weights_are_repetitions(seed, cov, w):
    x, w = points(seed, 60, 2), torch.tensor(w)
    w[:5] = 2
    make = lambda: GaussianMixture(3, cov, start=start(x, 3, cov), max_iter=10, tol=0)
    rep, fit = x.repeat_interleave(w, 0), make().fit(x, w)
    fits_equal(fit, make().fit(rep))
    fits_equal(fit, make().fit(x, 1e-6 * w.double()))
    one, two = (torch.Generator().manual_seed(seed) for _ in range(2))  # and the same draws
    picked = mixture._kmeans_pp(x, 3, w.double(), one)[0]
    assert_close(picked, mixture._kmeans_pp(rep, 3, even(rep), two)[0])


@pytest.mark.parametrize('seed', range(5))
def test_centres_are_drawn_far_from_each_other(seed):
    x = torch.cat([points(seed, 50, 2, 1), 1e3 + points(seed, 5, 2, 1)])
    centres = mixture._kmeans_pp(x, 2, even(x), torch.Generator().manual_seed(seed))[0]
    assert (centres.mean(-1) > 500).sum() == 1


@few
@given(seeds, kinds, st.sampled_from([1e-2, 1e2]), st.sampled_from([0.0, -50.0, 1e4]))
def test_what_changes_nothing_and_what_changes_as_foreseen(seed, cov, scale, shift):
    "the order of points and of Gaussians; units and origin of the data"
    x = points(seed, 80, 2)
    p, kw = start(x, 3, cov), dict(max_iter=8, tol=0, reg_covar=0)
    fit = lambda p, x: GaussianMixture(3, cov, start=p, **kw).fit(x)
    a, (i, j) = fit(p, x), (torch.randperm(n) for n in (80, 3))
    fits_equal(a, fit(p, x[i]))
    for q, r in zip(a.params, fit([q[j] for q in p], x).params):
        assert_close(q[j], r, rtol=1e-7, atol=1e-7)
    b = fit(Params(p.pi, p.mu * scale + shift, p.sig2 * scale**2), x * scale + shift)
    assert_close(b.pi, a.pi, rtol=1e-5, atol=1e-6)
    assert_close(b.sig2, a.sig2 * scale**2, rtol=1e-4, atol=1e-5 * scale**2)
    assert_close(b.mu, a.mu * scale + shift, rtol=1e-6, atol=1e-5 * scale)
    assert_close(b.lower_bound, a.lower_bound - 2 * math.log(scale), rtol=1e-6, atol=1e-6)


@few
@given(seeds, kinds, st.integers(2, 5))
def test_a_batch_is_its_members(seed, cov, b):
    x = torch.stack([points(seed + s, 60, 2, spread=1 + s) for s in range(b)])
    ps = [start(q, 3, cov) for q in x]
    batch = GaussianMixture(3, cov, start=[torch.stack(q) for q in zip(*ps)], tol=1e-4).fit(x)
    for k in range(b):
        alone = GaussianMixture(3, cov, start=ps[k], tol=1e-4).fit(x[k])
        assert alone.n_iter == batch.n_iter[k] and alone.converged == batch.converged[k]
        for q, r in zip(alone.params, batch.params):
            assert_close(q, r[k], rtol=1e-7, atol=1e-7)


def by_sklearn(x, p, cov, **kw):
    "scikit-learn's fit from a start, in float64."
    sk = pytest.importorskip('sklearn.mixture')
    precision = torch.linalg.inv(p.sig2) if cov == 'full' else 1 / p.sig2
    own = dict(weights_init=p.pi, means_init=p.mu, precisions_init=precision)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return sk.GaussianMixture(len(p.pi), covariance_type=cov, **own, **kw).fit(x.double())


@each_kind
@pytest.mark.parametrize('D, J', [(1, 2), (3, 5), (8, 4)])
def test_sklearn(cov, D, J):
    x = points(J, 400, D, J) + 20 * J
    p, kw = start(x, J, cov), dict(max_iter=60, tol=1e-6)
    ref, gm = by_sklearn(x, p, cov, **kw), GaussianMixture(J, cov, start=p, **kw).fit(x)
    assert gm.n_iter == ref.n_iter_ and bool(gm.converged) == ref.converged_
    for a, b in (
        *zip(gm.params, (ref.weights_, ref.means_, ref.covariances_)),
        (gm.lower_bound, ref.lower_bound_),
        (gm.predict_proba(x), ref.predict_proba(x)),
        (gm.score_samples(x), ref.score_samples(x)),
    ):
        assert_close(a, torch.as_tensor(b, dtype=f64), rtol=0, atol=1e-6)


@pytest.mark.parametrize('dtype', [f32, f64], ids=str)
@pytest.mark.parametrize('cov', ['diag', 'full'])
@pytest.mark.parametrize('what', ['columns of 1 and 1e4', 'a far point', 'far from 0'])
def test_hard_numbers_are_fitted_as_scikit_learn_does_in_float64(what, cov, dtype):
    "a floor from the widest column, and squares in float32, made variances 500 times too large"
    g = torch.Generator().manual_seed(0)
    x = 0.05 * torch.randn(400, 2, generator=g, dtype=f64)
    x[:, 1] += torch.arange(400) % 2
    if what == 'a far point':
        x[0] = 1e4
    x = x * torch.tensor([1e4, 1]) if what[0] == 'c' else x + 1e3 * (what == 'far from 0')
    x = x.to(dtype)
    p, kw = start(x, 2, cov), dict(max_iter=20, tol=0)
    ref, gm = by_sklearn(x, p, cov, **kw), GaussianMixture(2, cov, start=p, **kw).fit(x)
    assert gm.mu.dtype == gm.history.dtype == dtype
    for got, want in zip(gm.params, (ref.weights_, ref.means_, ref.covariances_)):
        assert_close(got.double(), torch.as_tensor(want), rtol=1e-4, atol=1e-6)
    got, want = gm.score_samples(x)[1:], torch.from_numpy(ref.score_samples(x.double()))[1:]
    assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@each_kind
def test_an_emptied_component_keeps_its_parameters(cov):
    x, mu, sig2 = points(0, 100, 2), torch.tensor([[0.0, 0], [1e4, 1e4]]), torch.ones(2, 2)
    s = sig2.diag_embed() if cov == 'full' else sig2
    gm = GaussianMixture(2, cov, start=(torch.full((2,), 0.5), mu, s)).fit(x)
    assert_close(gm.mu[1], torch.full((2,), 1e4, dtype=f64))
    assert_close(gm.sig2[1], s[1].double())
    assert gm.pi[1] < 1e-12 and (gm.history.diff() >= -1e-12).all()
    one = GaussianMixture(1, cov, seed=0).fit(x)
    assert_close((gm.mu[0], gm.sig2[0]), (one.mu[0], one.sig2[0]))


@each_kind
def test_samples_have_the_moments(cov):
    x = points(0, 500, 2)
    gm = GaussianMixture(3, cov, seed=0).fit(x)
    new, j = gm.sample(100_000, torch.Generator().manual_seed(0))
    assert_close(new.mean(0), x.mean(0), atol=0.05, rtol=0)
    assert_close(torch.bincount(j, minlength=3) / 100_000, gm.pi.float(), atol=0.01, rtol=0)
    k = gm.pi.argmax()
    C = density(gm.params, cov).component_distribution.covariance_matrix[k]
    assert_close(new[j == k].T.cov(), C, atol=0.05, rtol=0.05)


def test_no_graph_no_autocast_no_change_to_the_input():
    x = points(0, 60, 2, dtype=f32).requires_grad_()
    before, w = x.detach().clone(), torch.rand(60)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        a = GaussianMixture(3, 'full', seed=0).fit(x, w)
    b = GaussianMixture(3, 'full', seed=0).fit(before, w)
    assert a.mu.equal(b.mu) and not a.mu.requires_grad and x.detach().equal(before)


def fit(x, J=2, weight=None, **kw):
    return GaussianMixture(J, **kw).fit(x, weight)


half = torch.tensor([0.5, 0.5])
wrong = {
    'n_components must be an integer of at least 1, got 2.5': lambda x: GaussianMixture(2.5),
    'tol must be a finite number of at least 0, got nan': lambda x: fit(x, tol=math.nan),
    "covariance must be 'diag' or 'full', got 'tied'": lambda x: fit(x, covariance='tied'),
    'start: mu must be numbers that fit .2, 2., got': lambda x: fit(x, start=(half, 'a', x[:2])),
    'sig2 must be positive': lambda x: fit(x, start=(half, x[:2], -x[:2].square())),
    "tensor of PyTorch, got <class 'numpy.ndarray'>": lambda x: fit(x.numpy()),
    r'N >= 2 and not be empty, got \(1, 2\)': lambda x: fit(x[:1]),
    'squares of its range': lambda x: fit(1e200 * x),
    'a column of x is constant': lambda x: fit(0 * x, 1, reg_covar=0),
    'positive for at least 2 points, got 0.0 and 1': lambda x: fit(x, 2, torch.eye(20)[0]),
    'must not be negative.*got -1': lambda x: fit(x, 1, -torch.ones(20)),
    'not fitted yet': lambda x: GaussianMixture(2).score_samples(x),
    'must have 2 columns like the data of fit, got 1': lambda x: fit(x).predict(x[:, :1]),
}


@pytest.mark.parametrize('message', wrong)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        wrong[message](points(0, 20, 2))


@each_kind
def test_on_meta_no_value_is_read(cov):
    x = torch.empty(3, 200, 4, device='meta')
    gm = GaussianMixture(5, cov, max_iter=3, seed=0).fit(x)
    assert gm.mu.shape == (3, 5, 4) and gm.history.shape == (3, 3)
    assert gm.predict_proba(x).shape == (3, 200, 5) and gm.sample(7)[0].shape == (3, 7, 4)


def test_without_looking_the_fit_is_the_same_and_likelihoods_are_one_graph(monkeypatch):
    x = points(0, 300, 3)
    make = lambda: GaussianMixture(3, start=start(x, 3, 'diag'), max_iter=30)
    want = make().fit(x)
    graph = torch.compile(want.score_samples, fullgraph=True, backend='eager')
    assert_close(graph(x), want.score_samples(x))
    monkeypatch.setattr(mixture, 'may_look', lambda t: False)
    got = make().fit(x)
    assert got.n_iter == want.n_iter < 30 and torch.equal(got.mu, want.mu)


@pytest.mark.parametrize('mode', [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_threads_change_nothing_and_are_in_the_mode_of_their_caller(mode, monkeypatch):
    monkeypatch.setitem(mixture._TILE, 'cpu', 2**9)
    x, threads, found = points(0, 4000, 3), torch.get_num_threads(), []
    p = start(x, 3, 'diag')
    try:
        for k in (1, 2, 3):
            torch.set_num_threads(k)
            with mode():
                fit = GaussianMixture(3, start=p, max_iter=5).fit(x)
                found.append([fit.mu, fit.sig2, fit.score_samples(x)])
            assert torch.get_num_threads() == k
    finally:
        torch.set_num_threads(threads)
    for one, two, three in zip(*found):
        assert_close((one, one), (two, three), rtol=1e-12, atol=1e-12)
        assert one.is_inference() == two.is_inference() == (mode is torch.inference_mode)
