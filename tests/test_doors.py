"""What PyTorch's users do with a network: every network through every door."""

import copy
import io
import pickle
import pytest
import torch

pytest.importorskip('transformers')
from capsnb.core import seed_everything
from capsnb.lab.capsnet import CapsNet
from capsnb.lab.efficient import EfficientCapsNet
from capsnb.lab.matrix_caps import MatrixCapsNet
from capsnb.lab.routing_net import PlainText, RoutingNet, RoutingText, VectorText
from capsnb.lab.text import SSTNet
from capsnb.lab.vision import BaselineCNN, DStepNet, OnlyScores, PlainCNN
from capsnb.lab.language import LanguageModel
from capsnb.lab.own import PlainTable, TableNet

trunk = dict(channels=(8, 8), strides=(2, 2))
text = dict(d_depth=2, d_emb=8, n_classes=3, d_feat=8)
small = dict(d_key=4, d_part=4, n_wholes=2, d_whole=4)
lm = dict(mixers=('self-attention', 'dstep'), d_emb=16, n_ctx=8, block=small)


def images(n, side=16, channels=1):
    return lambda: (torch.rand(n, channels, side, side),)


def hidden():
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return mask, torch.randn(2, 5, 2, 8)


networks = {
    'dstep': (lambda: DStepNet(**trunk, n_types=4, n_parts=4), images(2)),
    'routing em': (lambda: RoutingNet(**trunk, n_types=4, n_parts=4, routing='em'), images(2)),
    'routing self': (
        lambda: RoutingNet(**trunk, n_types=4, n_parts=4, routing='self', norm='batch'),
        images(2),
    ),
    'capsnet': (
        lambda: CapsNet(
            image_shape=(1, 16, 16), channels=8, kernels=(3, 3), n_types=2, decoder=(8, 8)
        ),
        images(2),
    ),
    'matrix-caps': (lambda: MatrixCapsNet(8, 2, 2, 2), images(2, 32, 2)),
    'efficient': (lambda: EfficientCapsNet(), images(2, 28)),
    'cnn': (lambda: PlainCNN(**trunk), images(2)),
    'baseline': (lambda: BaselineCNN(in_channels=1, n_classes=10, size=32), images(2, 32)),
    'sst': (lambda: SSTNet(**text, n_parts=4), hidden),
    'routing text': (lambda: RoutingText(**text, n_parts=4), hidden),
    'plain text': (lambda: PlainText(**text), hidden),
    'vector text': (lambda: VectorText(text['d_depth'], text['d_emb'], n_parts=4), hidden),
    'language': (lambda: LanguageModel(20, **lm), lambda: (torch.arange(16).view(2, 8),)),
    'words': (
        lambda: LanguageModel(20, **lm | dict(head='dstep')),
        lambda: (torch.arange(16).view(2, 8),),
    ),
    'table': (lambda: TableNet(4, 3), lambda: (torch.randn(2, 4),)),
    'plain table': (lambda: PlainTable(4, 3), lambda: (torch.randn(2, 4),)),
}


def score(net, given):
    out = net(*given)
    return (out.a if hasattr(out, 'a') else out[0]).detach()


@pytest.fixture(params=networks)
def case(request):
    "A network in evaluation mode, what it reads, and its scores."
    seed_everything(0)
    make, given = networks[request.param]
    net = make().eval()
    x = given()
    return net, x, score(net, x), make


def test_deepcopy_and_pickle_after_a_forward_and_a_backward_pass(case):
    net, x, want, _ = case
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    out = net.train()(*x)
    (out.a if hasattr(out, 'a') else out[0]).float().square().sum().backward()
    copies.append(pickle.loads(pickle.dumps(copy.deepcopy(net))).eval())
    for other in copies[:2]:
        torch.testing.assert_close(score(other, x), want, rtol=0, atol=0)
    assert score(copies[2], x).isfinite().all()


def test_weights_are_saved_and_read_without_pickled_code(case):
    net, x, want, make = case
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    seed_everything(1)
    other = make().eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(score(other, x), want, rtol=0, atol=0)


def test_made_without_memory_and_filled_later(case):
    net, x, want, make = case
    with torch.device('meta'):
        other = make()
    assert all(p.is_meta for p in other.parameters())
    other = other.to_empty(device='cpu').eval()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(score(other, x), want, rtol=0, atol=0)
    abroad = copy.deepcopy(net).to('meta')
    assert all(t.is_meta for t in (*abroad.parameters(), *abroad.buffers()))


def test_the_order_of_memory_does_not_matter(case):
    net, x, want, _ = case
    if x[0].ndim != 4:
        pytest.skip('no pictures')
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)
    found = score(other, (x[0].contiguous(memory_format=torch.channels_last),))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_another_width(case, dtype):
    net, x, want, _ = case
    other = copy.deepcopy(net).to(dtype)
    given = [t.to(dtype) if t.is_floating_point() else t for t in x]
    found = score(other, given)
    close = {torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    size = want.abs().max().item()
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), want.double(), rtol=0, atol=close * max(1, size))


def test_saved_and_read_as_on_the_hub(case, tmp_path):
    net, x, want, _ = case
    net.save_pretrained(tmp_path)
    other = type(net).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(score(other, x), want, rtol=0, atol=0)


@pytest.mark.graphs
def test_exported(case):
    net, x, want, _ = case
    with torch.no_grad():
        program = torch.export.export(OnlyScores(net).eval(), x)
        torch.testing.assert_close(program.module()(*x), want, rtol=1e-5, atol=1e-5)


def test_a_sample_alone_is_read_as_in_a_batch(case):
    net, x, want, _ = case
    alone = torch.cat([score(net, [t[k : k + 1] for t in x]) for k in range(2)])
    torch.testing.assert_close(alone, want, rtol=1e-4, atol=1e-5)


@pytest.mark.graphs
def test_in_onnx(case, tmp_path):
    net, x, want, _ = case
    for name in ('onnx', 'onnxscript'):
        pytest.importorskip(name)
    ort = pytest.importorskip('onnxruntime')
    place = tmp_path / 'net.onnx'
    with torch.no_grad():
        program = torch.onnx.export(OnlyScores(net).eval(), x, dynamo=True, verbose=False)
    program.save(place)
    session = ort.InferenceSession(place, providers=['CPUExecutionProvider'])
    given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), x)}
    found = torch.from_numpy(session.run(None, given)[0])
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_explained_by_captum(case):
    "integrated gradients add up to the change of the score, for every network"
    attr = pytest.importorskip('captum.attr')
    net, x, _, _ = case
    if not x[-1].is_floating_point():
        pytest.skip('words have no gradient')
    *before, x = x
    score = OnlyScores(net)
    forward = (lambda embs: score(before[0][:1].expand(len(embs), -1), embs)) if before else score
    ways = attr.IntegratedGradients(forward), attr.Saliency(forward)
    x, half = x[:1], x[:1] / 2  # at 0 the layer norm of hidden states has a step
    found, rest = ways[0].attribute(x, half, 1, n_steps=50, return_convergence_delta=True)
    assert found.shape == x.shape == ways[1].attribute(x, 1).shape
    change = (forward(x) - forward(half))[0, 1].item()
    assert found.sum().item() == pytest.approx(change, abs=0.01 * max(1, abs(change)))
    assert rest.abs().item() < 0.01 * max(1, abs(change))


def test_a_run_in_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    pytest.importorskip('sklearn')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from capsnb.lab.tasks import train

    how = dict(epochs=2, device='cpu', progress=False, report_to='tensorboard')
    m = train('digits', 'cnn', tmp_path / 'run', 0, **how)
    (file,) = (tmp_path / 'run').rglob('events.out.tfevents.*')
    events = EventAccumulator(str(file.parent)).Reload()
    found = [e.value for e in events.Scalars('eval/accuracy')]
    want = [h['valid_accuracy'] for h in m['history']]
    assert found == pytest.approx(want) and len(found) == 2
    assert {'train/loss', 'train/learning_rate'} <= set(events.Tags()['scalars'])
