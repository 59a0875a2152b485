"""Dynamic routing: dtypes, shapes, properties and memory that read badly in prose."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.engine.numerics import assert_as_exact
from capsnb.engine.dynamic import _Maps, dynamic_routing, route_capsules
from capsnb.routing.dynamic import dynamic_routing_ref, squash
from capsnb.routing.mixture import em


def maps(*lead, i=6, j=3, d=4, h=5, seed=0, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    u, W = (scale * torch.randn(s, generator=g, dtype=dtype) for s in ((*lead, i, d), (i, j, d, h)))
    return u.requires_grad_(), W.requires_grad_()


def votes(u, W):
    return torch.einsum('...id,ijdh->...ijh', u, W)


@settings(deadline=None, max_examples=30)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    i=st.integers(1, 7),
    j=st.integers(1, 4),
    d=st.integers(1, 4),
    h=st.integers(1, 4),
    T=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
)
def test_fast_is_the_reference(lead, i, j, d, h, T, seed, scale):
    u, W = maps(*lead, i=i, j=j, d=d, h=h, seed=seed, scale=scale)
    V = votes(u, W)
    ref = dynamic_routing_ref(V, T)
    w = torch.randn(ref.v.shape, dtype=V.dtype)
    g_ref = torch.autograd.grad((ref.v * w).sum(), (V, u, W), retain_graph=True)
    for out, wrt, want in (
        (dynamic_routing(V, T, return_R=True), V, g_ref[:1]),
        (route_capsules(u, W, T, return_R=True), (u, W), g_ref[1:]),
    ):
        for x, y in zip(out, ref):
            assert_close(x, y)
        for x, y in zip(torch.autograd.grad((out.v * w).sum(), wrt, retain_graph=True), want):
            assert_close(x, y, atol=1e-9, rtol=1e-6)
        assert_close(out.R.sum(-1), torch.ones_like(out.R.sum(-1)))
        assert (out.a < 1).all()


@pytest.mark.parametrize('n_iters', (1, 3, 6))
def test_float32_is_as_exact_as_the_reference(n_iters):
    u64, W64 = maps(4, i=200, j=5, d=8, h=16, scale=0.3)

    def run(f, dtype):
        u, W = (x.detach().to(dtype).requires_grad_() for x in (u64, W64))
        out = f(u, W)
        return out.v.detach(), *torch.autograd.grad(out.v.sum(), (u, W))

    ref = lambda u, W: dynamic_routing_ref(votes(u, W), n_iters)
    for f in (
        lambda u, W: route_capsules(u, W, n_iters),
        lambda u, W: dynamic_routing(votes(u, W), n_iters),
    ):
        for x, y, z in zip(run(f, torch.float32), run(ref, torch.float32), run(ref, torch.float64)):
            assert_as_exact(x, y, z, factor=3.0, ulps=8.0)


@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16))
def test_half_precision_is_routed_in_float32(dtype):
    u, W = (x.detach().to(dtype) for x in maps(2))
    out = route_capsules(u, W)
    assert out.v.dtype == dtype
    assert_close(out.v, dynamic_routing_ref(votes(u.float(), W.float())).v.to(dtype))


def test_autocast_changes_nothing_in_backward():
    "a backward pass inside autocast, where matrix products would be taken in half precision"
    u, W = (x.detach().float().requires_grad_() for x in maps(2))
    V = votes(u, W).detach().requires_grad_()
    for f, wrt in ((lambda: route_capsules(u, W), (u, W)), (lambda: dynamic_routing(V), (V,))):
        want = torch.autograd.grad(f().v.square().sum(), wrt)
        out = f()
        with torch.autocast('cpu', dtype=torch.bfloat16):
            got = torch.autograd.grad(out.v.square().sum(), wrt)
        for x, y in zip(got, want):
            assert_close(x, y, rtol=0, atol=0)


def test_the_wider_of_two_precisions_counts():
    u, W = (x.detach() for x in maps(2))
    f32, half = torch.float32, torch.bfloat16
    for a, b, wide in (
        (f32, torch.float64, torch.float64),
        (half, f32, f32),
        (torch.float64, f32, torch.float64),
        (torch.float16, half, f32),
    ):
        out = route_capsules(u.to(a), W.to(b))
        assert out.v.dtype == out.a.dtype == wide
        assert_close(out.v, route_capsules(u.to(a).to(wide), W.to(b).to(wide)).v, rtol=0, atol=0)
    u16, W32 = u.to(half).requires_grad_(), W.float().requires_grad_()
    route_capsules(u16, W32).v.sum().backward()
    assert u16.grad.dtype == half and W32.grad.dtype == f32


def test_second_derivatives_are_those_of_the_reference():
    u, W = maps(2, i=3, j=2, d=2, h=2)
    V = votes(u, W).detach().requires_grad_()
    f = lambda V: dynamic_routing_ref(V).v.square().sum()
    for mine, ref, x in (
        (lambda V: dynamic_routing(V).v.square().sum(), f, V),
        (
            lambda u: route_capsules(u, W.detach()).v.square().sum(),
            lambda u: f(votes(u, W.detach())),
            u,
        ),
        (
            lambda W: route_capsules(u.detach(), W).v.square().sum(),
            lambda W: f(votes(u.detach(), W)),
            W,
        ),
    ):
        got, want = (torch.autograd.functional.hessian(g, x.detach()) for g in (mine, ref))
        assert_close(got, want)
        assert want.abs().max() > 1e-3


@pytest.mark.parametrize(
    'dtype, huge',
    (
        (torch.float16, 300.0),
        (torch.float16, 6e4),
        (torch.bfloat16, 1e38),
        (torch.float32, 1e20),
        (torch.float32, 1e38),
        (torch.float64, 1e300),
    ),
)
def test_huge_vectors(dtype, huge):
    s = torch.tensor([0.6, 0.8, 0.0], dtype=dtype) * huge
    s = s.requires_grad_()
    v = squash(s)
    v.sum().backward()
    assert_close(v.detach(), torch.tensor([0.6, 0.8, 0.0], dtype=dtype), atol=2e-3, rtol=2e-3)
    assert s.grad.isfinite().all()
    V = (
        (torch.tensor([[[0.6, 0.8, 0.0]]] * 2, dtype=torch.float64) * min(huge, 1e30))
        .to(dtype)
        .requires_grad_()
    )
    out = dynamic_routing(V)
    out.v.sum().backward()
    assert out.v.isfinite().all() and V.grad.isfinite().all() and abs(out.a.item() - 1) < 1e-2


def test_squash_is_its_formula_on_both_sides_of_one():
    s = torch.logspace(-6, 6, 25, dtype=torch.float64)[:, None] * torch.tensor(
        [0.6, -0.8], dtype=torch.float64
    )
    r = s.norm(dim=1, keepdim=True)
    assert_close(squash(s), s * r / (1 + r * r))
    assert_close(squash(s.T, 0), squash(s).T)
    near = torch.tensor(
        [[1 - 1e-4, 0.2], [1 + 1e-4, 0.2], [5.0, -7.0]], dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(squash, near)
    assert torch.autograd.gradcheck(
        lambda V: dynamic_routing(V).v,
        (3 * torch.randn(4, 2, 3, dtype=torch.float64)).requires_grad_(),
    )


def test_tiles_change_nothing():
    u, W = (x.detach() for x in maps(3, j=7))
    v = torch.randn(3, 7, 5, dtype=u.dtype)
    R = torch.rand(3, 7, 6, dtype=u.dtype)
    whole, tiled = _Maps(u, W), _Maps(u, W, tile=1)
    assert len(whole.tiles) == 1 and len(tiled.tiles) == 7
    assert_close(tiled.score(v), whole.score(v))
    assert_close(tiled.gather(R), whole.gather(R))
    for a, b in zip(tiled.grads(), whole.grads()):
        assert a.shape == b.shape
    ga, gb = tiled.grads(), whole.grads()
    assert tiled.spread(ga, R, v) is None is whole.spread(gb, R, v)
    assert_close(tiled.spread(ga, 2 * R, 3 * v, gather=True), whole.gather(2 * R))
    assert_close(whole.spread(gb, 2 * R, 3 * v, gather=True), whole.gather(2 * R))
    for a, b in zip(ga, gb):
        assert_close(a, b)


@pytest.mark.parametrize('route', (dynamic_routing, dynamic_routing_ref))
def test_limits(route):
    V = votes(*maps(2)).detach()
    assert_close(route(V, 1).v, squash(V.sum(-3) / 3))  # even shares: routing has not begun
    assert_close(route(torch.cat([V, -V], -3)).a, torch.zeros(2, 3, dtype=V.dtype))
    for n in (1, 10, 100):  # equal votes for one whole, none for the other
        equal = torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=V.dtype).expand(n, 2, 2)
        out, share = route(equal, 3), dynamic_routing_ref(equal, 3).R[0, 0]
        length = 0.5 * n * share
        assert_close(out.a[0], length**2 / (1 + length**2))
        assert out.a[1] == 0


def test_logits_are_votes_times_all_capsules_so_far_and_only_harden():
    V = 0.3 * votes(*maps(i=40)).detach()
    total, entropy = torch.zeros_like(V[0]), []
    for n_iters in range(1, 21):
        out = dynamic_routing_ref(V, n_iters)
        assert_close(out.R, torch.softmax((V * total).sum(-1), -1))
        total = total + out.v
        entropy.append(-torch.xlogy(out.R, out.R).sum(-1).mean())
    assert (torch.stack(entropy).diff() < 0).all() and entropy[-1] < 0.3 * entropy[0]


def test_very_good_agreement_hardly_counts_more_than_good():
    "Hinton 2018, 7.1: votes spread by 0.1 for one whole, by 0.01 for the other"
    noise = torch.randn(50, 10, 2, 4, generator=torch.Generator().manual_seed(1))
    V = torch.eye(4)[0] + torch.tensor([0.1, 0.01])[:, None] * noise
    for n_iters in (3, 10):
        share = dynamic_routing(V, n_iters, return_R=True).R[..., 1].mean()
        assert abs(share - 0.5) < 0.05
    even = torch.full(V.shape[:-1], 0.5)
    assert em(V, even, 3, least=1e-6)[-1].R[..., 1].mean() > 0.95


def test_saved_for_backward_does_not_hold_weights():
    "what the graph keeps grows by the sums only, j*h numbers per sample and iteration"

    def kept(T):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            route_capsules(*maps(2, i=500), T).v
        return sum(sizes)

    assert kept(9) - kept(3) == kept(15) - kept(9) <= 6 * 2 * 3 * 5 * 3


@pytest.mark.parametrize('detach', (False, True))
def test_zero_votes_have_zero_gradients(detach):
    V = torch.zeros(2, 4, 3, 5, requires_grad=True)
    out = dynamic_routing(V, detach=detach)
    assert out.a.equal(torch.zeros(2, 3))
    (out.v.sum() + out.a.sum()).backward()
    assert V.grad.equal(torch.zeros_like(V))


def test_detached_gradient_is_that_of_fixed_weights():
    u, W = maps(2)
    V = votes(u, W)
    R = dynamic_routing(V, return_R=True).R
    want = torch.autograd.grad(
        squash((R[..., None] * V).sum(-3)).square().sum(), (u, W), retain_graph=True
    )
    for x, y in zip(
        torch.autograd.grad(route_capsules(u, W, detach=True).v.square().sum(), (u, W)), want
    ):
        assert_close(x, y)


@pytest.mark.parametrize(
    'call, what',
    [
        (lambda: dynamic_routing(torch.zeros(2, 2)), r'\[\.\.\., i, j, h\]'),
        (lambda: dynamic_routing(torch.zeros(2, 2, 2, dtype=torch.long)), 'int64'),
        (lambda: dynamic_routing(torch.zeros(2, 2, 2), True), 'n_iters'),
        (lambda: dynamic_routing(torch.zeros(2, 2, 2), 2.5), '2.5'),
        (lambda: route_capsules(torch.zeros(3, 4), torch.zeros(3, 2, 5, 6)), r'\(3, 2, 5, 6\)'),
        *(
            (lambda s=s: dynamic_routing(torch.zeros(s)), 'at least one part')
            for s in ((2, 0, 3, 2), (2, 4, 0, 2), (2, 4, 3, 0))
        ),
        *(
            (
                lambda s=s: route_capsules(torch.zeros(2, s[0], s[2]), torch.zeros(s)),
                'at least one part',
            )
            for s in ((0, 3, 2, 2), (4, 0, 2, 2), (4, 3, 0, 2), (4, 3, 2, 0))
        ),
        (
            lambda: route_capsules(torch.ones(3, 4, dtype=torch.long), torch.zeros(3, 2, 4, 6)),
            'int64 and torch.float32',
        ),
        (lambda: squash(torch.zeros(3, 0)), r'\(3, 0\)'),
    ],
)
def test_errors(call, what):
    with pytest.raises(ValueError, match=what):
        call()
