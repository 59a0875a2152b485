"""On a GPU everything gives what it gives on the CPU, and nothing waits for a value.

Skipped where there is none.
"""

import copy
import os
import shutil
import subprocess
import sys
import pytest
import torch
from capsnb import CapsNet, ClassCaps, ConvCaps, DStepNet, GaussianMixture, MatrixCapsNet
from capsnb import Routing, SSTNet, dynamic_routing, em_routing, route_capsules
from capsnb.core import seed_everything
from capsnb.engine.dstep import plans
from capsnb.engine.layers import field_plans
from capsnb.engine.numerics import error_to
from capsnb.lab.speed import _as_a_graph, bench

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch):
    "cuDNN convolves in TF32 unless it is told not to."
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


def pictures(channels, size, n_classes, n=3):
    return torch.rand(n, channels, size, size), torch.arange(n) % n_classes


def caps(i):
    return torch.rand(2, 5, 5, i), torch.randn(2, 5, 5, i, 4, 4)


def words():
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    return mask, torch.randn(2, 4, 3, 8), torch.tensor([0, 4])


made = {  # name -> a layer or network, and what it is given
    'Routing, shared maps': lambda: (Routing(4, 4, 4, n_out=7), routed(30)),
    'Routing, moments': lambda: (Routing(4, 4, 4, n_out=7, plan='moments'), routed(30)),
    'Routing, stream': lambda: (Routing(4, 4, 4, n_out=7, plan='stream'), routed(30)),
    'Routing, own maps': lambda: (Routing(4, 4, 4, n_inp=30, n_out=7), routed(30)),
    'ConvCaps': lambda: (ConvCaps(3, 4, 3, 2), caps(3)),
    'ClassCaps': lambda: (ClassCaps(3, 5), caps(3)),
    'CapsNet': lambda: (CapsNet(channels=8, n_types=2, decoder=(8, 8)), pictures(1, 28, 10)),
    'MatrixCapsNet, paper': lambda: (MatrixCapsNet(4, 2, 3, 3, preset='paper'), pictures(2, 32, 5)),
    'MatrixCapsNet, google': lambda: (
        MatrixCapsNet(4, 2, 3, 3, preset='google'),
        pictures(2, 32, 5),
    ),
    'MatrixCapsNet': lambda: (MatrixCapsNet(4, 2, 3, 3), pictures(2, 32, 5)),
    'DStepNet': lambda: (DStepNet(channels=(4, 4, 4), n_types=3, n_parts=5), pictures(1, 8, 10)),
    'SSTNet': lambda: (SSTNet(3, 8, 5, d_feat=6, n_parts=4), words()),
}


def routed(i):
    return torch.randn(3, i), torch.randn(3, i, 4, 4)


def step(net, given):
    "Outputs and gradients of everything, on the CPU."
    out = net(*given)
    outs = [out['loss'], out['logits']] if isinstance(out, dict) else [o for o in out[:3]]
    total = sum(o.square().sum() for o in outs)
    grads = torch.autograd.grad(total, list(net.parameters()), allow_unused=True)
    return [o.detach().cpu() for o in (*outs, *grads) if o is not None]


def there(net, given, device):
    return copy.deepcopy(net).to(device), [x.to(device) for x in given]


@pytest.mark.parametrize('name', made)
def test_a_gpu_gives_what_the_cpu_gives(name):
    seed_everything(0)
    net, given = made[name]()
    wide = step(net.double(), [x.double() if x.is_floating_point() else x for x in given])
    cpu = step(*there(net.float(), given, 'cpu'))  # the norms of three pictures magnify rounding
    for mine, same, truth in zip(step(*there(net, given, 'cuda')), cpu, wide):
        assert error_to(mine, truth) < max(2e-3, 2 * error_to(same, truth))


@pytest.mark.parametrize('name', made)
def test_nothing_waits_for_a_value(name):
    seed_everything(0)
    net, given = there(*made[name](), 'cuda')
    loss = lambda: sum(o.sum() for o in tuple_of(net(*given)))
    loss().backward()  # what is loaded once may wait
    torch.cuda.set_sync_debug_mode('error')
    try:
        loss().backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')


def tuple_of(out):
    return [out['loss']] if isinstance(out, dict) else out[:2]


def wide(i):
    return torch.randn(3, i), torch.randn(3, i, 1, 64)


layers = {  # a layer, and what it is given
    'shared maps': lambda: (Routing(4, 4, 4, n_out=9), routed(77)),
    'large maps': lambda: (Routing(1, 64, 2, n_out=70), wide(40)),
    'own large maps': lambda: (Routing(1, 64, 2, n_inp=40, n_out=70), wide(40)),
    'several': lambda: (ConvCaps(3, 4, 3, 2), caps(3)),
    'one of all': lambda: (ConvCaps(1, 1, 3), [x[:1, :3, :3] for x in caps(1)]),
    'classes': lambda: (ClassCaps(3, 5), caps(3)),
}
by_plan = [(name, plan) for name in list(layers)[:3] for plan in plans]
by_plan += [(name, plan) for name in list(layers)[3:] for plan in field_plans]


@pytest.mark.parametrize('name, plan', by_plan)
def test_every_plan_is_right_or_refuses(name, plan):
    seed_everything(0)
    net, given = layers[name]()
    truth = step(net.double(), [x.double() for x in given])
    net = copy.deepcopy(net).float()
    net.plan = plan
    if plan == 'compiled' or (name, plan) == ('own large maps', 'moments'):
        with pytest.raises(ValueError):
            step(*there(net, given, 'cuda'))
        return
    for mine, wanted in zip(step(*there(net, given, 'cuda')), truth):
        assert error_to(mine, wanted) < 1e-3


@pytest.mark.parametrize('name', layers)
def test_kernels_repeat_to_the_last_bit(name):
    seed_everything(0)
    net, given = there(*layers[name](), 'cuda')
    net.plan = 'triton'
    assert all(map(torch.equal, step(net, given), step(net, given)))


def test_dynamic_routing():
    u, W = 0.3 * torch.randn(4, 50, 8), 0.1 * torch.randn(50, 7, 8, 16)
    V = torch.einsum('nid,ijdh->nijh', u, W)
    wanted = route_capsules(u.double(), W.double()).v
    assert error_to(route_capsules(u.cuda(), W.cuda()).v.cpu(), wanted) < 1e-5
    assert error_to(dynamic_routing(V.cuda()).v.cpu(), wanted) < 1e-5


def test_em_routing_of_votes():
    a, V = torch.rand(4, 50), torch.randn(4, 50, 5, 4, 4)
    wanted = em_routing(a.double(), V.double(), 0.5, 0.2)
    found = em_routing(a.cuda(), V.cuda(), 0.5, 0.2)
    assert all(error_to(x.cpu(), y) < 1e-5 for x, y in zip(found[:4], wanted))


@pytest.mark.skipif(not shutil.which('compute-sanitizer'), reason="there is no compute-sanitizer")
def test_no_address_is_out_of_range():
    run = [sys.executable, *'-m pytest -q -n 0 -m cuda -k last_bit'.split(), __file__]
    alone = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING='1')  # each tensor has its own place
    done = subprocess.run(['compute-sanitizer', '--error-exitcode', '9', *run], env=alone)
    assert done.returncode == 0


def test_a_mixture():
    x = torch.randn(1000, 4)
    kw = dict(max_iter=5, tol=0, start=(torch.full((3,), 1 / 3), x[:3], torch.ones(3, 4)))
    wanted = GaussianMixture(3, **kw).fit(x)
    kw['start'] = tuple(p.cuda() for p in kw['start'])
    assert error_to(GaussianMixture(3, **kw).fit(x.cuda()).mu.cpu(), wanted.mu.double()) < 1e-4


def test_a_step_fits_in_a_cuda_graph():
    seed_everything(0)
    net, (a, mu) = there(Routing(4, 4, 4, n_out=9), routed(77), 'cuda')
    net(a, mu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = net(a, mu)
    graph.replay()
    torch.cuda.synchronize()
    assert error_to(out.scores.cpu(), net(a, mu).scores.detach().double().cpu()) < 1e-5


def test_matrix_capsules_store_no_votes():
    "Three layers of 32 types: with all votes the step of 16 digits takes gigabytes."
    net = MatrixCapsNet(32, 32, 32, 32, E=10, in_channels=1, stem='paper').cuda()
    x, y = torch.rand(16, 1, 28, 28, device='cuda'), torch.arange(16, device='cuda') % 10
    net(x, y)['loss'].backward()
    torch.cuda.reset_peak_memory_stats()
    net(x, y)['loss'].backward()
    assert torch.cuda.max_memory_allocated() < 1e9


def test_a_bench_replays_graphs(tmp_path):
    record = bench(('routing',), tmp_path / 'x.json', 'cuda', quick=True, tiny=True)
    rows = record['benches']['routing']['digits, layer 2']['measured']
    assert all(0 < row['graph'] < 1 for row in rows.values() if 'no_graph' not in row)
    a = torch.ones(2, device='cuda')
    assert 'graph' in _as_a_graph(lambda: a + 1, 1)
    assert 'no_graph' in _as_a_graph(lambda: a.sum().item(), 1)
