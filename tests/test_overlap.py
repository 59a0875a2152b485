"""Overlapping and affine digits: boxes by brute force, draws by name, losses by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytest.importorskip('sklearn')
from capsnb.lab.capsnet import CapsNet, CapsOut
from capsnb.lab.overlap import AffineDigits, MultiDigits, OverlapDeck, PairCapsNet
from capsnb.lab.overlap import _affine_maps, pair_classes, warp
from capsnb.lab.train import RunHooks, shift_images
from capsnb.lab.vision import Scores

from rooms import room

pytest.importorskip('datasets')
names = room('80_overlap')


@pytest.fixture(scope='module')
def digits():
    from capsnb.lab.digits import Digits

    return {split: Digits('digits').open(split) for split in ('train', 'validation', 'test')}


def box(image):
    "All pixels of the box around the ink, one after the other."
    ink = image.nonzero().tolist()
    rows, cols = zip(*ink)
    inside = range(min(rows), max(rows) + 1), range(min(cols), max(cols) + 1)
    return {(r, c) for r in inside[0] for c in inside[1]}


def test_overlap_of_boxes(digits):
    deck = OverlapDeck(digits['train'], 60, shift=2, size=12)
    placed = deck.__getitems__(list(range(60)))
    found = names['overlaps'](deck)
    for k, (one, other) in enumerate(placed['originals'][:, :, 0]):
        p, q = box(one), box(other)
        assert found['ink'][k].item() == pytest.approx(len(p & q) / min(len(p), len(q)))
    frames = torch.ones(60, 1, 8, 8)
    whole = OverlapDeck(dict(image=frames, label=torch.arange(60) % 10), 60, shift=2, size=12)
    both = (whole.__getitems__(list(range(60)))['originals'].sum(1) == 2).sum((1, 2, 3)) / 64
    assert_close(names['overlaps'](whole)['frames'].float(), both)


def test_a_pair_is_a_function_of_its_name(digits):
    kw = dict(shift=2, size=12)
    first, again = (OverlapDeck(digits['train'], n, (0, 7), **kw) for n in (1200, 1050))
    rows = [0, 3, 999, 1000, 1049]
    for key, value in first.__getitems__(rows).items():
        assert value.equal(again.__getitems__(rows)[key])
    assert first.mark() != again.mark()
    other = OverlapDeck(digits['train'], 1200, (0, 8), **kw)
    assert not other.pairs.equal(first.pairs) and not other.shifts.equal(first.shifts)
    low, high = first.classes[first.pairs].unbind(1)
    assert (low < high).all() and len(set(first.labels.tolist())) == 45
    assert pair_classes()[first.labels].equal(torch.stack([low, high], 1))
    batch = first.__getitems__(rows)
    assert batch['images'].equal(batch['originals'].sum(1).clamp(max=1))


def test_epochs_draw_anew_in_training_only(digits):
    task = MultiDigits('digits', n=200, n_held=50)
    train, held = task.deck('capsnet', 'train', seed=3), task.deck('capsnet', 'validation')
    began = train.pairs, held.pairs
    for deck in (train, held):
        deck.deal(1)
    assert not train.pairs.equal(began[0]) and held.pairs.equal(began[1])
    train.deal(0)
    assert train.pairs.equal(began[0])
    assert not task.deck('capsnet', 'train', seed=4).pairs.equal(began[0])


def test_test_digits_are_never_in_training(digits):
    task = MultiDigits('digits', n=400, n_held=200)
    used = {}
    for split, seed in (('train', 0), ('validation', None), ('test', None)):
        deck = task.deck('capsnet', split, seed)
        both = deck.__getitems__(list(range(len(deck))))['originals']
        home = [shift_images(both[:, k], -deck.shifts[:, k])[..., 2:-2, 2:-2] for k in (0, 1)]
        used[split] = {o.numpy().tobytes() for o in torch.cat(home)}
        assert used[split] <= {o.numpy().tobytes() for o in digits[split]['image']}
    affine = AffineDigits('digits', n=100, n_held=100)
    assert affine.deck('cnn', 'clean').digits.equal(digits['test']['image'])
    for split in ('validation', 'test'):
        assert not used['train'] & used[split]
    assert not used['validation'] & used['test']


def test_loss_on_two_targets_by_hand(monkeypatch):
    net = PairCapsNet(image_shape=(1, 12, 12), kernels=(3, 3), channels=2, n_types=1, recon=0.001)
    a = torch.full((1, 10), 0.1)
    a[0, 0], a[0, 2], a[0, 5] = 0.3, 0.7, 0.95
    monkeypatch.setattr(CapsNet, 'forward', lambda self, x: CapsOut(a, torch.zeros(1, 10, 16)))
    half = lambda v, share: 0.5 * share[..., 5, None, None, None].expand(*share.shape[:-1], 1, 2, 2)
    net.decoder, net.image_shape = None, (1, 2, 2)
    object.__setattr__(net, 'decoder', half)
    del net._modules['decoder']
    originals = torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)])[None]
    (number,) = (pair_classes() == torch.tensor([2, 5])).all(1).nonzero()
    found = net(torch.ones(1, 1, 2, 2), number, originals)
    margin = (0.9 - 0.7) ** 2 + 0.5 * (0.3 - 0.1) ** 2  # .95 and .1 cost nothing
    drawn = 0.0005 * (4 * 1.0 + 4 * 0.25)  # 2 drawn black where it is white, 5 grey for black
    assert found['loss'].item() == pytest.approx(margin + drawn, abs=1e-6)
    swapped = net(torch.ones(1, 1, 2, 2), number, originals.flip(1))
    assert swapped['loss'].item() == pytest.approx(margin + 0.0005 * 4 * 0.25, abs=1e-6)
    assert pair_classes()[found['logits'].argmax(1)].tolist() == [[2, 5]]


def test_warp_against_scipy():
    ndimage = pytest.importorskip('scipy.ndimage')
    x = torch.rand(1, 1, 11, 11)
    matrix = _affine_maps(torch.tensor([[0.9, 0.1, 0.8, 0.2]]))
    back, middle, shift = torch.linalg.inv(matrix[0]), torch.tensor([5.0, 5.0]), [0.7, -1.3]
    offset = middle - back @ (middle + torch.tensor(shift))
    kw = dict(order=1, mode='grid-constant', cval=0.0)
    want = ndimage.affine_transform(x[0, 0].double().numpy(), back.double().numpy(), offset, **kw)
    found = warp(x, matrix, torch.tensor([shift]))
    assert_close(found[0, 0].double(), torch.from_numpy(want), atol=1e-5, rtol=0)


class Known:
    "Pictures and labels."

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, rows):
        return dict(images=self.images[rows], labels=self.labels[rows])


class Upper(nn.Module):
    "Says 0 where the upper half is brighter, else 1."

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, images):
        halves = images.mean((1, 3)).chunk(2, -1)
        return Scores(self.w * torch.stack([h.mean(-1) for h in halves], -1))


def test_robustness_of_a_network_that_is_known():
    images, labels = torch.zeros(40, 1, 8, 8), torch.arange(40) % 2
    images[labels == 0, :, :4] = 1
    images[labels == 1, :, 4:] = 1
    deck = Known(images, labels)
    kinds = dict(rotation=(0, 180), scale=(1.0, 0.5), shift=(0, 1), noise=(0.0,), occlusion=(0.0,))
    found = names['robustness'](Upper(), deck, kinds, batch_size=16)
    assert found['rotation'] == {0: 1.0, 180: 0.0} and found['scale'] == {1.0: 1.0, 0.5: 1.0}
    assert found['shift'] == {0: 1.0, 1: 1.0} and found['noise'] == found['occlusion'] == {0.0: 1.0}


def test_training_ends_at_a_level():
    control = SimpleNamespace(should_training_stop=False)
    hook = RunHooks(None, '', None, None, level=0.9)
    for metrics in (dict(eval_accuracy=0.89), dict(watched_test_accuracy=1.0)):
        hook.on_evaluate(None, None, control, metrics)
        assert not control.should_training_stop
    hook.on_evaluate(None, None, control, dict(eval_accuracy=0.9))
    assert control.should_training_stop
    task = AffineDigits('digits', n=20, n_held=20, until=0.7)
    untils = [task.deck('cnn', split).until for split in ('train', 'validation', 'clean', 'test')]
    assert untils == [None, 0.7, None, None]
