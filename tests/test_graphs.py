"""Graphs and shapes without values: torch.compile, torch.export, and the device 'meta'."""

import pytest
import torch
from torch.export import Dim, export
from capsnb import (
    CapsNet,
    ClassCaps,
    ConvCaps,
    PrimaryCaps,
    Routing,
    SmallNORBNet,
    dynamic_routing,
    em_routing,
    route_capsules,
    routing_layer,
)
from capsnb.engine.numerics import error_to
from capsnb.engine.dstep import plans
from capsnb.lab.matrix_caps import MatrixCapsNet
from capsnb.lab.vision import DStepNet, PlainCNN


here = [p for p in plans if not p.startswith('triton')]
anywhere = [p for p in here if p != 'compiled']


def inputs(n=3, i=50):
    return torch.randn(n, i), torch.randn(n, i, 4, 4)


@pytest.mark.graphs
@pytest.mark.parametrize('plan', ['auto', *here])
def test_routing_is_one_graph(plan):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, x = Routing(4, 4, 4, n_out=8, plan=plan), inputs()
    out = torch.compile(layer, backend='eager', fullgraph=True)(*x)
    for got, want in zip(out, layer(*x)):
        torch.testing.assert_close(got, want)


@pytest.mark.graphs
@pytest.mark.parametrize('n_parts', [4, 64])
def test_a_network_is_exported_for_any_size_of_batch(n_parts):
    "A graph that can be used for one image and for seven, whichever it was made with."
    torch.manual_seed(0)
    net = SmallNORBNet(5, n_parts, 4).eval()
    with torch.no_grad():
        graph = export(net, (torch.rand(4, 2, 48, 48),), dynamic_shapes=({0: Dim('b')},)).module()
        for b in (1, 2, 7):
            x = torch.rand(b, 2, 48, 48)
            for got, want in zip(graph(x), net(x)):
                assert error_to(got, want) < 2e-5


@pytest.mark.graphs
@pytest.mark.parametrize('plan', ['auto', *anywhere])
def test_routing_is_exported_for_any_size_of_batch(plan):
    torch.manual_seed(0)
    layer, b = Routing(4, 4, 4, n_out=8, plan=plan), Dim('b')
    with torch.no_grad():
        graph = export(layer, inputs(), dynamic_shapes=({0: b}, {0: b})).module()
        for n in (1, 2, 9):
            x = inputs(n)
            for got, want in zip(graph(*x), layer(*x)):
                assert error_to(got, want) < 2e-5


@pytest.mark.graphs
@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize('routing', ['dstep', 'em', 'kmeans-soft', 'student', 'inverted'])
def test_a_layer_with_shared_maps_is_exported_for_any_number_of_parts(routing, strict):
    torch.manual_seed(0)
    layer, dims = routing_layer(routing, 4, 4, 4, None, 8).eval(), {0: Dim('b'), 1: Dim('i')}
    with torch.no_grad():
        graph = export(layer, inputs(), dynamic_shapes=(dims, dims), strict=strict).module()
        for n, i in ((1, 3), (2, 400)):
            x = inputs(n, i)
            for got, want in zip(graph(*x), layer(*x)):
                assert got is want is None or error_to(got, want) < 2e-5


grid = lambda: (torch.rand(2, 5, 5, 2), torch.rand(2, 5, 5, 2, 4, 4))
on_meta = dict(
    **{
        f'Routing {plan}': lambda plan=plan: (Routing(4, 4, 4, n_out=8, plan=plan), inputs())
        for plan in ['auto', *anywhere]
    },
    large=lambda: (Routing(4, 4, 4, n_out=64), inputs(4, 3000)),
    skm=lambda: (Routing(4, 4, 4, n_out=8, p_model='skm', pooled=True), inputs()),
    ConvCaps=lambda: (ConvCaps(2, 3, padding=1), grid()),
    ClassCaps=lambda: (ClassCaps(2, 3), grid()),
    PrimaryCaps=lambda: (PrimaryCaps(3, 2), (torch.rand(2, 3, 5, 5),)),
    em_routing=lambda: (em_routing, (torch.rand(2, 6), torch.rand(2, 6, 3, 4, 4), 0.0, 0.0)),
    dynamic_routing=lambda: (dynamic_routing, (torch.rand(2, 6, 3, 4),)),
    route_capsules=lambda: (route_capsules, (torch.rand(2, 6, 4), torch.rand(6, 3, 4, 4))),
    DStepNet=lambda: (DStepNet(), (torch.rand(2, 1, 28, 28),)),
    SmallNORBNet=lambda: (SmallNORBNet(), (torch.rand(2, 2, 48, 48),)),
    PlainCNN=lambda: (PlainCNN(), (torch.rand(2, 1, 28, 28),)),
    CapsNet=lambda: (CapsNet(channels=8, n_types=2), (torch.rand(2, 1, 28, 28),)),
    MatrixCapsNet=lambda: (MatrixCapsNet(4, 2, 2, 2, preset='paper'), (torch.rand(2, 2, 32, 32),)),
)


@pytest.mark.parametrize('name', on_meta)
def test_shapes_forward_and_back_on_meta(name):
    torch.manual_seed(0)
    f, x = on_meta[name]()
    want = [o.shape for o in f(*x) if o is not None]
    if isinstance(f, torch.nn.Module):
        f = f.to('meta')
    x = [v.to('meta').requires_grad_() if isinstance(v, torch.Tensor) else v for v in x]
    out = [o for o in f(*x) if o is not None]
    assert [o.shape for o in out] == want and all(o.is_meta for o in out)
    sum(o.sum() for o in out if o.requires_grad).backward()
    for v in x:
        if isinstance(v, torch.Tensor):
            assert v.grad.is_meta and v.grad.shape == v.shape


@pytest.mark.parametrize('name', ['DStepNet', 'PlainCNN', 'CapsNet', 'MatrixCapsNet'])
def test_loss_on_meta(name):
    net, x = on_meta[name]()
    loss = net.to('meta')(x[0].to('meta'), labels=torch.zeros(2, dtype=torch.long, device='meta'))[
        'loss'
    ]
    loss.backward()
    assert loss.is_meta and all(p.grad is None or p.grad.is_meta for p in net.parameters())
