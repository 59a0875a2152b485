"""What PyTorch's users do with a network: every network through every door."""

import copy
import io
import pickle
import pytest
import torch
from torch.testing import assert_close

from capsnb.core import seed_everything
from capsnb.lab.capsnet import CapsNet, EfficientCapsNet
from capsnb.lab.matrix_caps import MatrixCapsNet
from capsnb.lab.own import PlainTable, TableNet
from capsnb.lab.text import PlainText, RoutingText, SSTNet, VectorText
from capsnb.lab.vision import BaselineCNN, DStepNet, OnlyScores, PlainCNN, RoutingNet

trunk = dict(channels=(8, 8), strides=(2, 2))
caps = trunk | dict(n_types=4, n_parts=4)
narrow = dict(channels=8, kernels=(3, 3), n_types=2, decoder=(8, 8))
text = dict(d_depth=2, d_emb=8, n_classes=3, d_feat=8)
images = lambda side=16, channels=1: (torch.rand(2, channels, side, side),)
rows = lambda: (torch.randn(2, 4),)
same = dict(rtol=0, atol=0)


def hidden():
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return mask, torch.randn(2, 5, 2, 8)


networks = {
    'dstep': (lambda: DStepNet(**caps), images),
    'routing em': (lambda: RoutingNet(**caps, routing='em'), images),
    'routing self': (lambda: RoutingNet(**caps, routing='self', norm='batch'), images),
    'capsnet': (lambda: CapsNet(image_shape=(1, 16, 16), **narrow), images),
    'matrix-caps': (lambda: MatrixCapsNet(8, 2, 2, 2), lambda: images(32, 2)),
    'efficient': (lambda: EfficientCapsNet(), lambda: images(28)),
    'cnn': (lambda: PlainCNN(**trunk), images),
    'baseline': (lambda: BaselineCNN(in_channels=1, n_classes=10, size=32), lambda: images(32)),
    'sst': (lambda: SSTNet(**text, n_parts=4), hidden),
    'routing text': (lambda: RoutingText(**text, n_parts=4), hidden),
    'plain text': (lambda: PlainText(**text), hidden),
    'vector text': (lambda: VectorText(2, 8, n_parts=4), hidden),
    'table': (lambda: TableNet(4, 3), rows),
    'plain table': (lambda: PlainTable(4, 3), rows),
}
score = lambda net, given: net(*given)[0].detach()


@pytest.fixture(params=networks)
def case(request):
    "A network in evaluation mode, what it reads, and its scores."
    seed_everything(0)
    make, given = networks[request.param]
    net, x = make().eval(), given()
    return net, x, score(net, x), make


def test_copied_pickled_and_saved(case, tmp_path):
    "also after a forward and a backward pass; weights are read without pickled code"
    net, x, want, make = case
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    net.save_pretrained(tmp_path)
    seed_everything(1)
    other = make().eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    copies = [other, type(net).from_pretrained(tmp_path).eval()]
    for other in (*copies, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_close(score(other, x), want, **same)
    net.train()(*x)[0].float().square().sum().backward()
    assert score(pickle.loads(pickle.dumps(copy.deepcopy(net))).eval(), x).isfinite().all()


def test_made_without_memory_and_filled_later(case):
    net, x, want, make = case
    with torch.device('meta'):
        other = make()
    assert all(p.is_meta for p in other.parameters())
    other = other.to_empty(device='cpu').eval()
    other.load_state_dict(net.state_dict())
    assert_close(score(other, x), want, **same)
    abroad = copy.deepcopy(net).to('meta')
    assert all(t.is_meta for t in (*abroad.parameters(), *abroad.buffers()))


def test_the_order_of_memory_and_company_do_not_matter(case):
    net, x, want, _ = case
    alone = torch.cat([score(net, [t[k : k + 1] for t in x]) for k in range(2)])
    assert_close(alone, want, rtol=1e-4, atol=1e-5)
    if x[0].ndim == 4:
        last = dict(memory_format=torch.channels_last)
        found = score(copy.deepcopy(net).to(**last), (x[0].contiguous(**last),))
        assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_another_width(case, dtype):
    net, x, want, _ = case
    given = [t.to(dtype) if t.is_floating_point() else t for t in x]
    found = score(copy.deepcopy(net).to(dtype), given)
    close = {torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    size = want.abs().max().item()
    assert found.isfinite().all()
    assert_close(found.double(), want.double(), rtol=0, atol=close * max(1, size))


few = 'dstep', 'sst'  # the others before a release
kinds = [
    pytest.param(k, marks=getattr(pytest.mark, 'slow' if k in few else 'long')) for k in networks
]
some = pytest.mark.parametrize('case', kinds, indirect=True)


@some
@pytest.mark.graphs
def test_exported_and_in_onnx(case, tmp_path):
    net, x, want, _ = case
    with torch.no_grad():
        program = torch.export.export(OnlyScores(net).eval(), x)
        assert_close(program.module()(*x), want, rtol=1e-5, atol=1e-5)
    for name in ('onnx', 'onnxscript'):
        pytest.importorskip(name)
    ort = pytest.importorskip('onnxruntime')
    with torch.no_grad():
        program = torch.onnx.export(OnlyScores(net).eval(), x, dynamo=True, verbose=False)
    program.save(tmp_path / 'net.onnx')
    session = ort.InferenceSession(tmp_path / 'net.onnx', providers=['CPUExecutionProvider'])
    given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), x)}
    found = torch.from_numpy(session.run(None, given)[0])
    assert_close(found, want, rtol=1e-3, atol=1e-4)


@some
def test_explained_by_captum(case):
    "integrated gradients add up to the change of the score, for every network"
    attr = pytest.importorskip('captum.attr')
    net, x, _, _ = case
    *before, x = x
    scores = OnlyScores(net)
    forward = (lambda embs: scores(before[0][:1].expand(len(embs), -1), embs)) if before else scores
    ways = attr.IntegratedGradients(forward), attr.Saliency(forward)
    x, half = x[:1], x[:1] / 2  # at 0 the layer norm of hidden states has a step
    found, rest = ways[0].attribute(x, half, 1, n_steps=50, return_convergence_delta=True)
    assert found.shape == x.shape == ways[1].attribute(x, 1).shape
    change = (forward(x) - forward(half))[0, 1].item()
    assert found.sum().item() == pytest.approx(change, abs=0.01 * max(1, abs(change)))
    assert rest.abs().item() < 0.01 * max(1, abs(change))
