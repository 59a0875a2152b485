"""Every network on the device 'meta', where a read of a value is an error, and as one graph."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from capsnb import BaselineCNN, CapsNet, DStepNet, MatrixCapsNet, Routing, SmallNORBNet, SSTNet
from capsnb.engine import triton_loop
from capsnb.engine.dstep import plans
from capsnb.lab.vision import PlainCNN

small = dict(channels=(4, 4), strides=(2, 2))
tiny_text = dict(d_depth=2, d_emb=6, n_classes=3, d_feat=4, n_parts=3)
digits, pairs = (2, 1, 12, 12), (2, 2, 32, 32)
one_class, all_classes = torch.tensor([1, 0]), torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])


def matrix(**kw):
    return lambda: (MatrixCapsNet(2, 2, 2, 2, 3, **dict(preset='paper') | kw), (torch.rand(pairs),))


def capsnet(**kw):
    sizes = dict(image_shape=(1, 12, 12), channels=3, kernels=(3, 3), n_types=2, decoder=(5,))
    return lambda: (CapsNet(3, **sizes | kw), (torch.rand(digits),))


def text(packed=False, **kw):
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    shape = (7, 2, 6) if packed else (2, 4, 2, 6)
    return lambda: (SSTNet(**tiny_text, **kw), (mask, torch.rand(shape)))


def blended():
    net, x = text()()
    return net, (*x, None, torch.tensor(0.3), torch.tensor([1, 0]))


networks = {
    'DStepNet': lambda: (DStepNet(3, n_types=2, n_parts=3, **small), (torch.rand(digits),)),
    'DStepNet paper': lambda: (
        DStepNet(3, n_types=2, n_parts=3, eps='paper', init='paper', **small),
        (torch.rand(digits),),
    ),
    'SmallNORBNet': lambda: (SmallNORBNet(3, 3, 4), (torch.rand(2, 2, 29, 29),)),
    'PlainCNN': lambda: (PlainCNN(3, n_hidden=3, **small), (torch.rand(digits),)),
    'BaselineCNN': lambda: (BaselineCNN(3, 1, 12, dropout=0.0), (torch.rand(digits),)),
    'CapsNet': capsnet(),
    'CapsNet without decoder': capsnet(decoder=None),
    'MatrixCapsNet': matrix(),
    'MatrixCapsNet gritzman': matrix(preset='gritzman', loss='margin'),
    'MatrixCapsNet google': matrix(preset='google', pose='vector', act='pi', loss='crossent'),
    'SSTNet': text(),
    'SSTNet packed': text(packed=True),
    'SSTNet blended': blended,
}
with_labels = [k for k in networks if k != "SSTNet blended"]


def loss_of(out):
    "A number that depends on all that a network gives."
    if isinstance(out, dict):
        return out['loss']
    return sum(o.square().sum() for o in out if o is not None and o.requires_grad)


def made(name):
    torch.manual_seed(0)
    return networks[name]()


def on_meta(name, **kw):
    net, x = made(name)
    net = net.to('meta')
    x = [v if v is None else v.to('meta') for v in x]
    x[-1 if len(x) < 3 else 1].requires_grad_()  # images, or hidden states
    out = net(*x, **{k: v.to('meta') for k, v in kw.items()})
    loss_of(out).backward()
    assert all(o.is_meta for o in tree_leaves(out) if o is not None)
    for v in (*net.parameters(), *(v for v in x if v is not None and v.requires_grad)):
        assert v.grad is None or v.grad.is_meta and v.grad.shape == v.shape
    return out


@pytest.mark.parametrize('name', networks)
def test_a_network_reads_no_value(name):
    net, x = made(name)
    want = [o.shape for o in net(*x) if o is not None]
    assert [o.shape for o in on_meta(name) if o is not None] == want


@pytest.mark.parametrize('labels', [one_class, all_classes], ids=['hard', 'soft'])
@pytest.mark.parametrize('name', with_labels)
def test_a_loss_reads_no_value(name, labels):
    out = on_meta(name, labels=labels)
    assert out['loss'].shape == () and out['logits'].shape == (2, 3)


def gradients(net, f, x, **kw):
    net.zero_grad()
    out = f(*x, **kw)
    loss_of(out).backward()
    outs = [o.detach() for o in tree_leaves(out) if o is not None]
    return outs + [p.grad for p in net.parameters()]


of_labels = dict(none=None, hard=one_class, soft=all_classes)
graphs = [(n, k) for n in with_labels for k in of_labels] + [('SSTNet blended', 'none')]
of_a_kind = [(n, 'soft') for n in ('DStepNet', 'CapsNet', 'MatrixCapsNet')]
marks = {True: pytest.mark.slow, False: pytest.mark.long}
graphs = [pytest.param(*g, marks=marks[g in of_a_kind]) for g in graphs]


@pytest.mark.graphs
@pytest.mark.parametrize('name, labels', graphs)
def test_a_network_is_one_graph_forward_and_back(name, labels):
    net, x = made(name)
    net, x = net.double(), [v.double() if v is not None and v.is_floating_point() else v for v in x]
    kw = {} if labels == 'none' else dict(labels=of_labels[labels])
    torch._dynamo.reset()
    graph = torch.compile(net, fullgraph=True, backend='aot_eager')
    got = gradients(net, graph, x, **kw)
    for g, w in zip(got, gradients(net, net, x, **kw)):
        assert (g is None) == (w is None)
        if g is not None:
            assert_close(g, w, rtol=1e-6, atol=1e-9)


class Launches(TorchDispatchMode):
    "Counts the ops that would launch something on a GPU."

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = any(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        idle = func.is_view or name.startswith(('empty', 'new_empty', 'detach', '_unsafe_view'))
        self.n += made and not idle
        return out


most = {  # ops of a step without its optimiser; a routing is two
    'DStepNet': 47,
    'SmallNORBNet': 73,
    'PlainCNN': 40,
    'CapsNet': 118,
    'MatrixCapsNet': 60,
    'MatrixCapsNet gritzman': 72,
    'SSTNet packed': 51,
}


@pytest.mark.skipif('triton' not in plans, reason="triton is not installed")
@pytest.mark.parametrize('name', most)
def test_a_step_launches_no_more_than(name, monkeypatch):
    monkeypatch.setattr(triton_loop, '_refuse_here', lambda *where, most=0: '')
    net, given = networks[name]()
    for layer in net.modules():
        if isinstance(layer, Routing):
            layer.plan = 'triton'
    net, given = net.to('meta'), [x.to('meta') for x in given]
    labels = torch.zeros(len(given[0]), dtype=torch.long, device='meta')
    for _ in range(2):  # the first makes tables that are kept
        with Launches() as ops:
            loss = net(*given, labels)['loss']
            torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    assert ops.n == most[name]
