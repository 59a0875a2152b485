"Routings whose shares start from agreement of the votes."

import io
import pytest
import torch
from torch.testing import assert_close

from capsnb import AssemblyNet, RoutedPool, Routing
from capsnb.engine import dstep
from capsnb.engine.dstep import vote_density
from capsnb.engine.em import em_routing
from capsnb.routing.em import em_routing_ref
from capsnb.zoo.routers import all_routings, routing_layer

loops = [k for k, layer in all_routings().items() if getattr(layer, 'starts', True)]


def both(name, **how):
    "A layer from agreement and one from even shares, of the same numbers, and capsules."
    torch.manual_seed(0)
    made = [routing_layer(name, 2, 3, 3, None, 4, first=k, **how) for k in ('agreement', 'even')]
    made = [layer.double() for layer in made]
    made[1].load_state_dict(made[0].state_dict(), strict=False)
    a, mu = torch.randn(2, 7).double(), torch.randn(2, 7, 2, 3).double()
    a[0, 3] = -torch.inf
    return *made, a, mu


@pytest.mark.parametrize('name', loops)
def test_shares_are_others_and_absent_parts_do_not_count(name):
    agreed, even, a, mu = both(name)
    out = agreed(a, mu, return_R=True)
    assert not torch.allclose(out.R, even(a, mu, return_R=True).R)
    far = mu.clone()
    far[0, 3] += 100
    assert_close(agreed(a, far).mu, out.mu)


@pytest.mark.parametrize('name', [k for k in loops if k not in ('kmeans-hard', 'dynamic')])
def test_gradients(name):
    agreed, _, a, mu = both(name)
    agreed.agree.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda mu: agreed(a, mu)[:2], mu.requires_grad_())


def test_one_iteration_is_a_mean_by_agreement():
    agreed, _, a, mu = both('em', n_iters=1)
    V, out = agreed.cast(mu), agreed(a, mu, return_R=True)
    D = a.sigmoid()[..., None] * agreed.agree(a, V)
    want = torch.einsum('bij,bijch->bjch', D, V) / D.sum(1)[..., None, None]
    assert_close(out.mu, want, rtol=1e-6, atol=1e-9)


def test_even_shares_may_be_given():
    a, V = torch.rand(2, 7), torch.randn(2, 7, 4, 2, 3)
    want = em_routing_ref(a, V, 0.0, 0.0, 1.0)
    for R in (torch.full((2, 7, 4), 0.25), 0.25):
        assert_close(em_routing(a, V, 0.0, 0.0, 1.0, R=R).mu, want.mu)
    with pytest.raises(ValueError, match='R must be'):
        em_routing(a, V, 0.0, 0.0, 1.0, R=torch.rand(2, 7, 5))


def test_any_number_of_outputs_compiles_and_exports():
    layer, a, mu = Routing(2, 3, 3, first='agreement'), torch.randn(2, 7), torch.randn(2, 7, 2, 3)
    assert layer(a, mu, 5).mu.shape == (2, 5, 2, 3)
    pool, x = RoutedPool(8, n_out=3, settings=dict(first='agreement')), torch.randn(2, 9, 8)
    free = {0: torch.export.Dim('b'), 1: torch.export.Dim('n')}
    exported = torch.export.export(pool, (x,), dynamic_shapes=(free,)).module()
    for x in (x, torch.randn(3, 40, 8)):
        assert_close(exported(x), pool(x))
    assert_close(torch.compile(pool, backend='eager', fullgraph=True)(x), pool(x))


def test_blocks_are_the_whole_also_under_torch_func(monkeypatch):
    pool, x = RoutedPool(8, n_out=3, settings=dict(first='agreement')), torch.randn(2, 9, 8)
    loss = lambda x: pool(x).square().sum()
    want = torch.func.grad(loss)(x)
    monkeypatch.setattr(dstep, '_MOST', 100)
    assert_close(torch.func.grad(loss)(x), want)
    assert_close(torch.autograd.grad(loss(x.requires_grad_()), x)[0], want)


def test_autocast_leaves_a_density_as_it_is():
    V, there = torch.randn(2, 30, 4, 6), torch.ones(2, 30) > 0
    with torch.autocast('cpu', torch.bfloat16):
        found = vote_density(V, there, -1.5)
    assert_close(found, vote_density(V, there, -1.5))


def test_scores_of_any_level_and_far_parts_that_hardly_count():
    "only ratios of weights count, and nobody far away costs the others their digits"
    layer, V = Routing(2, 3, 3, n_out=4, first='agreement'), torch.randn(1, 20, 4, 2, 3)
    shares = [layer.agree(torch.full((1, 20), s), V) for s in (-20.0, -60.0)]
    assert_close(*shares)
    a, mu = torch.randn(1, 30), torch.randn(1, 30, 2, 3)
    a[0, 0] = -40.0
    want = layer(a, mu).mu
    mu[0, 0] = 1e5
    assert_close(layer(a, mu).mu, want, rtol=1e-4, atol=1e-4)
    assert (
        routing_layer('em', 2, 3, 3, None, 4, first='agreement')(a[:, :0], mu[:, :0])
        .mu.isfinite()
        .all()
    )


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="first must be 'even' or 'agreement', got 'random'"):
        Routing(2, 3, 3, n_out=4, first='random')
    with pytest.raises(ValueError, match='needs votes'):
        Routing(2, 3, 3, n_out=4, first='agreement', plan='moments')
    with pytest.raises(ValueError, match='SelfRouting has no loop'):
        routing_layer('self', 2, 3, 3, None, 4, first='agreement')
    with pytest.raises(ValueError, match="routing='vectors' takes no votes"):
        AssemblyNet(5, 4, routing='vectors')
    with pytest.raises(ValueError, match="no settings, got \\['eps'\\]"):
        AssemblyNet(5, 4, settings=dict(eps=1e-3))
    with pytest.raises(ValueError, match="settings cannot be \\['bias'\\]"):
        AssemblyNet(5, 4, routing='em', settings=dict(bias=False))
    with pytest.raises(ValueError, match='there must be bool'):
        vote_density(torch.zeros(1, 4, 2, 6), torch.ones(1, 4, dtype=int))
    layer = Routing(2, 3, 3, n_out=4, first='agreement')
    torch.nn.init.constant_(layer.agree.gain, torch.nan)
    with pytest.raises(ValueError, match='agree.gain'):
        layer(torch.zeros(7), torch.randn(7, 2, 3))


def test_a_network_of_a_zoo_routing_is_kept():
    "every number is in the state dict, and padding does not matter"
    net, other = (AssemblyNet(5, 4, routing='em', first='agreement') for _ in range(2))
    torch.save(net.state_dict(), file := io.BytesIO())
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    types, poses, mask = torch.randint(5, (2, 9)), torch.randn(2, 9, 2, 3), torch.arange(9) < 6
    want = net(types[:, :6], poses[:, :6])
    assert_close(other(types, poses, mask.expand(2, -1))[:, :6], want)
