"CIFAR-10's files of both kinds: damage, hostile pickles, sources that agree, the task."

import hashlib
import pickle
import struct
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from typer.testing import CliRunner
from capsnb import load_cifar10
from capsnb.data import cifar, files
from capsnb.cli import make_app
from capsnb.data.cifar import (
    batch_md5s,
    batch_names,
    cifar_names,
    format_records,
    open_cifar10,
    parse_pickle,
    parse_records,
    read_cifar10,
    tiny_cifar10,
)
from capsnb.lab.digits import Pictures
from capsnb.lab.tasks import evaluate, load_run, task_named, train

try:
    real_folder = files.find_folder(
        'cifar10', batch_names, None, ('cifar-10-batches-bin', 'cifar-10-batches-py'), ('.bin', '')
    )
except FileNotFoundError:
    real_folder = None


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    "no test finds the data or the cache of the machine it runs on"
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))


@pytest.fixture
def folder(tmp_path):
    return tiny_cifar10(tmp_path / 'cifar-10-batches-bin', 12)


def short(text):
    return b'U' + bytes([len(text)]) + text.encode()


def int4(n):
    return b'J' + struct.pack('<i', n)


def as_python_2(x, y, kind='training batch 1 of 5'):
    "A batch in the bytes that cPickle of Python 2 wrote (protocol 2), opcode by opcode."
    n, pixels = len(y), x.flatten(1).numpy().tobytes()
    labels = b']q\x06(' + b''.join(b'K' + bytes([k]) for k in y.tolist()) + b'e'
    made = b'cnumpy.core.multiarray\n_reconstruct\nq\x08cnumpy\nndarray\nq\x09'
    made += b'K\x00\x85q\x0a' + short('b') + b'\x87q\x0bRq\x0c'
    dtype = b'cnumpy\ndtype\nq\x0d' + short('u1') + b'K\x00K\x01\x87q\x0eRq\x0f'
    dtype += b'(K\x03' + short('|') + b'NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb'
    state = b'(K\x01' + int4(n) + int4(3072) + b'\x86q\x10' + dtype + b'\x89'
    state += b'T' + struct.pack('<i', len(pixels)) + pixels + b'tb'
    names = b']q\x11(' + b''.join(map(short, (f'{k}.png' for k in range(n)))) + b'e'
    items = short('batch_label') + short(kind) + short('labels') + labels
    items += short('data') + made + state + short('filenames') + names
    return b'\x80\x02}q\x01(' + items + b'u.'


@pytest.fixture
def pickled(folder, tmp_path):
    "the same pictures, as Python 2 pickled them"
    out = tmp_path / 'other' / 'cifar-10-batches-py'
    out.mkdir(parents=True)
    for name in batch_names:
        xy = parse_records((folder / f'{name}.bin').read_bytes())
        (out / name).write_bytes(as_python_2(*xy))
    return out


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        for name in a[k]:
            assert a[k][name].dtype == b[k][name].dtype and a[k][name].equal(b[k][name])


def test_both_kinds_of_files_and_all_ways_to_name_them(folder, pickled, monkeypatch):
    few = dict(n_valid=20, official=False)
    want = open_cifar10(folder, **few)
    assert {k: v['image'].shape for k, v in want.items()} == {
        'train': (40, 3, 32, 32),
        'validation': (20, 3, 32, 32),
        'test': (12, 3, 32, 32),
    }
    same(open_cifar10(pickled, **few), want)
    same(open_cifar10(pickled.parent, **few), want)
    monkeypatch.setenv('CAPSNB_DATA', str(folder.parent))
    same(open_cifar10(**few), want)
    data = load_cifar10(**few)
    for k, part in want.items():
        assert data[k].features['label'].names == list(cifar_names)
        assert data[k]['image'][:].equal(part['image']) and data[k]['label'][:].equal(part['label'])
    assert list(open_cifar10(n_valid=0, official=False)) == ['train', 'test']


def test_nothing_is_lost_or_twice(folder):
    parts = open_cifar10(folder, 20, official=False)
    (x, y), _ = read_cifar10(folder, official=False).values()
    rows = lambda x, y: sorted(
        (*y.tolist(), hash(o.numpy().tobytes())) for o, y in zip(x, y[:, None])
    )
    both = [torch.cat([parts[k][name] for k in ('train', 'validation')]) for name in parts['test']]
    assert rows(*both) == rows(x, y)


def test_the_hub(folder, tmp_path, monkeypatch, capsys):
    "by a stand-in that hands out pictures as the Hub does: in another order"
    import datasets
    from PIL import Image

    parts, asked = read_cifar10(folder, official=False), []
    names = datasets.ClassLabel(names=list(cifar_names))
    kinds = datasets.Features(img=datasets.Image(), label=names)

    def hub(name, revision):
        asked.append((name, revision))
        out = datasets.DatasetDict()
        for k, (x, y) in parts.items():
            order = range(len(x))[::-1] if k == 'train' else range(len(x))
            images = [Image.fromarray(x[n].permute(1, 2, 0).numpy()) for n in order]
            columns = dict(img=images, label=[int(y[n]) for n in order])
            out[k] = datasets.Dataset.from_dict(columns, features=kinds)
        return out

    monkeypatch.setattr(datasets, 'load_dataset', hub)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf')
    monkeypatch.setattr(files, 'need_hub', lambda name: None)
    same(open_cifar10(n_valid=20), open_cifar10(folder, 20, official=False))
    assert asked == [('uoft-cs/cifar10', cifar._hub_revision)]
    assert "'uoft-cs/cifar10' from the Hub" in capsys.readouterr().out

    def down(name, revision):
        raise ConnectionError('no network')

    monkeypatch.setattr(datasets, 'load_dataset', down)
    with pytest.raises(ConnectionError, match='no network.*data_batch_1.*CAPSNB_DATA'):
        open_cifar10()


def test_no_datasets_no_hub(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r"needs the package 'datasets': pip install"):
        open_cifar10()


def test_checksums(folder, pickled, monkeypatch):
    "of every file, before anything in it is read; twelve published ones"
    assert len(batch_md5s) == len(set(batch_md5s.values())) == 12
    assert all(len(o) == 32 and int(o, 16) for o in batch_md5s.values())
    hint = 'of 36,876 bytes.*official=False, on the command line --any-files'
    with pytest.raises(
        ValueError, match=f'data_batch_1.bin: expected MD5 {cifar._bin_md5s[0]}.*{hint}'
    ):
        read_cifar10(folder)
    monkeypatch.setattr(cifar, '_Arrays', None)
    with pytest.raises(ValueError, match=f'data_batch_1: expected MD5 {cifar._py_md5s[0]}'):
        read_cifar10(pickled)
    for path in folder.iterdir():
        known = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(batch_md5s, path.name, known)
    read_cifar10(folder)
    last = folder / 'test_batch.bin'
    last.write_bytes(last.read_bytes()[:-1] + b'\x07')
    with pytest.raises(ValueError, match='test_batch.bin: expected MD5'):
        read_cifar10(folder)


def test_missing_files_are_named(folder):
    (folder / 'data_batch_3.bin').unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3, .*found \['data_batch_1', 'data_b"):
        open_cifar10(folder)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 3 * 3073 - 1), st.integers(0, 255))
def test_records_are_read_exactly_or_refused(at, byte):
    g = torch.Generator().manual_seed(at)
    x = torch.randint(256, (3, 3, 32, 32), generator=g, dtype=torch.uint8)
    whole = format_records(x, torch.tensor([9, 0, 5]))
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    if at % 3073 or byte <= 9:
        assert format_records(*parse_records(changed)) == changed
    else:
        with pytest.raises(ValueError, match=f'f byte {at}: expected a label.*got {byte}'):
            parse_records(changed, 'f')
    if at % 3073:
        with pytest.raises(ValueError, match=f'f byte {at}: expected records of 3,073 bytes'):
            parse_records(whole[:at], 'f')


def test_an_empty_file():
    with pytest.raises(ValueError, match='f byte 0'):
        parse_records(b'', 'f')


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_pickle_never_passes_as_another_error(data):
    whole = as_python_2(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 2]))
    heads = [*range(300), *range(len(whole) - 60, len(whole))]  # what is between are pixels
    at, byte = data.draw(st.sampled_from(heads)), data.draw(st.integers(0, 255))
    with pytest.raises(ValueError, match='f: '):
        parse_pickle(whole[:at], 'f')
    try:
        x, y = parse_pickle(whole[:at] + bytes([byte]) + whole[at + 1 :], 'f')
    except ValueError as e:
        assert 'f: ' in str(e)
    else:
        assert x.shape[1:] == (3, 32, 32) and len(x) == len(y) and y.max() <= 9


class Hostile:
    def __reduce__(self):
        return print, ('run',)


def test_a_pickle_runs_nothing(capsys):
    with pytest.raises(ValueError, match='f: damaged pickle: expected arrays only, got .*print'):
        parse_pickle(pickle.dumps({'data': Hostile(), 'labels': []}), 'f')
    assert not capsys.readouterr().out


def test_a_pickle_with_another_array():
    x, y = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8), torch.tensor([1, 2, 3, 9])
    whole = as_python_2(x, y)
    for was, came, said in (
        (short('u1'), short('i1'), "'type': 'u1'.*'type': 'i1'"),
        (int4(3072), int4(3071), '3072.*3071'),
        (b'K\x09e', b'K\x0ae', 'labels from 0 to 9, got 10'),
        (b'K\x09e', b'e', 'for 3 labels'),
    ):
        assert whole.count(was) == 1
        with pytest.raises(ValueError, match=f'f: expected .*{said}'):
            parse_pickle(whole.replace(was, came), 'f')
    by_column = as_python_2(x.flatten(1).T.contiguous().view(4, 3, 32, 32), y)
    by_column = by_column.replace(b'tb\x89T', b'tb\x88T')  # Fortran's order
    assert parse_pickle(by_column)[0].equal(x) and parse_pickle(whole)[0].equal(x)


@pytest.mark.parametrize('n', (True, -1, 60, 2.0))
def test_validation_pictures_are_a_number(folder, n):
    with pytest.raises(ValueError, match='n_valid must be an integer from 0 to 59'):
        open_cifar10(folder, n, official=False)


def test_the_task(tmp_path):
    "found by its name, trained, tested again from another folder"
    data = tiny_cifar10(tmp_path / 'data', 20)
    task = Pictures(folder=data, n_valid=30, official=False, limit=40)
    assert [len(task.open(k)['label']) for k in ('train', 'validation', 'test')] == [40, 14, 20]
    found = train(task, 'cnn', tmp_path / 'run', epochs=1, device='cpu', progress=False)
    assert found['limit'] == 40
    moved = data.rename(tmp_path / 'moved')
    seen = evaluate(tmp_path / 'run', device='cpu', folder=moved)
    assert seen['n'] == 20 and seen['accuracy'] == found['test_accuracy']
    opened = load_run(tmp_path / 'run', 'cpu').task
    assert (opened.name, opened.n_valid, opened.limit) == ('cifar10', 30, 40)
    assert task_named('cifar10').networks == Pictures.networks


def test_every_network_takes_the_pictures():
    for net in Pictures.networks:
        network = task_named('cifar10').make(net).eval()
        with torch.no_grad():
            assert network(torch.rand(1, 3, 32, 32)).a.shape == (1, 10)
        if net == 'matrix-caps':
            assert network.conv.weight.shape == (256, 3, 5, 5)


@pytest.mark.parametrize('wrong', (dict(limit=0), dict(n_test=True), dict(limit=2.5)))
def test_wrong_options(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f'{name} must be an integer >= 1 or None'):
        Pictures(**wrong)


def test_the_command(tmp_path):
    "names the option for files that are not the real ones, and what is missing"
    data, run = tiny_cifar10(tmp_path / 'data', 20), tmp_path / 'run'
    command = ['train', 'cifar10', '--out', str(run), '--data', str(data), '--no-progress']
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'data_batch_1.bin: expected MD5' in r.output, r.output
    assert '--any-files' in r.output and not run.exists()
    (data / 'test_batch.bin').unlink()
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'test_batch in' in r.output, r.output


@pytest.mark.skipif(
    real_folder is None, reason='CIFAR-10 is not on this machine: name its folder in CAPSNB_DATA'
)
def test_the_real_files():
    parts = open_cifar10(real_folder)
    assert {k: len(v['label']) for k, v in parts.items()} == dict(
        train=45_000, validation=5_000, test=10_000
    )
    y = torch.cat([parts[k]['label'] for k in ('train', 'validation')])
    assert_close(y.bincount(), torch.full((10,), 5000))
