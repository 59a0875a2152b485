"""Downloads that break off, and folders that hold half of what they should.

What reads well in prose is in nbs/data/32_files.ipynb.
"""

import contextlib
import errno
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st
from capsnb.data import files
from capsnb.data.files import cache_folder, checksum, fetch, find_folder, holds, write_json
from web import Web, served

body = bytes(range(256)) * 64
sums = dict(size=len(body), sha256=hashlib.sha256(body).hexdigest())


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))


@pytest.fixture
def web():
    class Here(Web):
        asked = []

    Here.body = body
    with served(Here) as Here.address:
        yield Here


@pytest.mark.parametrize('ranges', [True, False])
def test_goes_on_where_it_broke_off(web, tmp_path, ranges):
    web.breaks, web.ranges, n = 2, ranges, len(body)
    for have in [n // 3, n // 3 + (n - n // 3) // 3] if ranges else [n // 3, n // 3]:
        with pytest.raises(
            ConnectionError,
            match=rf'broke off after {have:,} of {n:,} bytes; the next call goes on from there',
        ):
            fetch(web.address, tmp_path / 'a', **sums)
        assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [('a.part', have)]
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body
    assert web.asked == [None, f'bytes={n // 3}-', f'bytes={have}-'] and [
        p.name for p in tmp_path.iterdir()
    ] == ['a']


@pytest.mark.parametrize('wrong', [dict(sha256='0' * 64), dict(md5='0' * 32)])
def test_another_file_is_not_kept(web, tmp_path, wrong):
    with pytest.raises(ValueError, match=r'expected (SHA-256|MD5) 0000.*nothing was kept'):
        fetch(web.address, tmp_path / 'a', **{**sums, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_a_longer_file_is_another_file(web, tmp_path):
    web.body = body + b'.'
    with pytest.raises(ValueError, match='nothing was kept'):
        fetch(web.address, tmp_path / 'a', **sums)
    assert list(tmp_path.iterdir()) == []


def test_a_spoilt_part_is_not_built_on(web, tmp_path):
    (tmp_path / 'a.part').write_bytes(b'?' * 100)
    with pytest.raises(ValueError, match='nothing was kept'):
        fetch(web.address, tmp_path / 'a', **sums)
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body


page = b'<html>please log in</html>'


@pytest.mark.parametrize('ranges', [True, False])
def test_a_part_outlives_a_page_in_place_of_the_file(web, tmp_path, ranges):
    "an answer that is too short and says so"
    (tmp_path / 'a.part').write_bytes(body[:9000])
    web.body, web.ranges = page, False
    with pytest.raises(
        ValueError,
        match=rf'expected {len(body):,} bytes, got an answer of {len(page)}; nothing was kept',
    ):
        fetch(web.address, tmp_path / 'a', **sums)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [('a.part', body[:9000])]
    web.body, web.ranges = body, ranges
    assert (
        fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body
        and web.asked[-1] == 'bytes=9000-'
    )


class Unsaid(Web):
    "does not say how long its answers are; knows no ranges; sends without end if `body` is None"

    sent = 0

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.body is not None:
                self.wfile.write(self.body)
            while self.body is None and type(self).sent < 1e8:
                self.wfile.write(bytes(2**16))
                type(self).sent += 2**16


@pytest.mark.parametrize(
    'came, kept', [(page, body[:9000]), (body[:9001], body[:9001]), (body, None)]
)
def test_a_part_gives_way_only_to_a_longer_one(tmp_path, came, kept):
    class Here(Unsaid):
        body = came

    (tmp_path / 'a.part').write_bytes(body[:9000])
    with served(Here) as address:
        if kept:
            with pytest.raises(
                ConnectionError, match=rf'broke off after {len(kept):,} of {len(body):,}'
            ):
                fetch(address, tmp_path / 'a', **sums)
        else:
            assert fetch(address, tmp_path / 'a', **sums).read_bytes() == body
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [
        ('a.part', kept) if kept else ('a', body)
    ]


def test_an_endless_answer_is_not_read_to_its_end(tmp_path, monkeypatch):
    class Here(Unsaid):
        body = None

    read = []
    monkeypatch.setattr(
        files,
        'checksum',
        lambda path, kind: (read.append(path.stat().st_size), checksum(path, kind))[1],
    )
    with served(Here) as address:
        with pytest.raises(ValueError, match='expected SHA-256 .* nothing was kept'):
            fetch(address, tmp_path / 'a', **sums)
    assert read == [len(body) + 1] and Here.sent < 5e7 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('have', [0, 9000])
def test_a_full_disk_is_not_a_broken_connection(web, tmp_path, monkeypatch, have):
    if have:
        (tmp_path / 'a.part').write_bytes(body[:have])

    class Full:
        def __init__(self, *args):
            self.f = open(*args)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.f.close()

        def write(self, piece):
            self.f.write(piece[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, 'open', Full, raising=False)
    with pytest.raises(OSError) as e:
        fetch(web.address, tmp_path / 'a', **sums)
    assert not isinstance(e.value, ConnectionError) and e.value.errno == errno.ENOSPC
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [
        ('a.part', body[: have + 100])
    ]
    monkeypatch.undo()
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body


def test_nobody_there_is_a_broken_connection(tmp_path):
    (tmp_path / 'a.part').write_bytes(body[:9000])
    with pytest.raises(ConnectionError, match='http://127.0.0.1:1/'):
        fetch('http://127.0.0.1:1/', tmp_path / 'a', **sums)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [('a.part', body[:9000])]


def test_a_good_file_stays_when_a_new_one_fails(web, tmp_path):
    (tmp_path / 'a').write_bytes(body)
    web.body = b'?' * len(body)
    with pytest.raises(ValueError):
        fetch(web.address, tmp_path / 'a', **sums)
    assert (tmp_path / 'a').read_bytes() == body and [p.name for p in tmp_path.iterdir()] == ['a']


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.binary(max_size=3000), st.sampled_from(['md5', 'sha256', 'sha1']))
def test_checksum_is_hashlibs(tmp_path_factory, data, kind):
    path = tmp_path_factory.mktemp('c') / 'a'
    path.write_bytes(data)
    assert checksum(path, kind) == hashlib.new(kind, data).hexdigest()


def test_checksum_of_more_than_one_piece(tmp_path):
    data = os.urandom(2**20 + 1)
    (tmp_path / 'a').write_bytes(data)
    assert checksum(tmp_path / 'a') == hashlib.sha256(data).hexdigest()


names = ['one.mat', 'two.mat']


def put(folder, *some):
    folder.mkdir(parents=True, exist_ok=True)
    for o in some:
        (folder / o).touch()
    return folder


def test_order_of_places(tmp_path, monkeypatch):
    def find(folder=None):
        return find_folder('toy', names, folder, ('raw',), ('', '.gz'))

    assert find() is None
    cache = put(cache_folder('toy'), 'one.mat', 'two.mat.gz')
    assert cache == tmp_path / 'xdg' / 'capsnb' / 'toy' and find() == cache
    monkeypatch.setenv('CAPSNB_DATA', '')
    assert find() == cache
    monkeypatch.setenv('CAPSNB_DATA', str(tmp_path / 'data'))
    with pytest.raises(FileNotFoundError, match=r'CAPSNB_DATA.*found none of them'):
        find()
    put(tmp_path / 'data')
    assert find() == cache  # another data set's
    for sub in ('raw', 'toy', ''):  # the nearer, the earlier
        place = put(tmp_path / 'data' / sub, *names)
        assert find() == place
    mine = put(tmp_path / 'mine' / 'raw', *names)
    assert find(tmp_path / 'mine') == find(str(mine)) == mine
    (mine / 'two.mat').unlink()
    with pytest.raises(
        FileNotFoundError, match=re.escape("or its sub-folder 'toy', found ['one.mat']")
    ):
        find(tmp_path / 'mine')
    for bad in ('', tmp_path, tmp_path / 'nowhere'):
        with pytest.raises(FileNotFoundError, match='found none of them'):
            find(bad)


def test_a_folder_is_not_a_file(tmp_path):
    put(tmp_path / 'one.mat')
    assert holds(tmp_path, names) == []


# ---- killed ----


def python(code, *args, **kw):
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, '-c', code, *map(str, args)],
        stdout=subprocess.PIPE,
        cwd=root,
        env=dict(os.environ, PYTHONPATH=str(root)),
        **kw,
    )


def ended():
    "the number of a process that has ended"
    with python('') as child:
        pass
    return child.pid


class Slow(Web):
    "sends a third of what is asked for, then waits"

    def do_GET(self):
        asked = self.headers.get('Range')
        type(self).asked.append(asked)
        rest = self.body[int(asked[6:-1]) if asked else 0 :]
        self.send_response(206 if asked else 200)
        self.send_header('Content-Length', str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 3])
        self.wfile.flush()
        time.sleep(3)


getting = """
import sys
from pathlib import Path
from capsnb.data.files import fetch
fetch(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""

large = os.urandom(300_000)


def test_a_killed_download_goes_on_where_it_was(web, tmp_path):
    class Here(Slow):
        body, asked = large, []

    sha256 = hashlib.sha256(large).hexdigest()
    with served(Here) as address:
        child = python(getting, address, tmp_path / 'a', len(large), sha256)
        mine = tmp_path / f'a.{child.pid}'
        for _ in range(400):
            if mine.exists() and mine.stat().st_size or list(tmp_path.glob('*.whole')):
                break
            time.sleep(0.05)
        time.sleep(0.3)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    have = max(p.stat().st_size for p in tmp_path.iterdir())
    assert 0 < have < len(large)
    web.body = large
    fetch(web.address, tmp_path / 'a', len(large), sha256)
    assert web.asked == [f'bytes={have}-']
    assert [p.name for p in tmp_path.iterdir()] == ['a'] and (tmp_path / 'a').read_bytes() == large


def test_the_longest_part_of_the_dead_is_taken_and_the_rest_swept(web, tmp_path):
    one, two, own = ended(), ended(), os.getpid()
    dead = {
        'a.part': 4000,
        f'a.{one}': 3000,
        f'a.{two}': 9000,
        f'a.{one}.whole': 5000,
        f'a.{own}': 2000,
    }
    with python('input()', stdin=subprocess.PIPE) as living:
        others = {
            f'a.{living.pid}': 12_000,
            f'a.{living.pid}.whole': 1,
            f'b.{one}': 1,
            f'a.{one}.txt': 1,
            'a.old': 1,
            f'xa.{one}': 1,
        }
        for name, size in {**dead, **others}.items():
            (tmp_path / name).write_bytes(body[:size])
        fetch(web.address, tmp_path / 'a', **sums)
        assert web.asked == ['bytes=9000-'] and (tmp_path / 'a').read_bytes() == body
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(['a', *others])
        assert (tmp_path / f'a.{living.pid}').read_bytes() == body[:12_000]
        living.stdin.close()


writing = """
import os, sys, time
from pathlib import Path
from capsnb.data import files
os.getpid = lambda: int(sys.argv[3])            # the number it has on another machine
def wait(*args):
    print('now', flush=True)
    time.sleep(60)
files._download = wait
files.fetch(sys.argv[1], Path(sys.argv[2]), 100, '')
"""


def test_a_file_that_somebody_holds_is_left_alone(web, tmp_path):
    "even if no process of its number runs here: it may run on another machine"
    pytest.importorskip('fcntl')
    number = ended()
    with python(writing, web.address, tmp_path / 'a', number) as living:
        assert living.stdout.readline() == b'now\n'
        (tmp_path / f'a.{number}').write_bytes(body[:9000])
        fetch(web.address, tmp_path / 'a', **sums)
        assert web.asked == [None] and (tmp_path / f'a.{number}').read_bytes() == body[:9000]
        living.kill()
    fetch(web.address, tmp_path / 'a', **sums)
    assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_half_a_note_of_a_killed_process_is_swept(tmp_path):
    one = ended()
    with python('input()', stdin=subprocess.PIPE) as living:
        kept = [
            f'note.json.{living.pid}.tmp',
            f'other.json.{one}.tmp',
            'note.json.x.tmp',
            f'note.json.{one}.bak',
        ]
        for name in (f'note.json.{one}.tmp', *kept):
            (tmp_path / name).write_text('{')
        write_json(tmp_path / 'note.json', dict(n=1))
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(['note.json', *kept])
        living.stdin.close()


def test_bytes_are_on_the_disk_before_the_name(web, tmp_path, monkeypatch):
    "or a power failure leaves an empty file that calls itself whole"
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(handle):
        done.append(os.fstat(handle).st_ino)
        fsync(handle)

    def note_replace(a, b):
        replace(a, b)
        if Path(b).name in ('a', 'note.json'):
            done.append(Path(b).name)

    monkeypatch.setattr(os, 'fsync', note_fsync)
    monkeypatch.setattr(os, 'replace', note_replace)
    folder = tmp_path.stat().st_ino
    fetch(web.address, tmp_path / 'a', **sums)
    assert done == [(tmp_path / 'a').stat().st_ino, 'a', folder]
    done.clear()
    write_json(tmp_path / 'note.json', dict(n=1))
    assert done == [(tmp_path / 'note.json').stat().st_ino, 'note.json', folder]


def test_ctrl_c_keeps_what_has_come(web, tmp_path, monkeypatch):
    write = files._write

    def stops(url, answer, path, most):
        write(url, answer, path, 5000)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, '_write', stops)
    with pytest.raises(KeyboardInterrupt):
        fetch(web.address, tmp_path / 'a', **sums)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [('a.part', body[:5000])]
    monkeypatch.undo()
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body
    assert web.asked[-1] == 'bytes=5000-'


# ---- notes, and no network ----


@pytest.mark.parametrize(
    'damaged, says',
    [
        ('{"n": 3', 'cannot be read'),
        ('[1]', 'expected a JSON object, got a list'),
        ('', 'cannot be read'),
        ('[' * 100_000, 'cannot be read'),
        ('{"share": 1}', "no entry 'n'"),
        ('{"n": true}', 'to be a whole number, got true or false'),
        ('{"n": 3, "share": "x"}', 'to be a number, got a text'),
        ('{"n": null}', 'got null'),
    ],
)
def test_a_damaged_note_is_one_sentence(tmp_path, damaged, says):
    (tmp_path / 'note.json').write_text(damaged)
    with pytest.raises(ValueError, match=says) as e:
        files.read_json(tmp_path / 'note.json', n=int, share=float)
    assert 'note.json' in str(e.value)


def test_a_note_that_is_absent_is_absent(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read_json(tmp_path / 'note.json', n=int)


def test_silence_is_noticed_within_seconds(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as silent:  # takes a call, and says nothing
        url = f'http://127.0.0.1:{silent.getsockname()[1]}/x'
        began = time.time()
        with pytest.raises(ConnectionError, match='does not answer'):
            files.fetch(url, tmp_path / 'x', 10, '0' * 64)
        assert 4 < time.time() - began < 8


def test_the_hub_answers_or_not_within_seconds(web, monkeypatch):
    hub = pytest.importorskip('huggingface_hub.constants')
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', False)
    with served(Web) as address:  # a refusal is an answer, too
        monkeypatch.setattr(hub, 'ENDPOINT', address)
        files.need_hub('a model')
    began = time.time()
    with pytest.raises(ConnectionError, match="'a model' is not on this machine, and .* answer"):
        files.need_hub('a model')
    assert time.time() - began < 5
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', True)
    with pytest.raises(ConnectionError, match='HF_HUB_OFFLINE forbids'):
        files.need_hub('a model')
