"ETH-80: what is missing, wrong or damaged is named; folds, viewpoints, the task; the real files."

import contextlib
import itertools
import os
import random
import shutil
import struct
import zlib
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

image = pytest.importorskip('PIL.Image')
from capsnb import load_eth80
from capsnb.data import views
from capsnb.data.views import eth80_images, find_eth80, list_eth80
from capsnb.data.views import n_photos, object_split, open_eth80, tiny_eth80, viewpoints
from capsnb.data.files import cache_folder
from capsnb.lab.objects import Photographs


pytestmark = pytest.mark.usefixtures('no_machine')


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    return tiny_eth80(tmp_path_factory.mktemp('data') / 'eth80', size=8)


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('cache')


@pytest.fixture(scope='module')
def data(drawn):
    return open_eth80(drawn)


@contextlib.contextmanager
def changed(path, content=None):
    "A file with other bytes, or none, and as it was again."
    before, times = path.read_bytes(), os.stat(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def png(path, size, mode='RGB', **kw):
    "Bytes of a picture of one colour."
    image.new(mode, size, **kw).save(path, 'PNG')
    return path.read_bytes()


# ---- names and places ----


def test_all_ways_to_name_a_folder(drawn, monkeypatch, tmp_path):
    for named in (drawn, str(drawn.parent)):
        monkeypatch.setenv('CAPSNB_DATA', str(named))
        assert find_eth80(named) == find_eth80() == drawn
    monkeypatch.setenv('CAPSNB_DATA', str(tmp_path / 'other'))
    cache_folder('eth80').parent.mkdir(parents=True)
    cache_folder('eth80').symlink_to(drawn)
    assert find_eth80() == cache_folder('eth80')
    said = 'expected ETH-80 in one of .*other/eth80.*1/1/apple1-000-000.png.*CAPSNB_DATA'
    with pytest.raises(FileNotFoundError, match=said):
        find_eth80(tmp_path / 'other')  # who names a folder gets no other


# ---- missing, wrong and damaged files ----

one = '1/1/apple1-066-027.png'
faults = [
    (['3/4/cow4-066-027.png'], {}, '1 of 3,280 photographs are missing: cow4-066-027'),
    (['3/4/maps/cow4-066-027-map.png'], {}, '1 of 3,280 masks are missing: cow4-066-027-map'),
    ([], {'1/1/pear1-066-027.png': one}, "pear1-066-027.png: .* '.*1/1' already"),
    ([], {'2/11/car15-066-027.png': one}, r'expected 10 objects of car, got 11'),
]


@pytest.mark.parametrize('gone, more, said', faults, ids=range(len(faults)))
def test_what_is_missing_or_wrong_is_named(drawn, gone, more, said):
    with contextlib.ExitStack() as undo:
        for name in gone:
            undo.enter_context(changed(drawn / name))
        for new, old in more.items():
            undo.callback((drawn / new).unlink)
            (drawn / new).parent.mkdir(exist_ok=True)
            shutil.copy(drawn / old, drawn / new)
        with pytest.raises(ValueError, match=said):
            list_eth80(drawn)


@pytest.mark.slow
def test_without_masks_only_the_background_stays(tmp_path):
    bare = tiny_eth80(tmp_path / 'eth80', 12, masks=False)
    data, rows = open_eth80(bare), torch.arange(3)
    assert 'mask' not in data and data['image'].shape == (n_photos, 3, 12, 12)
    assert eth80_images(data, rows, 5).shape == (3, 1, 5, 5)
    with pytest.raises(ValueError, match="'masked' needs masks .* has none"):
        eth80_images(data, rows, 4, background='masked')
    assert 'mask' not in load_eth80(bare)['test'].column_names
    with pytest.raises(ValueError, match='no smaller than 13, the photographs have 12x12'):
        eth80_images(data, rows, 13)


@pytest.fixture(scope='module')
def whole(drawn):
    return (drawn / '1' / '1' / 'apple1-045-090.png').read_bytes()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_no_changed_byte_passes_unseen(tmp_path_factory, whole, data):
    path = tmp_path_factory.mktemp('png') / 'dog'
    path.write_bytes(whole)
    good = views._read_png(path, 'RGB')
    at, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    for content in (whole[:at] + bytes([byte]) + whole[at + 1 :], whole[:at]):
        path.write_bytes(content)
        try:
            seen = views._read_png(path, 'RGB')
        except ValueError as e:
            assert 'dog: damaged PNG' in str(e)
        else:  # a byte of the last chunk, which holds nothing
            assert seen.equal(good) and (content == whole or at >= len(whole) - 12)


def test_damage_is_named_by_file(drawn, whole):
    "a header of a huge picture costs nothing"
    head = b'IHDR' + struct.pack('>IIBBBBB', 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    huge = b'\x89PNG\r\n\x1a\n\0\0\0\x0d' + head + struct.pack('>I', zlib.crc32(head)) + whole[-12:]
    for content in (b'', b'GIF89a..', whole[:33] + whole[-12:], huge):
        with changed(drawn / '1' / '1' / 'apple1-045-090.png', content):
            with pytest.raises(ValueError, match='apple1-045-090.png.*damaged PNG'):
                open_eth80(drawn)


@pytest.mark.parametrize('name', ['apple1-045-090.png', 'maps/apple1-045-090-map.png'])
def test_mixed_sizes_are_named(drawn, tmp_path, name):
    with changed(drawn / '1' / '1' / name, png(tmp_path / 'other', (9, 8))):
        with pytest.raises(ValueError, match=f'{name}: expected 8x8 pixels .*, got 9x8'):
            open_eth80(drawn)


# ---- the packed copy ----


@pytest.mark.slow
def test_photographs_are_read_once(drawn, monkeypatch, tmp_path):
    data = open_eth80(drawn)
    with monkeypatch.context() as m:
        m.setattr(views, '_read_png', None)
        assert all(open_eth80(drawn)[name].equal(x) for name, x in data.items())
    row = viewpoints.index((45, 90))  # but one that was changed is seen
    with changed(drawn / '1' / '1' / 'apple1-045-090.png', png(tmp_path / 'black', (8, 8))):
        assert open_eth80(drawn)['image'][row].sum() == 0


# ---- splits and pictures ----


def test_a_new_background_depends_on_nothing_but_the_photograph(data):
    def look(rows, seed=0):
        return eth80_images(data, torch.tensor(rows), 8, True, 'replaced', seed)

    one, two = look([7, 300, 7]), look([300])
    assert one[1].equal(two[0]) and one[0].equal(one[2])
    inside = data['mask'][7].expand(3, -1, -1)
    assert not look([7], seed=1)[0][~inside].equal(one[0][~inside])
    assert not look([8])[0][~inside].equal(one[0][~inside])
    assert one[0][inside].equal(data['image'][7][inside])


def test_grey_is_that_of_pillow(data):
    rows = torch.arange(0, n_photos, 97)
    mine = eth80_images(data, rows, 8)[:, 0]
    for x, row in zip(mine, rows):
        pil = image.fromarray(data['image'][row].movedim(0, -1).contiguous().numpy()).convert('L')
        theirs = torch.tensor(list(pil.tobytes())).view(8, 8)
        assert_close(x.long(), theirs, rtol=0, atol=1)


@pytest.mark.slow
def test_the_data_set_shows_the_same(drawn, data):
    loaded = load_eth80(drawn, fold=3, folds=5)
    assert {k: len(v) for k, v in loaded.items()} == dict(train=2296, validation=328, test=656)
    rows = object_split(data, 3, 5)['test'].nonzero().flatten()
    for k in random.Random(0).sample(range(len(rows)), 20):
        one = loaded['test'][k]
        pixels = bytes(data['image'][rows[k]].movedim(0, -1).flatten().tolist())
        assert one['image'].convert('RGB').tobytes() == pixels
        labels = ('category', 'instance', 'polar', 'azimuth')
        assert all(one[name] == data[name][rows[k]] for name in labels)
    assert load_eth80(drawn, 'validation')[0]['instance'] == 1
    with pytest.raises(ValueError, match='split must be None or one of train'):
        load_eth80(drawn, 'valid')


# ---- the task ----


def small(drawn, cache, **options):
    task = Photographs(**{**dict(size=8, folder=drawn, cache=cache), **options})
    task.progress = False
    return task


@pytest.mark.slow
def test_what_is_tested_chooses_nothing(drawn, cache):
    for by, folds, fold in itertools.product((None, 'azimuth', 'polar'), (2, 10), (0, 1)):
        task = small(drawn, cache, by=by, folds=folds, fold=fold)
        rows = {s: set(task.rows(s).tolist()) for s in ('train', 'validation', 'test')}
        objects = {s: {k // 41 for k in o} for s, o in rows.items()}
        for a, b in itertools.combinations(objects.values(), 2):
            assert not a & b
        both = set(task.rows('train+validation').tolist())
        assert both == rows['train'] | rows['validation']
        if by:
            familiar = set(task.rows('familiar').tolist())
            assert {k // 41 for k in familiar} == objects['test'] and not familiar & rows['test']
            known = {k % 41 for k in both | familiar}
            assert len(known) == (13 if by == 'azimuth' else 16)
            assert not known & {k % 41 for k in rows['test']}
    with pytest.raises(ValueError, match="'test', got 'familiar'"):
        small(drawn, cache).open('familiar')
