"Damaged files, broken downloads, killed unpacking; the rest is in nbs/data/35_norb.ipynb."

import gzip
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.data import norb
from capsnb.data.files import cache_folder
from capsnb.data.norb import (
    NorbFile,
    as_tensors,
    check_labels,
    codes,
    degrees,
    download_smallnorb,
    find_smallnorb,
    instances,
    load_smallnorb,
    magics,
    norb_files,
    open_matrix,
    open_smallnorb,
    parse_header,
    read_matrix,
    read_split,
    tiny_smallnorb,
    unpack,
    valid_mask,
    viewpoint_split,
    write_matrix,
)
from web import Web, served

some = settings(max_examples=300, deadline=None, derandomize=True)
few = settings(max_examples=60, deadline=None, derandomize=True)
names = [o.name for o in norb_files.values()]


def equal(a, b):
    assert set(a) == set(b)
    for name in a:
        assert_close(a[name], b[name], rtol=0, atol=0)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    "no test finds the data, the cache or the web of the machine it runs on"
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'hf'))
    monkeypatch.setattr(norb, 'site', 'http://127.0.0.1:1/')


def cards(folder, **kw):
    return tiny_smallnorb(
        folder, **{**dict(size=8, elevations=(0, 4), azimuths=(0, 20), lightings=(1,)), **kw}
    )


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
        monkeypatch.setitem(
            norb_files,
            key,
            NorbFile(
                o.name,
                len(gz),
                hashlib.sha256(gz).hexdigest(),
                hashlib.md5(gz).hexdigest(),
                hashlib.md5(raw).hexdigest(),
                len(raw),
            ),
        )


# ---- one matrix ----

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=8)
kinds = {
    torch.uint8: 'B',
    torch.int16: 'h',
    torch.int32: 'i',
    torch.float32: 'f',
    torch.float64: 'd',
}


@some
@given(shapes, st.sampled_from(list(kinds)), st.integers(0, 2**32))
def test_reads_what_was_written(tmp_path_factory, shape, dtype, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e4
    x = x.clamp(0, 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    path = write_matrix(tmp_path_factory.mktemp('m') / 'x.mat', x)
    assert_close(read_matrix(path), x, rtol=0, atol=0)
    # and an independent reader, word by word
    data = path.read_bytes()
    kind, n, *dims = struct.unpack_from(f'<{2 + max(len(shape), 3)}I', data)
    assert magics[kind] == dtype and n == len(shape) and dims == shape + [1] * (3 - n)
    assert (
        list(struct.unpack_from(f'<{x.numel()}{kinds[dtype]}', data, 8 + 4 * len(dims)))
        == x.flatten().tolist()
    )


words = st.one_of(
    st.sampled_from([*magics, 0x1E3D4C52, 0x1E3D4C57, 0, 1, 2, 3, 4, 8, 9, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)


@some
@given(st.lists(words, max_size=12), st.binary(max_size=3))
def test_a_header_is_refused_or_says_what_it_says(some_words, rest):
    data = struct.pack(f'<{len(some_words)}I', *some_words) + rest
    try:
        header = parse_header(data, 'f')
    except ValueError as e:
        at = int(re.match(r'f byte (\d+): expected ', str(e))[1])
        assert at <= len(data) and type(e) is ValueError
    else:
        n = len(header.shape)
        back = struct.pack(
            f'<{2 + max(n, 3)}I',
            {v: k for k, v in magics.items()}[header.dtype],
            n,
            *header.shape,
            *[1] * (3 - n),
        )
        assert (
            data.startswith(back)
            and header.start == len(back)
            and header.size == len(back) + math.prod(header.shape) * header.dtype.itemsize
        )


def test_every_cut_and_every_bit_of_a_small_file(tmp_path):
    whole = write_matrix(
        tmp_path / 'x.mat', torch.arange(6, dtype=torch.int32).view(2, 3)
    ).read_bytes()
    path, start = tmp_path / 'y.mat', 20
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(
            ValueError, match=rf'y.mat byte {n}: expected .* got the end of the file'
        ):
            read_matrix(path)
    for bit in range(8 * start):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        if bit == 8 * 4:
            assert read_matrix(path).shape == (
                2,
                3,
                1,
            )  # two dimensions or three: the stored 1 may be meant
        else:
            with pytest.raises(ValueError, match=r'y.mat byte \d+: expected'):
                read_matrix(path)
    path.write_bytes(whole + b'\0')
    with pytest.raises(
        ValueError,
        match=rf'y.mat byte {len(whole)}: expected the end of the file after \[2, 3\] elements',
    ):
        read_matrix(path)


def test_a_map_is_private_and_needs_no_right_to_write(tmp_path):
    path = write_matrix(tmp_path / 'x.mat', torch.zeros(4, dtype=torch.uint8))
    before = path.read_bytes()
    path.chmod(0o444)
    x = read_matrix(path)
    x += 1
    assert (
        x.tolist() == [1] * 4
        and path.read_bytes() == before
        and read_matrix(path).tolist() == [0] * 4
    )


@pytest.mark.parametrize(
    'x',
    [
        torch.zeros(2),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros([1] * 9),
    ],
)
def test_what_the_format_cannot_hold(tmp_path, x):
    if x.dtype == torch.float32 and x.ndim == 1 and x.numel():
        write_matrix(tmp_path / 'x.mat', x)
    else:
        with pytest.raises(ValueError, match='expected 1 to 8 dimensions of torch.float32'):
            write_matrix(tmp_path / 'x.mat', x)
        assert not (tmp_path / 'x.mat').exists()


# ---- unpacking ----


def test_unpacks_as_gzip_does(tmp_path):
    x = torch.randint(
        0, 256, (3, 2, 300, 100), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )  # more than one piece
    raw, gz = write_matrix(tmp_path / 'x.mat', x), write_matrix(tmp_path / 'x.mat.gz', x)
    assert gzip.decompress(gz.read_bytes()) == raw.read_bytes()
    path, md5 = unpack(gz, tmp_path / 'u')
    assert (
        path.read_bytes() == raw.read_bytes()
        and md5 == hashlib.md5(raw.read_bytes()).hexdigest()
        and path.name == f'{md5}.mat'
    )
    assert unpack(gz, tmp_path / 'u', 'name.mat', md5)[0].name == 'name.mat'
    with pytest.raises(
        ValueError,
        match=f'x.mat.gz: expected MD5 {"0" * 32} after unpacking, got {md5}; nothing was kept',
    ):
        unpack(gz, tmp_path / 'u', 'other.mat', '0' * 32)
    assert sorted(p.name for p in (tmp_path / 'u').iterdir()) == sorted([f'{md5}.mat', 'name.mat'])


def test_every_byte_of_a_gzip_file(tmp_path):
    raw = write_matrix(tmp_path / 'x.mat', torch.arange(40, dtype=torch.int32)).read_bytes()
    whole, path, harmless = gzip.compress(raw, mtime=0), tmp_path / 'y.mat.gz', 0
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(
            ValueError, match=rf'y.mat.gz byte {n}: expected more of the gzip stream'
        ):
            unpack(path, tmp_path / 'u')
        for bit in range(8):
            data = bytearray(whole)
            data[n] ^= 1 << bit
            path.write_bytes(data)
            try:
                back, _ = unpack(path, tmp_path / 'u')
            except ValueError as e:
                assert (
                    re.search(r'y.mat.gz( \(unpacked\))? byte \d+: ', str(e))
                    and type(e) is ValueError
                )
            else:
                harmless += 1
                assert back.read_bytes() == raw
                back.unlink()
        assert not list((tmp_path / 'u').iterdir())
    assert harmless < 8 * 10  # only in the gzip header: time, system, hints


@pytest.mark.parametrize('at', [100, 65_535, 65_536, 70_000, 150_000])
def test_damage_is_found_where_the_stream_breaks(tmp_path, at):
    import zlib

    x = torch.randint(
        0, 256, (200_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    data = bytearray(write_matrix(tmp_path / 'x.mat.gz', x).read_bytes())
    data[at : at + 40] = b'\xff' * 40
    (tmp_path / 'x.mat.gz').write_bytes(data)
    with pytest.raises(ValueError, match=r'x.mat.gz byte \d+: damaged gzip stream') as e:
        unpack(tmp_path / 'x.mat.gz', tmp_path / 'u')
    said = int(re.search(r'byte (\d+)', str(e.value))[1])
    zlib.decompressobj(31).decompress(bytes(data[:said]))  # all bytes before it pass, it does not
    with pytest.raises(zlib.error):
        zlib.decompressobj(31).decompress(bytes(data[: said + 1]))


def test_a_bomb_is_not_unpacked_to_its_end(tmp_path):
    raw = write_matrix(tmp_path / 'x.mat', torch.zeros(4, dtype=torch.uint8)).read_bytes()
    (tmp_path / 'x.mat.gz').write_bytes(gzip.compress(raw + bytes(300_000_000), 9))
    with pytest.raises(
        ValueError, match=r'byte 24: expected the end of the file after \[4\] elements'
    ) as e:
        unpack(tmp_path / 'x.mat.gz', tmp_path / 'u')
    assert (
        int(re.search(r'got ([\d,]+) bytes more', str(e.value))[1].replace(',', '')) < 100_000_000
    )
    assert not list((tmp_path / 'u').iterdir())


def test_interrupted_while_unpacking(packed, tmp_path, monkeypatch):
    def dies(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'replace', dies)
    with pytest.raises(KeyboardInterrupt):
        read_split(packed, 'train', official=False)
    assert not any(p.is_file() for p in cache_folder('smallnorb').rglob('*'))


def test_killed_while_unpacking(packed, plain, tmp_path):
    "the process dies without a chance to tidy up"
    code = f"""
import sys, time
from capsnb.data import norb
inflate = norb._inflate
def slow(path):
    yield next(inflate(path))[:30]
    print('now', flush=True); time.sleep(60)
norb._inflate = slow
norb.unpack({str(packed / names[0])!r} + '.gz', norb.Path({str(tmp_path / 'u')!r}), 'whole.mat')
"""
    child = subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert child.stdout.readline() == b'now\n'

    def again():
        return unpack(packed / f'{names[0]}.gz', tmp_path / 'u', 'whole.mat')[0].read_bytes()

    left, whole = list((tmp_path / 'u').iterdir()), (plain / names[0]).read_bytes()
    assert [p.suffix for p in left] == ['.unpacking']
    assert again() == whole and left[0].exists()  # it is still at work
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert again() == whole and not left[0].exists()


# ---- checked once ----


@pytest.fixture
def looked_at(monkeypatch):
    "the files whose checksum is taken; none is small, and none has just changed"
    calls, now = [], time.time_ns

    def count(path, kind, f=norb.checksum):
        calls.append(path.name)
        return f(path, kind)

    monkeypatch.setattr(norb, 'checksum', count)
    monkeypatch.setattr(norb, '_small', 0)
    monkeypatch.setattr(norb.time, 'time_ns', lambda: now() + 10**10)
    return calls


def test_an_unchanged_file_is_checked_once(plain, looked_at):
    a, key = read_split(plain, 'train', official=False)
    assert sorted(looked_at) == sorted(names[:3])
    b, again = read_split(plain, 'train', official=False)
    assert len(looked_at) == 3 and key == again
    equal(a, b)
    whole = bytearray((plain / names[0]).read_bytes())
    whole[-1] ^= 1
    (plain / names[0]).write_bytes(whole)
    assert read_split(plain, 'train', official=False)[1] != key and len(looked_at) == 4


def as_before(path, o):
    "gives a file the times that it had"
    os.utime(path, ns=(o.st_atime_ns, o.st_mtime_ns))


def change(path):
    "another byte, as long, and as old for all who look at the time of the last change"
    o, raw = path.stat(), bytearray(path.read_bytes())
    raw[-4] ^= 1
    with open(path, 'r+b') as f:
        f.write(raw)
    as_before(path, o)
    assert path.stat().st_mtime_ns == o.st_mtime_ns


def exchange(path):
    "the same with another file in its place"
    o, raw = path.stat(), bytearray(path.read_bytes())
    raw[-4] ^= 1
    other = path.with_name('other')
    other.write_bytes(raw)
    as_before(other, o)
    os.replace(other, path)


@pytest.mark.parametrize('how', [change, exchange])
@pytest.mark.parametrize('gz', [False, True])
def test_a_changed_byte_behind_the_same_size_and_time_is_noticed(plain, packed, looked_at, how, gz):
    folder = packed if gz else plain
    _, key = read_split(folder, 'train', official=False)
    read_split(folder, 'train', official=False)
    path = next((cache_folder('smallnorb') / 'unpacked').iterdir()) if gz else plain / names[0]
    how(path)
    if gz:
        assert read_split(folder, 'train', official=False)[1] == key  # unpacked anew
    else:
        assert read_split(folder, 'train', official=False)[1] != key


def test_a_small_file_is_read_each_time(plain, monkeypatch):
    "so not even a disk that changes bytes by itself goes unnoticed there"
    path = plain / names[1]
    monkeypatch.setattr(norb, '_stamp', lambda path: [path.stat().st_size, 0, 0, 0, 0])
    md5 = open_matrix(path)[1]
    assert open_matrix(path)[1] == md5
    change(path)
    assert open_matrix(path)[1] == hashlib.md5(path.read_bytes()).hexdigest() != md5


def test_a_file_that_has_just_changed_is_not_noted(plain, monkeypatch):
    "two changes within one tick of the clock leave the same times: look at young files again"
    path = plain / names[1]
    monkeypatch.setattr(norb, '_small', 0)
    o = path.stat()
    stamp = max(o.st_mtime_ns, o.st_ctime_ns)
    monkeypatch.setattr(norb.time, 'time_ns', lambda: stamp + 1_999_999_999)
    md5 = open_matrix(path)[1]
    assert norb._note_of(path) == dict(md5=md5, stamp=None)
    monkeypatch.setattr(norb.time, 'time_ns', lambda: stamp + 2_000_000_000)
    open_matrix(path)
    assert norb._note_of(path) == dict(md5=md5, stamp=norb._stamp(path))


spoilt = [
    '',
    '{',
    '[]',
    'null',
    '3',
    '{"a": 1}',
    '\udcff',
    '[' * 100_000,
    '{"a": {"md5": 3, "stamp": []}}',
    '{"a": {}}',
    '9' * 5000,
]


@pytest.mark.parametrize('notes', spoilt, ids=range(len(spoilt)))
def test_spoilt_notes_are_no_notes(plain, looked_at, notes):
    a, _ = read_split(plain, 'train', official=False)
    path = cache_folder('smallnorb') / 'checked.json'
    path.write_bytes(notes.encode(errors='surrogateescape'))
    equal(read_split(plain, 'train', official=False)[0], a)
    assert len(json.loads(path.read_text())) == 3


odd = (
    None,
    True,
    -1,
    1e300,
    '',
    'x' * 32,
    '../../escape',
    'f' * 32,
    [],
    [[]],
    {},
    {'md5': {}},
    '\ud800',
    10**40,
)


@pytest.mark.parametrize('gz', [False, True])
@pytest.mark.parametrize('seed', range(4))
def test_odd_notes_are_never_believed(plain, packed, looked_at, tmp_path, gz, seed):
    "entries at every depth replaced by something else: the data are the same, no error"
    rng, folder = random.Random(seed), packed if gz else plain
    truth, key = read_split(folder, 'train', official=False)
    read_split(folder, 'train', official=False)
    path = cache_folder('smallnorb') / 'checked.json'
    good = json.loads(path.read_text())
    for _ in range(40):
        notes = json.loads(json.dumps(good))
        at = rng.choice([notes, *notes.values()])
        name = rng.choice(list(at))
        if rng.random() < 0.2:
            del at[name]
        else:
            at[name] = rng.choice([o for o in odd if name != 'md5' or o != 'f' * 32])
        path.write_text(json.dumps(notes))
        got, again = read_split(folder, 'train', official=False)
        assert again == key
        equal(got, truth)


@pytest.mark.parametrize('gz', [False, True])
def test_notes_that_cannot_be_written_block_nothing(plain, packed, monkeypatch, gz):
    folder = packed if gz else plain

    def refuse(*args, **kw):
        raise PermissionError(13, 'read-only', 'checked.json')

    monkeypatch.setattr(norb, 'write_json', refuse)
    a, key = read_split(folder, 'train', official=False)
    equal(read_split(folder, 'train', official=False)[0], a)
    if gz:
        return
    monkeypatch.setattr(norb.Path, 'mkdir', refuse)
    assert read_split(folder, 'train', official=False)[1] == key


def test_a_cache_that_is_no_folder_blocks_nothing(plain, tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert read_split(plain, 'train', official=False)[0]['image'].shape[0] == 100


def test_a_file_spoilt_in_the_cache_is_unpacked_again(packed, plain):
    a = {name: x.clone() for name, x in read_split(packed, 'train', official=False)[0].items()}
    read_split(packed, 'train', official=False)
    for p in (cache_folder('smallnorb') / 'unpacked').iterdir():
        p.write_bytes(bytes(p.stat().st_size))
    equal(read_split(packed, 'train', official=False)[0], a)
    equal(read_split(plain, 'train', official=False)[0], a)


def test_a_bomb_under_an_official_name_is_not_unpacked(packed, as_official):
    "its header asks for what it brings, but smallNORB's sizes are known"
    path = packed / f'{names[0]}.gz'
    with gzip.open(path, 'wb', compresslevel=1) as f:
        f.write(struct.pack('<6I', 0x1E3D4C55, 4, 5000, 2, 200, 200))
        for _ in range(400):
            f.write(bytes(1_000_000))
    began, most, write = time.process_time(), [], norb._inflate

    def count(path):
        for piece in write(path):
            most.append(len(piece))
            yield piece

    norb._inflate = count
    try:
        said = (
            r'dat.mat.gz \(unpacked\) byte 8: expected sizes that fill [\d,]+ bytes, '
            r'got \[5000, 2, 200, 200\]'
        )
        with pytest.raises(ValueError, match=said):
            read_split(packed, 'train')
    finally:
        norb._inflate = write
    assert sum(most) <= 2**20 and time.process_time() - began < 1
    assert not list(cache_folder('smallnorb').rglob('*.mat'))


def test_pieces_are_small_however_much_is_packed_into_them(tmp_path):
    (tmp_path / 'x.gz').write_bytes(gzip.compress(bytes(30_000_000) + b'end'))
    pieces = list(norb._inflate(tmp_path / 'x.gz'))
    assert max(map(len, pieces)) <= 2**20 and b''.join(pieces) == bytes(30_000_000) + b'end'


# ---- a thousand damaged files ----


def damage(rng, data, gz, official):
    "one of many ways to spoil a file; without checksums only those that can be told without them"
    data, n = bytearray(data), len(data)
    start = 24 if data[4] == 4 else 20  # of the elements, where not gzipped

    def flip(lo, hi):
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            data[rng.randrange(lo, hi)] ^= 1 << rng.randrange(8)

    def shuffle_dims():
        k = 8 + 4 * rng.randrange(3)
        j = 8 + 4 * rng.randrange(3)
        data[k : k + 4], data[j : j + 4] = data[j : j + 4], data[k : k + 4]

    def cut_out():
        k = rng.randrange(n)
        del data[k : k + rng.randrange(1, 40)]

    def put_in():
        k = rng.randrange(n + 1)
        data[k:k] = rng.randbytes(rng.randrange(1, 40))

    ways = [
        lambda: data.__delitem__(slice(rng.randrange(n), n)),
        lambda: data.extend(rng.randbytes(rng.randrange(1, 50))),
        lambda: data.extend(bytes(data)),
        lambda: data.clear(),
        cut_out,
        put_in,
        lambda: data.reverse(),
    ]
    if gz:
        ways += [lambda: flip(0, n)] * 6 + [
            lambda: data.__setitem__(slice(0, n), gzip.compress(bytes(data))),
            lambda: data.__setitem__(slice(0, n), gzip.decompress(bytes(data))),
        ]
    else:
        ways += [lambda: flip(0, start)] * 4 + [
            shuffle_dims,
            lambda: data.__setitem__(slice(0, 4), struct.pack('<I', rng.choice(list(magics)))),
            lambda: data.__setitem__(slice(4, 8), struct.pack('<I', rng.randrange(10))),
            lambda: data.__setitem__(slice(0, n), gzip.compress(bytes(data))),
        ]
        if official:
            ways += [lambda: flip(start, n)] * 6
    rng.choice(ways)()
    return bytes(data)


@pytest.mark.parametrize('gz', [False, True])
@pytest.mark.parametrize('official', [False, True])
def test_a_thousand_damaged_files(plain, packed, as_official, tmp_path, gz, official):
    "250 in each of four ways to read them; a gzip file's time or name does not count"
    rng, folder = random.Random(f'{gz} {official}'), packed if gz else plain
    good = {name: (folder / name).read_bytes() for name in sorted(p.name for p in folder.iterdir())}
    truth = {name: x.clone() for name, x in read_split(folder, 'train', official)[0].items()}
    refused, harmless = 0, 0
    while refused < 250:
        name = rng.choice([o for o in good if 'training' in o])
        bad = damage(rng, good[name], gz, official)
        if bad == good[name]:
            continue
        (folder / name).write_bytes(bad)
        try:
            got, _ = read_split(folder, 'train', official)
        except ValueError as e:
            refused += 1
            assert type(e) is ValueError and re.match(
                re.escape(str(folder)) + r'/smallnorb-\S+( \(unpacked\))?( byte \d+)?: ', str(e)
            ), e
            assert ' byte ' in str(e) or 'expected MD5 ' in str(e)
        else:
            harmless += 1
            equal(got, truth)
        (folder / name).write_bytes(good[name])
    assert harmless < (100 if gz else 10)
    assert {name: (folder / name).read_bytes() for name in good} == good
    equal(read_split(folder, 'train', official)[0], truth)
    assert not list(cache_folder('smallnorb').rglob('*.unpacking'))


def test_the_wrong_file_under_a_name(plain, as_official):
    for a, b, message in [
        (0, 1, 'byte 0: expected a matrix of torch.uint8'),
        (1, 2, 'byte 4: expected 1 dimensions, got 2'),
        (2, 1, 'byte 4: expected 2 dimensions, got 1'),
    ]:
        good = (plain / names[a]).read_bytes()
        shutil.copy(plain / names[b], plain / names[a])
        with pytest.raises(ValueError, match=re.escape(f'{plain / names[a]} {message}')):
            read_split(plain, 'train', official=False)
        with pytest.raises(ValueError, match=re.escape(f'{plain / names[a]}: expected MD5')):
            read_split(plain, 'train')
        (plain / names[a]).write_bytes(good)
    shutil.copy(
        plain / names[3], plain / names[0]
    )  # the test pictures with the training labels: only a checksum can tell
    with pytest.raises(ValueError, match='training-dat.mat: expected MD5'):
        read_split(plain, 'train')


@pytest.mark.parametrize(
    'kind, x, message',
    [
        (
            'dat',
            torch.zeros(100, 3, 8, 8, dtype=torch.uint8),
            'dat.mat byte 12: expected size 2 of dimension 2, got 3',
        ),
        (
            'info',
            torch.zeros(100, 5, dtype=torch.int32),
            'info.mat byte 12: expected size 4 of dimension 2, got 5',
        ),
        (
            'info',
            torch.zeros(99, 4, dtype=torch.int32),
            'info.mat byte 8: expected size 100 as in the -dat file, got 99',
        ),
        (
            'cat',
            torch.zeros(101, dtype=torch.int32),
            'cat.mat byte 8: expected size 100 as in the -dat file, got 101',
        ),
        (
            'cat',
            torch.zeros(100, dtype=torch.uint8),
            'cat.mat byte 0: expected a matrix of torch.int32, got torch.uint8',
        ),
    ],
)
def test_files_that_disagree(plain, kind, x, message):
    write_matrix(plain / norb_files['train', kind].name, x)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_split(plain, 'train', official=False)


# ---- labels ----

every = dict(
    zip(
        codes,
        torch.cartesian_prod(
            torch.arange(5),
            torch.tensor(instances['train']),
            torch.arange(9),
            2 * torch.arange(18),
            torch.arange(6),
        ).T,
    )
)


@few
@given(
    st.sampled_from(list(codes)),
    st.integers(0, 24_299),
    st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40),
)
def test_no_label_of_a_whole_split_can_be_changed_unnoticed(name, row, to):
    columns = {**every, name: every[name].clone()}
    columns[name][row] = to
    if to == every[name][row] or name == 'instance' and to in instances['test']:
        check_labels(columns)  # a toy of the other split: the checksum's business
    else:
        with pytest.raises(ValueError, match=r'row \d+'):
            check_labels(columns)


@pytest.mark.parametrize('name', codes)
@pytest.mark.parametrize(
    'bad',
    [
        lambda x: x + 0.9,
        lambda x: x.double(),
        lambda x: x.bool(),
        lambda x: x + 0j,
        lambda x: (x + 0.9).tolist(),
        lambda x: ['a'],
        lambda x: [None, 4],
        lambda x: [[1, 2], [3]],
    ],
    ids=range(8),
)
def test_labels_are_whole_numbers(name, bad):
    columns = {other: x[:50] for other, x in every.items()}
    columns[name] = bad(columns[name])
    with pytest.raises(ValueError, match=f'^{name}: expected whole numbers, got ') as e:
        check_labels(columns)
    assert type(e.value) is ValueError
    for look, of in (
        (valid_mask, 'instance'),
        (degrees, 'azimuth'),
        (degrees, 'elevation'),
        (viewpoint_split, 'azimuth'),
    ):
        if of == name:
            with pytest.raises(ValueError, match=f'^{name}: expected whole numbers'):
                look(columns)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_may_be_narrow(dtype):
    check_labels({name: x.to(dtype) for name, x in every.items()})


def test_no_labels_are_no_error():
    check_labels({name: [] for name in codes})


@pytest.mark.parametrize('held', [9, 9.0, None, 'nine', '9', [9.0], [None], [[9]]])
def test_held_back_toys_are_a_list_of_whole_numbers(plain, held):
    for ask in (
        lambda: valid_mask(every, held),
        lambda: open_smallnorb('train', plain, held, official=False),
        lambda: open_smallnorb('test', plain, held, official=False),
        lambda: load_smallnorb(plain, 'train', held, official=False),
        lambda: load_smallnorb(plain, valid_instances=held, official=False),
    ):
        with pytest.raises(ValueError) as e:
            ask()
        assert (
            str(e.value)
            == f'valid_instances: expected a list of whole numbers such as (9,), got {held!r}'
        )


@pytest.mark.parametrize(
    'held',
    [[9], {9}, torch.tensor([9]), range(9, 10), iter([9])],
    ids=lambda held: type(held).__name__,
)
def test_any_list_of_toys_will_do(held):
    assert valid_mask(every, held).sum() == 4860


def test_the_copy_is_named_not_the_original():
    columns = {name: torch.cat([x[:50], x[7:8]]) for name, x in every.items()}
    with pytest.raises(
        ValueError,
        match='row 50 has the same labels as row 7: category 0, instance 4, elevation 0, azim',
    ):
        check_labels(columns)


@few
@given(
    st.lists(
        st.tuples(*(st.sampled_from(list(o)) for o in codes.values())),
        min_size=1,
        max_size=40,
        unique=True,
    ),
    st.sampled_from(['azimuth', 'elevation']),
)
def test_viewpoints_are_parted(rows, by):
    columns = dict(zip(codes, map(list, zip(*rows))))
    check_labels(columns)
    known, novel = viewpoint_split(columns, by)
    azimuth, elevation = degrees(columns)
    assert (known ^ novel).all() and known.dtype == torch.bool
    expected = (
        [(o >= 300 or o <= 40) for o in azimuth.tolist()]
        if by == 'azimuth'
        else [o <= 40 for o in elevation.tolist()]
    )
    assert known.tolist() == expected


@few
@given(st.lists(st.sampled_from(instances['train']), min_size=1, max_size=4, unique=True))
def test_held_back_toys_are_whole(held):
    mask = valid_mask(every, held)
    assert mask.sum() == 4860 * len(held) and set(every['instance'][mask].tolist()) == set(held)
    assert not set(every['instance'][~mask].tolist()) & set(held)


# ---- where they are ----


def test_order_of_places(plain, packed, tmp_path, monkeypatch):
    cache = cards(cache_folder('smallnorb'))
    assert find_smallnorb() == cache
    monkeypatch.setenv('CAPSNB_DATA', str(tmp_path / 'data'))
    data = cards(tmp_path / 'data' / 'smallnorb', gz=True)
    assert (
        find_smallnorb() == data
        and find_smallnorb(plain) == plain
        and find_smallnorb(str(packed)) == packed
    )
    (data / f'{names[5]}.gz').unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"\(CAPSNB_DATA\) or its sub-folder 'smallnorb', found \['smallnorb-5x46789",
    ):
        find_smallnorb()
    assert find_smallnorb(splits=['train']) == data
    shutil.copy(packed / f'{names[5]}.gz', data)
    equal(open_smallnorb('test', official=False), open_smallnorb('test', plain, official=False))


def test_a_plain_file_goes_before_its_gzipped_form(plain, packed):
    for p in packed.iterdir():
        shutil.copy(p, plain)
    open_smallnorb('train', plain, (), official=False)
    assert not (cache_folder('smallnorb') / 'unpacked').exists()


@pytest.mark.parametrize('gz', [False, True])
def test_names_need_not_say_whether_a_file_is_zipped(plain, packed, gz):
    "browsers unpack a file and keep its name, or the other way round"
    folder = packed if gz else plain
    for p in list(folder.iterdir()):
        p.rename(p.with_name(p.name[:-3] if gz else f'{p.name}.gz'))
    assert len(open_smallnorb('train', folder, (), official=False)['image']) == 100


def test_nothing_to_be_had(tmp_path):
    with pytest.raises(
        ConnectionError,
        match=r"CAPSNB_DATA or as `folder` \(--data .*\); folder='hub:' \(--data hub:\) takes",
    ):
        open_smallnorb()
    assert not any(p.is_file() for p in (tmp_path / 'xdg').rglob('*'))


@pytest.fixture
def web(packed, as_official, monkeypatch):
    class Here(Web):
        asked = []

        def do_GET(self):
            self.body = (packed / self.path[1:]).read_bytes()
            super().do_GET()

    with served(Here) as address:
        monkeypatch.setattr(norb, 'site', f'{address}/')
        yield Here


@pytest.mark.parametrize('ranges', [True, False])
def test_download_goes_on_where_it_broke_off(web, plain, tmp_path, ranges):
    web.breaks, web.ranges, size = 2, ranges, norb_files['train', 'dat'].size
    for have in [size // 3, size // 3 + (size - size // 3) // 3] if ranges else [size // 3] * 2:
        with pytest.raises(
            ConnectionError,
            match=rf'training-dat.mat.gz broke off after {have:,} of {size:,} bytes',
        ):
            find_smallnorb()
        assert [(p.name, p.stat().st_size) for p in cache_folder('smallnorb').iterdir()] == [
            (f'{names[0]}.gz.part', have)
        ]
    assert web.asked == [None, f'bytes={size // 3}-']
    place = find_smallnorb()
    assert web.asked[2] == f'bytes={have}-' and len(web.asked) == 3 + 5
    assert sorted(p.name for p in place.iterdir()) == sorted(names + ['checked.json'])
    assert all((place / name).read_bytes() == (plain / name).read_bytes() for name in names)
    for split in instances:
        equal(read_split(place, split)[0], read_split(plain, split)[0])
    assert find_smallnorb() == place and len(web.asked) == 8  # nothing is asked for again


def test_what_has_arrived_stays(web, packed, tmp_path):
    other = gzip.compress(b'another file', mtime=0)
    good = (packed / f'{names[2]}.gz').read_bytes()
    (packed / f'{names[2]}.gz').write_bytes(other + bytes(len(good) - len(other)))
    with pytest.raises(
        ValueError, match='training-info.mat.gz: expected SHA-256 .* nothing was kept'
    ):
        find_smallnorb()
    assert sorted(p.name for p in cache_folder('smallnorb').iterdir()) == sorted(
        names[:2] + ['checked.json']
    )
    (packed / f'{names[2]}.gz').write_bytes(good)
    web.asked.clear()
    find_smallnorb()
    assert len(web.asked) == 4


def test_killed_between_download_and_unpacking(web, plain, monkeypatch):
    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(norb, 'unpack', dies)
        with pytest.raises(KeyboardInterrupt):
            find_smallnorb()
    assert [p.name for p in cache_folder('smallnorb').iterdir()] == [f'{names[0]}.gz']
    equal(read_split(find_smallnorb(), 'train')[0], read_split(plain, 'train')[0])
    assert len(web.asked) == 6  # each file once


def test_only_what_is_needed_is_fetched(web):
    download_smallnorb(cache_folder('smallnorb'), ['test'])
    assert (
        sorted(p.name for p in cache_folder('smallnorb').glob('small*')) == sorted(names[3:])
        and len(web.asked) == 3
    )


def test_a_changed_byte_in_the_cache_is_noticed(web):
    place = find_smallnorb()
    data = bytearray((place / names[0]).read_bytes())
    data[-1] ^= 4
    (place / names[0]).write_bytes(data)
    with pytest.raises(
        ValueError,
        match='training-dat.mat: expected MD5 .* a byte has changed, or it is another file',
    ):
        open_smallnorb()


# ---- the data set ----

datasets = pytest.importorskip('datasets')


@pytest.mark.parametrize('gz', [False, True])
@pytest.mark.parametrize('held', [(), (9,), (4, 8)])
def test_dataset_and_tensors_are_the_same(plain, packed, gz, held):
    folder = packed if gz else plain
    loaded = load_smallnorb(folder, valid_instances=held, official=False)
    assert list(loaded) == (['train', 'validation', 'test'] if held else ['train', 'test'])
    for split, part in loaded.items():
        tensors = open_smallnorb(split, folder, held, official=False)
        equal(as_tensors(part), tensors)
        assert (
            as_tensors(load_smallnorb(folder, split, held, official=False))['image'].shape
            == tensors['image'].shape
        )
        for by in ('azimuth', 'elevation'):
            assert_close(viewpoint_split(part, by), viewpoint_split(tensors, by))
    assert sum(o.num_rows for o in loaded.values()) == 2 * 100


def test_images_of_more_than_one_batch_and_odd_size(tmp_path):
    folder = tiny_smallnorb(
        tmp_path / 'big',
        size=7,
        elevations=range(9),
        azimuths=range(0, 36, 6),
        lightings=(0, 5),
        splits=['test'],
    )
    part = load_smallnorb(folder, 'test', official=False)
    assert part.num_rows == 2700 and part[2600]['image_lt'].size == (7, 7)
    equal(as_tensors(part), open_smallnorb('test', folder, official=False))


def test_the_arrow_file_is_written_once_and_whole(plain, monkeypatch):
    replace = os.replace

    def dies(a, b):
        if str(b).endswith('.arrow'):
            raise KeyboardInterrupt
        replace(a, b)

    monkeypatch.setattr(os, 'replace', dies)
    with pytest.raises(KeyboardInterrupt):
        load_smallnorb(plain, 'test', official=False)
    assert not list((cache_folder('smallnorb') / 'arrow').iterdir())
    monkeypatch.setattr(os, 'replace', replace)
    load_smallnorb(plain, 'test', official=False)
    [path] = (cache_folder('smallnorb') / 'arrow').iterdir()
    stamp = path.stat().st_mtime_ns
    assert (
        load_smallnorb(plain, 'test', official=False).num_rows == 100
        and path.stat().st_mtime_ns == stamp
    )


@pytest.fixture
def parquet(plain, tmp_path):
    def write(change=lambda split, rows: rows, splits=('train', 'test')):
        folder = tmp_path / 'parquet'
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for split in splits:
            rows = change(
                split,
                load_smallnorb(plain, split, (), official=False)
                .cast_column('image_lt', datasets.Image())
                .to_list(),
            )
            features = datasets.Features(
                {
                    name: datasets.Image() if name.startswith('image') else datasets.Value('int64')
                    for name in rows[0]
                }
            )
            datasets.Dataset.from_list(rows, features=features).to_parquet(
                str(folder / f'{split}-00000-of-00001.parquet')
            )
        return folder

    return write


def test_a_copy_in_parquet(plain, parquet):
    hub = load_smallnorb(parquet(), source='hub', official=False)
    for split, part in hub.items():
        equal(as_tensors(part), open_smallnorb(split, plain, official=False))
        assert part.features == load_smallnorb(plain, split, official=False).features
        equal(open_smallnorb(split, f'hub:{parquet()}', official=False), as_tensors(part))
    with pytest.raises(ValueError, match='expected 24,300 pairs of instances'):
        load_smallnorb(parquet(), source='hub')
    with pytest.raises(ValueError, match='expected 24,300 pairs of instances'):
        open_smallnorb('test', f'hub:{parquet()}')


def test_a_copy_that_is_not_one(parquet):
    def drop(split, rows):
        return [{k: v for k, v in row.items() if k != 'azimuth'} for row in rows]

    with pytest.raises(ValueError, match='split train: expected the columns .* lacks azimuth'):
        load_smallnorb(parquet(drop), source='hub', official=False)

    def in_degrees(split, rows):
        return [{**row, 'azimuth': 10 * row['azimuth']} for row in rows]

    with pytest.raises(
        ValueError, match=r'split train, row \d+: expected azimuth in \[0, 2, .* got 200'
    ):
        load_smallnorb(parquet(in_degrees), source='hub', official=False)
    with pytest.raises(ValueError, match='expected the splits train, test, got train'):
        load_smallnorb(parquet(splits=['train']), source='hub', official=False)


def test_pixels_of_the_copy_have_the_official_checksum(plain, parquet, as_official, monkeypatch):
    def part(change=lambda split, rows: rows):
        return load_smallnorb(parquet(change), 'train', (), 'hub', official=False)

    decoded = []
    monkeypatch.setattr(norb, 'as_tensors', lambda part: (decoded.append(1), as_tensors(part))[1])
    same = part()
    files = [o['filename'] for o in same.cache_files]
    for _ in range(3):
        norb._check_pixels(same, 'train', 'a copy')
    assert len(decoded) == 1  # noted
    notes = cache_folder('smallnorb') / 'checked.json'
    for text in ('{', json.dumps({o: dict(md5='0' * 32, pixels='0' * 32) for o in files})):
        notes.write_text(text)
        norb._check_pixels(same, 'train', 'a copy')
    assert len(decoded) == 3

    def one_pixel(split, rows):
        from PIL import Image
        import io

        image = Image.open(io.BytesIO(rows[7]['image_rt']['bytes']))
        image.putpixel((1, 2), image.getpixel((1, 2)) ^ 1)
        image.save(out := io.BytesIO(), 'PNG')
        return [
            {**row, 'image_rt': dict(bytes=out.getvalue(), path=None)} if k == 7 else row
            for k, row in enumerate(rows)
        ]

    for _ in range(2):
        with pytest.raises(
            ValueError, match='a copy, split train: expected pixels whose file would have MD5'
        ):
            norb._check_pixels(part(one_pixel), 'train', 'a copy')
    with pytest.warns(UserWarning, match='no checksum says whether the pixels are'):
        norb._check_pixels(part(lambda split, rows: rows[::-1]), 'train', 'a copy')


def test_the_copy_on_the_hub_is_pinned(monkeypatch):
    asked = []
    monkeypatch.setattr(norb, 'load_hub', lambda *args: asked.append(args) or {})
    for folder in (None, norb.hub_name, 'who/else'):
        with pytest.raises(ValueError, match='expected the splits'):
            load_smallnorb(folder, source='hub')
    assert asked == [(norb.hub_name, norb.hub_revision)] * 2 + [('who/else',)]
    assert re.fullmatch('[0-9a-f]{40}', norb.hub_revision)


@pytest.mark.parametrize('where', [8, 900, -900, -1])
def test_a_changed_byte_of_the_arrow_file_has_it_written_anew(plain, where):
    whole = load_smallnorb(plain, 'test', official=False)
    truth = as_tensors(whole)
    [path] = (cache_folder('smallnorb') / 'arrow').iterdir()
    good = path.read_bytes()
    del whole
    raw = bytearray(good)
    raw[where] ^= 1
    path.write_bytes(raw)
    equal(as_tensors(load_smallnorb(plain, 'test', official=False)), truth)
    assert [(p, p.read_bytes()) for p in path.parent.iterdir()] == [(path, good)]


@pytest.mark.parametrize('mode, shape', [('RGB', '[8, 8, 3]'), ('P', '[8, 8]'), ('L', '[8, 9]')])
def test_images_that_are_not_grey_or_of_one_size(mode, shape):
    from PIL import Image

    images = [
        Image.new('L', (8, 8)),
        Image.new(mode, (9 if mode == 'L' else 8, 8)),
        Image.new('L', (8, 8)),
    ]
    part = datasets.Dataset.from_dict(
        {**{name: [0, 0, 0] for name in codes}, 'image_lt': images, 'image_rt': images},
        features=norb._features(),
    )
    with pytest.raises(
        ValueError,
        match=re.escape(f"row 1: expected a grey image of [8, 8], got mode '{mode}' and {shape}"),
    ):
        as_tensors(part)


def test_no_images_have_no_size(plain):
    none = load_smallnorb(plain, 'test', official=False).select([])
    with pytest.raises(
        ValueError,
        match='expected at least one row, got none: nothing says how large the images would be',
    ):
        as_tensors(none)


def test_words_that_are_not_splits(plain):
    with pytest.raises(
        ValueError, match="split must be one of train, validation, test, got 'valid'"
    ):
        open_smallnorb('valid', plain)
    with pytest.raises(ValueError, match="needs valid_instances, got none"):
        open_smallnorb('validation', plain, ())
    with pytest.raises(ValueError, match="source must be 'files' or 'hub', got 'Hub'"):
        load_smallnorb(plain, source='Hub')


# ---- the real one ----

_real = os.environ.get('CAPSNB_DATA')
try:
    _real = _real and find_smallnorb(_real)
except FileNotFoundError:
    _real = None


@pytest.mark.skipif(not _real, reason='needs smallNORB: CAPSNB_DATA')
def test_smallnorb_itself():
    for split in instances:
        data, _ = read_split(_real, split)
        assert data['image'].shape == (24_300, 2, 96, 96) and sorted(
            set(data['instance'].tolist())
        ) == sorted(instances[split])
        assert (data['category'] == torch.arange(24_300) % 5).all()
        assert [int(o.sum()) for o in viewpoint_split(data)] == [8100, 16_200]
