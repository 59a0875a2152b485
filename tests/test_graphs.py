"Graphs for any size: torch.export; pools in half precision."

import pytest
import torch
from torch.export import Dim, export
from capsnb import RoutedPool, SmallNORBNet, routing_layer
from capsnb.engine.numerics import error_to


def inputs(n=3, i=50):
    return torch.randn(n, i), torch.randn(n, i, 4, 4)


@pytest.mark.slow
@pytest.mark.graphs
def test_a_network_is_exported_for_any_size_of_batch():
    "A graph that can be used for one image and for seven, whichever it was made with."
    net = SmallNORBNet(5, 64, 4).eval()
    with torch.no_grad():
        graph = export(net, (torch.rand(4, 2, 48, 48),), dynamic_shapes=({0: Dim('b')},)).module()
        for b in (1, 2, 7):
            x = torch.rand(b, 2, 48, 48)
            for got, want in zip(graph(x), net(x)):
                assert error_to(got, want) < 2e-5


of_a_kind = [pytest.param(k, marks=pytest.mark.slow) for k in ('dstep', 'em')]
others = [pytest.param(k, marks=pytest.mark.long) for k in ('kmeans-soft', 'student', 'inverted')]


@pytest.mark.graphs
@pytest.mark.parametrize('routing', of_a_kind + others)
def test_a_layer_with_shared_maps_is_exported_for_any_number_of_parts(routing):
    layer, dims = routing_layer(routing, 4, 4, 4, None, 8).eval(), {0: Dim('b'), 1: Dim('i')}
    with torch.no_grad():
        graph = export(layer, inputs(), dynamic_shapes=(dims, dims)).module()
        for n, i in ((1, 3), (2, 400)):
            x = inputs(n, i)
            for got, want in zip(graph(*x), layer(*x)):
                assert got is want is None or error_to(got, want) < 2e-5


@pytest.mark.slow
@pytest.mark.graphs
def test_a_pool_is_exported_for_sets_of_any_size():
    pool = RoutedPool(12, 3, dim_out=8, heads=2).eval()
    made = lambda b, n: (torch.randn(b, n, 12), torch.arange(n) < torch.randint(1, n, (b, 1)))
    dims = {0: Dim('b'), 1: Dim('n', min=2)}
    with torch.no_grad():
        graph = export(pool, made(3, 9), dynamic_shapes=(dims, dims)).module()
        for b, n in ((2, 5), (4, 40)):
            x = made(b, n)
            assert error_to(graph(*x), pool(*x)) < 2e-5


@pytest.mark.parametrize('routing', ['dstep', 'em', 'vectors', 'attention'])
def test_a_pool_in_bfloat16(routing):
    pool, x = RoutedPool(12, 3, routing, heads=2), torch.randn(4, 20, 12)
    want, mask = pool(x), torch.ones(4, 20, dtype=torch.bool)
    got = pool.bfloat16()(x.bfloat16(), mask)
    got.float().square().sum().backward()
    assert got.dtype == torch.bfloat16 and error_to(got.float(), want) < 0.1
    assert all(p.grad.isfinite().all() for p in pool.parameters() if p.grad is not None)
