"""A count of iterations is an integer from 1 to 1,000, wherever it is given."""

import pytest
import torch
from capsnb import CapsNet, ClassCaps, ConvCaps, Routing, SmallNORBNet, em_routing
from capsnb.routing.dstep import routing_ref
from capsnb.engine.dynamic import dynamic_routing, route_capsules
from capsnb.routing.dynamic import dynamic_routing_ref
from capsnb.routing.em import as_schedule, em_routing_ref
from capsnb.lab.matrix_caps import MatrixCapsNet, routing_settings
from capsnb.lab.text import SSTNet
from capsnb.lab.vision import DStepNet

V, x = torch.zeros(2, 3, 4), torch.zeros(2, 4)
made_of = dict(
    W=torch.zeros(2, 3, 4, 4),
    B=torch.zeros(2, 3, 1, 4),
    beta_use=torch.zeros(2, 3),
    beta_ign=torch.zeros(2, 3),
)
takes = dict(
    dynamic_routing=lambda t: dynamic_routing(V, t),
    dynamic_routing_ref=lambda t: dynamic_routing_ref(V, t),
    route_capsules=lambda t: route_capsules(x, torch.zeros(2, 3, 4, 4), t),
    em_routing=lambda t: em_routing(torch.ones(2), V[:, :, None], 0.0, 0.0, n_iters=t),
    em_routing_ref=lambda t: em_routing_ref(torch.ones(2), V[:, :, None], 0.0, 0.0, 0.1, n_iters=t),
    as_schedule=lambda t: as_schedule(0.1, t),
    routing_settings=lambda t: routing_settings('paper', 9, 4, n_iters=t),
    routing_ref=lambda t: routing_ref(torch.zeros(2), x[:, None], **made_of, n_iters=t),
    Routing=lambda t: Routing(4, 4, 4, n_iters=t),
    ConvCaps=lambda t: ConvCaps(2, 3, n_iters=t),
    ClassCaps=lambda t: ClassCaps(2, 3, n_iters=t),
    CapsNet=lambda t: CapsNet(channels=4, n_types=2, n_iters=t),
    MatrixCapsNet=lambda t: MatrixCapsNet(4, 2, 2, 2, preset='paper', n_iters=t),
    DStepNet=lambda t: DStepNet(n_iters=t),
    SmallNORBNet=lambda t: SmallNORBNet(n_iters=t),
    SSTNet=lambda t: SSTNet(d_depth=3, d_emb=8, n_classes=5, n_iters=t),
)


odd = [(k, n) for k in takes for n in (True, 3.0, '3', 0, -1, None, 1001, 10**9)]
odd.remove(('MatrixCapsNet', None))  # its preset says it: test_matrix_caps


@pytest.mark.parametrize('name, n_iters', odd)
def test_odd_counts_are_refused(name, n_iters):
    with pytest.raises(
        ValueError,
        match=r'n_iters must be (an integer >= 1|at most 1000), got ' + repr(n_iters)[:4],
    ):
        takes[name](n_iters)


@pytest.mark.parametrize('name', takes)
def test_the_largest_is_taken(name):
    for n_iters in (1, 1000):
        takes[name](n_iters)
