"Damaged files, the Hub by proxy, downloads, labels, NORB 108; the rest is in nbs/data/35_views."

import gzip
import hashlib
import io
import shutil
import struct
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.data import views
from capsnb.data.views import as_tensors, codes, instances, load_smallnorb, magics
from capsnb.data.views import norb_files, norb_name, open_norb, open_smallnorb
from capsnb.data.views import read_matrix, read_split, tiny_norb, tiny_smallnorb
from capsnb.data.views import write_matrix
from web import Web, served

datasets = pytest.importorskip('datasets')
few = settings(max_examples=60, deadline=None, derandomize=True)
names = [o.name for o in norb_files.values()]


def equal(a, b):
    assert_close(dict(a), dict(b), rtol=0, atol=0)


@pytest.fixture(autouse=True)
def no_web(no_machine, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'hf'))
    monkeypatch.setattr(views, 'site', 'http://127.0.0.1:1/')


def cards(folder, **kw):
    few = dict(size=8, elevations=(0, 4), azimuths=(0, 20), lightings=(1,))
    return tiny_smallnorb(folder, **few | kw)


@pytest.fixture
def plain(tmp_path):
    return cards(tmp_path / 'plain')


@pytest.fixture
def packed(tmp_path):
    return cards(tmp_path / 'packed', gz=True)


@pytest.fixture
def as_official(monkeypatch, plain, packed):
    "makes the test cards the official files"
    for key, o in list(norb_files.items()):
        raw, gz = (plain / o.name).read_bytes(), (packed / f'{o.name}.gz').read_bytes()
        sums = hashlib.sha256(gz).hexdigest(), hashlib.md5(raw).hexdigest()
        mine = views.NorbFile(o.name, len(gz), *sums, len(raw))
        monkeypatch.setitem(norb_files, key, mine)


# ---- one matrix ----

kinds, seeds = dict(zip(magics.values(), 'fdiBh')), st.integers(0, 2**32)


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.sampled_from([*kinds]), seeds)
def test_reads_what_was_written(tmp_path_factory, shape, dtype, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e4
    x = x.clamp(0, 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    path = write_matrix(tmp_path_factory.mktemp('m') / 'x.mat', x)
    assert_close(read_matrix(path), x, rtol=0, atol=0)
    data = path.read_bytes()  # and an independent reader, word by word
    kind, n, *dims = struct.unpack_from(f'<{2 + max(len(shape), 3)}I', data)
    assert magics[kind] == dtype and n == len(shape) and dims == shape + [1] * (3 - n)
    elements = struct.unpack_from(f'<{x.numel()}{kinds[dtype]}', data, 8 + 4 * len(dims))
    assert list(elements) == x.flatten().tolist()


def test_every_cut_and_every_bit_of_a_small_file(tmp_path):
    x = torch.arange(6, dtype=torch.int32).view(2, 3)
    whole, path = write_matrix(tmp_path / 'x.mat', x).read_bytes(), tmp_path / 'y.mat'
    spoilt = [whole[:n] for n in range(len(whole))] + [whole + b'\0']
    for bit in range(8 * 20):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        if bit != 8 * 4:  # two dimensions or three: the stored 1 may be meant
            spoilt.append(data)
    for data in spoilt:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r'y.mat byte \d+: expected'):
            read_matrix(path)


@pytest.mark.parametrize('official', [False, True])
def test_a_bomb_is_not_unpacked_to_its_end(packed, as_official, official):
    shape = (5000, 2, 200, 200) if official else (1, 2, 8, 8)
    with gzip.open(path := packed / f'{names[0]}.gz', 'wb', compresslevel=1) as f:
        f.write(struct.pack('<6I', 0x1E3D4C55, 4, *shape))
        for _ in range(50):
            f.write(bytes(1_000_000))
    path.write_bytes(path.read_bytes()[:-9])  # whoever reads to the end finds that it has none
    said = 'byte 4: expected sizes that fill' if official else 'expected the end of the file after'
    with pytest.raises(ValueError, match=said):
        read_split(packed, 'train', official)


# ---- files that do not belong together ----


@pytest.mark.parametrize('a, b', [(0, 1), (1, 2), (2, 1), (0, 3)])
def test_the_wrong_file_under_a_name(plain, as_official, a, b):
    shutil.copy(plain / names[b], plain / names[a])
    if b != 3:  # only a checksum can tell the other split's pixels
        with pytest.raises(ValueError, match=f'{names[a]} byte [04]: expected'):
            read_split(plain, 'train', official=False)
    said = 'expected MD5 .* in this format' if b == 3 else 'byte 4: expected sizes that fill'
    with pytest.raises(ValueError, match=f'{names[a]}:? {said}'):
        read_split(plain, 'train')


# ---- labels ----

factors = [torch.tensor(list(o)) for o in codes.values()]
factors[1] = torch.tensor(instances['train'])
every = dict(zip(codes, torch.cartesian_prod(*factors).T))
anything = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40)


@few
@given(st.sampled_from(list(codes)), st.integers(0, 24_299), anything)
def test_no_label_of_a_whole_split_can_be_changed_unnoticed(name, row, to):
    columns = {**every, name: every[name].clone()}
    columns[name][row] = to
    if to == every[name][row] or name == 'instance' and to in instances['test']:
        views._check_labels(columns, 'here')  # a toy of the other split: the checksum's business
    else:
        with pytest.raises(ValueError, match=r'row \d+'):
            views._check_labels(columns, 'here')


# ---- where they are ----


@pytest.mark.parametrize('gz', [False, True])
def test_names_need_not_say_whether_a_file_is_zipped(plain, packed, gz):
    "browsers unpack a file and keep its name, or the other way round"
    folder = packed if gz else plain
    for p in list(folder.iterdir()):
        p.rename(p.with_name(p.name[:-3] if gz else f'{p.name}.gz'))
    assert len(open_smallnorb('train', folder, (), official=False)['image']) == 100


def test_download_goes_on_where_it_broke_off(packed, plain, as_official, monkeypatch):
    class Here(Web):
        asked, breaks = [], 1

        def do_GET(self):
            self.body = (packed / self.path[1:]).read_bytes()
            super().do_GET()

    size = norb_files['train', 'dat'].size
    with served(Here) as address:
        monkeypatch.setattr(views, 'site', f'{address}/')
        said = rf'broke off after {size // 3:,} of {size:,} bytes'
        with pytest.raises(ConnectionError, match=said):
            open_smallnorb()
        equal(open_smallnorb('train', valid_instances=()), read_split(plain, 'train'))
        assert Here.asked == [None, f'bytes={size // 3}-', None, None]  # each once


# ---- the data set ----


@pytest.fixture
def parquet(plain, tmp_path):
    def write(change=lambda rows: rows, splits=('train', 'test')):
        folder = tmp_path / 'parquet'
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for split in splits:
            rows = change(load_smallnorb(plain, split, (), official=False).to_list())
            kinds = {k: datasets.Value('int64') for k in rows[0]}
            kinds |= dict.fromkeys(('image_lt', 'image_rt'), datasets.Image())
            part = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
            part.to_parquet(str(folder / f'{split}-00000-of-00001.parquet'))
        return folder

    return write


def test_a_copy_in_parquet(plain, parquet, as_official):
    for split, part in load_smallnorb(f'hub:{parquet()}').items():
        equal(as_tensors(part), open_smallnorb(split, plain, official=False))
        assert part.features == load_smallnorb(plain, split, official=False).features


def one_pixel(rows):
    from PIL import Image

    image = Image.open(io.BytesIO(rows[7]['image_rt']['bytes']))
    image.putpixel((1, 2), image.getpixel((1, 2)) ^ 1)
    image.save(out := io.BytesIO(), 'PNG')
    rows[7]['image_rt'] = dict(bytes=out.getvalue(), path=None)
    return rows


copies = {
    'lacks azimuth': lambda rows: [{k: o[k] for k in o if k != 'azimuth'} for o in rows],
    'split train, -dat: expected MD5': one_pixel,
    'split train, -info: expected MD5': lambda rows: rows[::-1],
}


@pytest.mark.parametrize('said', copies)
def test_a_copy_that_is_not_one(parquet, as_official, said):
    with pytest.raises(ValueError, match=said):
        load_smallnorb(f'hub:{parquet(copies[said])}')


def test_the_copy_on_the_hub_is_pinned(monkeypatch):
    asked = []
    monkeypatch.setattr(views, 'load_hub', lambda *args: asked.append(args) or {})
    for name in ('', views.hub_name, 'who/else'):
        with pytest.raises(ValueError, match='expected the splits'):
            load_smallnorb(f'hub:{name}')
    assert asked == [(views.hub_name, views.hub_revision)] * 2 + [('who/else',)]


# ---- jittered and cluttered ----


@pytest.fixture
def folder(tmp_path):
    return tiny_norb(tmp_path / 'norb', 27, azimuths=(0, 34), elevations=(0,))


def test_what_is_read_is_what_the_bytes_say(folder):
    whole = open_norb('train', folder, (2, 1), (), official=False)
    n = len(whole['category']) // 2
    for at, part in ((0, 2), (n, 1)):
        paths = [folder / norb_name('train', part, k) for k in ('dat', 'cat', 'info')]
        dat, cat, info = (path.read_bytes() for path in paths)
        for k in (0, 5, n - 1):
            pixels = dat[24 + k * 2 * 27**2 : 24 + (k + 1) * 2 * 27**2]
            assert bytes(whole['image'][at + k].flatten().tolist()) == pixels
            row = struct.unpack_from('<10i', info, 20 + 40 * k)
            assert struct.unpack_from('<i', cat, 20 + 4 * k)[0] == whole['category'][at + k]
            assert row[:4] == tuple(int(whole[name][at + k]) for name in list(codes)[1:])
            assert row[4:] == tuple(whole['jitter'][at + k].tolist())


def test_no_toy_and_no_background_is_in_two_splits(folder):
    parts = [open_norb(k, folder, (1, 2), official=False) for k in ('train', 'validation')]
    assert [len(o['image']) for o in parts] == [96, 24]
    toys = [sorted(set(o['instance'].tolist())) for o in parts]
    assert toys == [[-1, 4, 6, 7, 8], [-1, 9]]
    assert [int((o['category'] == 5).sum()) for o in parts] == [16, 4]
    seen = [{o.numpy().tobytes() for o in part['image']} for part in parts]
    assert not seen[0] & seen[1] and sum(map(len, seen)) == 120
    test = open_norb('test', folder, (1,), official=False)
    assert set(test['instance'].tolist()) == {-1, *instances['test']}
    with pytest.raises(FileNotFoundError, match='training-01-dat.mat and 29 other files of https:'):
        open_norb()
    (folder / norb_name('train', 2, 'cat')).unlink()
    assert len(open_norb('train', folder, (1,), (), official=False)['image']) == 60
    with pytest.raises(FileNotFoundError, match='found .*training-02-dat'):
        open_norb('train', folder, (1, 2), official=False)
