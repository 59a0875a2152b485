"NORB jittered-cluttered: files, damage, the task; Sabour's network on pictures of objects"

import struct
import pytest
import torch
from capsnb.data.norb import (
    Joined,
    check_labels,
    codes,
    instances,
    norb_name,
    open_norb,
    read_part,
    tiny_norb,
)
from capsnb.lab.objects import NORB, PairCrops, PairDeck, Toys
from capsnb.lab.photographs import Photographs
from capsnb.lab.tasks import evaluate, load_run, task_named, train

quiet = dict(device='cpu', progress=False)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    "no test finds the data or the cache of the machine it runs on"
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))


@pytest.fixture
def folder(tmp_path):
    return tiny_norb(tmp_path / 'norb', 27, azimuths=(0, 34), elevations=(0,))


def test_names_are_the_official_ones():
    assert norb_name('train', 3, 'dat') == 'norb-5x46789x9x18x6x2x108x108-training-03-dat.mat'
    assert norb_name('test', 2, 'info') == 'norb-5x01235x9x18x6x2x108x108-testing-02-info.mat'


def test_what_is_read_is_what_the_bytes_say(folder, tmp_path):
    whole = open_norb('train', folder, (2, 1), (), official=False)
    n = len(whole['category']) // 2
    for at, part in ((0, 2), (n, 1)):
        dat, cat, info = (
            (folder / norb_name('train', part, k)).read_bytes() for k in ('dat', 'cat', 'info')
        )
        for k in (0, 5, n - 1):
            pixels = dat[24 + k * 2 * 27**2 : 24 + (k + 1) * 2 * 27**2]
            assert bytes(whole['image'][[at + k]].flatten().tolist()) == pixels
            row = struct.unpack_from('<10i', info, 20 + 40 * k)
            assert struct.unpack_from('<i', cat, 20 + 4 * k)[0] == whole['category'][at + k]
            assert row[:4] == tuple(int(whole[name][at + k]) for name in list(codes)[1:])
            assert row[4:] == tuple(whole['jitter'][at + k].tolist())
    packed = tiny_norb(tmp_path / 'gz', 27, azimuths=(0, 34), elevations=(0,), gz=True)
    same = open_norb('train', packed, (2, 1), (), official=False)
    assert all(whole[k][:].equal(same[k][:]) for k in whole)
    assert repr(whole['image']) == repr(same['image'])
    other = open_norb('train', folder, (1, 2), (), official=False)
    assert repr(whole['image']) != repr(other['image'])


def test_no_toy_and_no_background_is_in_two_splits(folder):
    parts = [open_norb(k, folder, (1, 2), official=False) for k in ('train', 'validation')]
    assert [len(o['image']) for o in parts] == [96, 24]
    toys = [sorted(set(o['instance'].tolist())) for o in parts]
    assert toys == [[-1, 4, 6, 7, 8], [-1, 9]]
    assert [int((o['category'] == 5).sum()) for o in parts] == [16, 4]
    seen = [{o.numpy().tobytes() for o in part['image'][:]} for part in parts]
    assert not seen[0] & seen[1] and sum(map(len, seen)) == 120
    test = open_norb('test', folder, (1,), official=False)
    assert set(test['instance'].tolist()) == {-1, *instances['test']}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def put(path, at, value):
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack('<i', value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    'kind, change, message',
    [
        ('dat', cut, r'01-dat.mat byte 87503: expected 87,504 bytes .* got the end of the file'),
        ('info', cut, r'01-info.mat byte 2419: expected 2,420 bytes'),
        ('cat', lambda p: put(p, 0, 7), '01-cat.mat byte 0: expected a magic number'),
        ('cat', lambda p: put(p, 20, 6), r'01-cat.mat byte 20: expected category in \[0.* got 6'),
        ('info', lambda p: put(p, 20 + 40 * 5, 4), 'byte 220: expected instance -1 where there is'),
        ('info', lambda p: put(p, 20 + 40 * 7 + 8, 0), 'byte 48: row 7 has the same labels as row'),
    ],
)
def test_damage_is_named_with_its_byte(folder, kind, change, message):
    change(folder / norb_name('train', 1, kind))
    with pytest.raises(ValueError, match=message):
        read_part(folder, 'train', 1, official=False)


def test_what_is_missing_or_other_is_said(folder, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match='training-01-dat.mat and 29 other files of https:'):
        open_norb()
    (folder / norb_name('train', 2, 'cat')).unlink()
    assert len(open_norb('train', folder, (1,), (), official=False)['image']) == 60
    with pytest.raises(FileNotFoundError, match='found 5; norb-.*training-02-cat.mat is not'):
        open_norb('train', folder, (1, 2), official=False)
    with pytest.raises(ValueError, match=r'byte 8: expected sizes \[29160, 2, 108, 108\], got'):
        open_norb('train', folder, (1,))
    for parts in ((), (0,), (1, 1), (11,)):
        with pytest.raises(ValueError, match='parts: expected some of'):
            open_norb('train', folder, parts, official=False)
    with pytest.raises(ValueError, match='expected arrays of one size, got'):
        Joined([torch.zeros(1, 2), torch.zeros(1, 3)], torch.arange(2), '')
    monkeypatch.setenv('CAPSNB_DATA', str(folder.parent))
    assert len(open_norb('test', None, (1,), official=False)['image']) == 60


def test_the_task_from_files_to_result(tmp_path):
    sets = dict(train=range(1, 11), test=(1, 2))
    few = dict(elevations=(0, 3), azimuths=(0, 12), parts=dict(train=(1,), test=(1,)))
    tiny = tiny_norb(tmp_path / 'tiny', 36, **few)
    task = NORB(size=36, subset=100, official=False, folder=tiny)
    out = tmp_path / 'run'
    m = train(task, 'dstep', out, epochs=1, **quiet)
    assert {k: len(task.open(k)['category']) for k in ('train', 'validation')} == {
        'train': 80,
        'validation': 20,
    }
    found = evaluate(out, device='cpu', folder=tiny)  # finds the task by its name
    assert found['accuracy'] == m['test_accuracy'] and found['n'] == 100
    assert found['names'][5] == 'none' and len(found['confusion']) == 6
    assert list(found['by_degrees']['azimuth']) == [0, 120]  # no angle where there is no toy
    assert task.draw('dstep', load_run(out, 'cpu', task).network, tmp_path).is_file()
    assert task_named('norb').size == 108

    whole = NORB(size=36, official=False, folder=tmp_path / 'all')
    tiny_norb(whole.folder, 36, elevations=(0,), azimuths=(0,), parts=sets)
    found = whole.open('train')
    assert isinstance(found['images'], Joined) and len(found['images']) == 10 * 24
    deck = PairDeck(found)
    again = deck.mark()
    data = bytearray((whole.folder / norb_name('train', 10, 'dat')).read_bytes())
    data[-1] ^= 1
    (whole.folder / norb_name('train', 10, 'dat')).write_bytes(data)
    assert PairDeck(whole.open('train')).mark() != again == deck.mark()
    for task, message in (
        (NORB(size=32, official=False, folder=whole.folder), '36 pixels, got size=32'),
        (NORB(size=36, subset={}, folder=whole.folder), 'subset must be an integer >= 1'),
    ):
        with pytest.raises(ValueError, match=message):
            task.open('test')


def test_sabours_network_learns_and_comes_back(tmp_path):
    task = Toys(size=48, subset=40, cache=tmp_path / 'toys')
    narrow = dict(channels=16, n_types=4)
    usual = dict(epochs=2, options=narrow, warmup=0.0, **quiet)
    m = train(task, 'capsnet', tmp_path / 'run', lr=(5e-3, 5e-3), **usual)
    assert m['history'][-1]['loss'] < m['history'][0]['loss']
    network = load_run(tmp_path / 'run', 'cpu', task).network
    assert network.image_shape == (2, 32, 32) and network.decoder is None
    x = task.open('test')
    middle = PairCrops(48).views(x['images'])[0]
    with torch.no_grad():
        right = network(middle).a.argmax(1) == x['category']
    assert evaluate(tmp_path / 'run', task=task, **quiet)['accuracy'] == right.double().mean()
    (view,) = task.views(network, None, x)
    assert view['images'].equal(middle)
    published = Toys(size=48, published=True)
    assert published.recipe('capsnet') == task.recipe('capsnet') | dict(lr=(1e-5, 1e-3))
    lit = [o.collator('capsnet').contrast for o in (task, published)]
    assert lit == [0.5, 0.0]
    assert published.make('capsnet').W.shape == (2048, 5, 8, 16)
    assert Photographs(colour=True).make('capsnet').image_shape == (3, 32, 32)
    assert Photographs().make('capsnet').W.shape[1] == 8


def test_rows_of_labels_keep_their_numbers():
    "pairs without a toy are left out of the check, but counted in its messages"
    columns = dict(zip(codes, torch.tensor([[0, 4, 0, 0, 0]] * 2).T))
    with pytest.raises(ValueError, match='row 9: row 9 has the same labels as row 3'):
        check_labels(columns, rows=torch.tensor([3, 9]))
