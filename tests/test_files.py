"""Downloads that break off, folders that hold half of what they should, notes that are damaged.

What reads well in prose is in nbs/data/32_files.ipynb.
"""

import contextlib
import errno
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from capsnb.data import files
from capsnb.data.files import cache_folder, draft, fetch, find_folder, write_json
from web import Web, served

body = bytes(range(256)) * 64
sums = dict(size=len(body), sha256=hashlib.sha256(body).hexdigest())
page = b'<html>please log in</html>'


pytestmark = pytest.mark.usefixtures('no_machine')


@pytest.fixture
def web():
    class Here(Web):
        asked = []

    Here.body = body
    with served(Here) as Here.address:
        yield Here


def left(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.suffix != '.lock'}


@pytest.mark.parametrize('ranges', [True, False])
def test_goes_on_where_it_broke_off(web, tmp_path, ranges):
    web.breaks, web.ranges, n = 2, ranges, len(body)
    for have in [n // 3, n // 3 + (n - n // 3) // 3] if ranges else [n // 3, n // 3]:
        said = rf'broke off after {have:,} of {n:,} bytes; the next call goes on from there'
        with pytest.raises(ConnectionError, match=said):
            fetch(web.address, tmp_path / 'a', **sums)
        assert left(tmp_path) == {'a.part': body[:have]}
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body
    assert web.asked == [None, f'bytes={n // 3}-', f'bytes={have}-']
    assert left(tmp_path) == {'a': body}
    fetch(web.address, tmp_path / 'a', **sums)
    assert len(web.asked) == 3  # it is there


@pytest.mark.parametrize('part, comes', [(b'', b'?' * len(body)), (b'', body + b'.'), (b'?', body)])
def test_another_file_is_not_kept(web, tmp_path, part, comes):
    web.body = comes
    (tmp_path / 'a.part').write_bytes(part)
    with pytest.raises(ValueError, match='nothing was kept'):
        fetch(web.address, tmp_path / 'a', **sums)
    assert 'a' not in left(tmp_path)
    web.body = body
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body


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


@pytest.mark.parametrize('comes, error', [(page, ConnectionError), (None, ValueError)])
def test_an_answer_of_unknown_length(tmp_path, comes, error):
    "what is there gives way to no shorter answer, and an endless one is not read to its end"

    class Here(Unsaid):
        body, sent = comes, 0

    (tmp_path / 'a.part').write_bytes(body[:9000])
    with served(Here) as address, pytest.raises(error):
        fetch(address, tmp_path / 'a', **sums)
    assert left(tmp_path) == ({'a.part': body[:9000]} if comes else {}) and Here.sent < 5e7


def test_a_login_page_is_refused_before_it_is_written(web, tmp_path):
    (tmp_path / 'a.part').write_bytes(body[:9000])
    web.body, web.ranges = page, False
    said = rf'expected {len(body):,} bytes, got an answer of {len(page)}; nothing was kept'
    with pytest.raises(ValueError, match=said):
        fetch(web.address, tmp_path / 'a', **sums)
    assert left(tmp_path) == {'a.part': body[:9000]}


def test_a_full_disk_is_not_a_broken_connection(web, tmp_path, monkeypatch):
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

    with monkeypatch.context() as m:
        m.setattr(files, 'open', Full, raising=False)
        with pytest.raises(OSError) as e:
            fetch(web.address, tmp_path / 'a', **sums)
    assert not isinstance(e.value, ConnectionError) and e.value.errno == errno.ENOSPC
    assert left(tmp_path) == {'a.part': body[:100]}
    assert fetch(web.address, tmp_path / 'a', **sums).read_bytes() == body


def test_two_at_the_same_time_fetch_once(web, tmp_path):
    get = lambda _: fetch(web.address, tmp_path / 'a', **sums)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(get, range(2)))) == 2
    assert web.asked == [None] and left(tmp_path) == {'a': body}


def test_bytes_are_on_the_disk_before_the_name(web, tmp_path, monkeypatch):
    "or a power failure leaves an empty file that calls itself whole"
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda h: (done.append(os.fstat(h).st_ino), fsync(h)))
    monkeypatch.setattr(os, 'replace', lambda a, b: (replace(a, b), done.append(Path(b).name)))
    folder = tmp_path.stat().st_ino
    fetch(web.address, tmp_path / 'a', **sums)
    write_json(tmp_path / 'note', dict(n=1))
    one, two = ((tmp_path / o).stat().st_ino for o in ('a', 'note'))
    assert done == [one, 'a', folder, two, 'note', folder]


def test_a_link_under_a_drafts_name_is_not_written_through(tmp_path, monkeypatch):
    (tmp_path / 'outside').write_text('kept')
    monkeypatch.setattr(files.secrets, 'token_hex', lambda n: 'ab')
    (tmp_path / 'a.ab.tmp').symlink_to(tmp_path / 'outside')
    with pytest.raises(FileExistsError), draft(tmp_path / 'a') as f:
        f.write(b'x')
    assert (tmp_path / 'outside').read_text() == 'kept'


def put(folder, *some):
    folder.mkdir(parents=True, exist_ok=True)
    for o in some:
        (folder / o).touch()
    return folder


def test_order_of_places(tmp_path, monkeypatch):
    names = ['one.mat', 'two.mat']

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
    (put(tmp_path / 'data') / 'one.mat').mkdir()  # a folder is not a file
    assert find() == cache  # another data set's
    (tmp_path / 'data' / 'one.mat').rmdir()
    for sub in ('raw', 'toy', ''):  # the nearer, the earlier
        place = put(tmp_path / 'data' / sub, *names)
        assert find() == place
    mine = put(tmp_path / 'mine' / 'raw', *names)
    assert find(tmp_path / 'mine') == find(str(mine)) == mine
    (mine / 'two.mat').unlink()
    said = re.escape("or its sub-folder 'toy', found ['one.mat']")
    with pytest.raises(FileNotFoundError, match=said):
        find(tmp_path / 'mine')
    with pytest.raises(FileNotFoundError, match='found none of them'):
        find(tmp_path / 'nowhere')


@pytest.mark.parametrize(
    'damaged, says',
    [
        ('[1]', 'expected a JSON object, got .1.'),
        ('[' * 100_000, 'cannot be read'),
        ('{"share": 1}', "no entry 'n'"),
        ('{"n": true}', 'to be a whole number, got True'),
        ('{"n": 3, "share": "x"}', 'to be a number, got .x.'),
    ],
)
def test_a_damaged_note_is_one_sentence(tmp_path, damaged, says):
    (tmp_path / 'note.json').write_text(damaged)
    with pytest.raises(ValueError, match=says) as e:
        files.read_json(tmp_path / 'note.json', n=int, share=float)
    assert 'note.json' in str(e.value)
    with pytest.raises(FileNotFoundError):
        files.read_json(tmp_path / 'other.json')


def test_the_hub_is_asked_only_where_it_may_be(tmp_path, monkeypatch):
    hub = pytest.importorskip('huggingface_hub.constants')
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', False)
    with served(Web) as address:
        monkeypatch.setattr(hub, 'ENDPOINT', address)
        files.need_hub('x')  # refuses a HEAD, but is there
    with pytest.raises(ConnectionError, match="'x' is not on this machine, and .* not answer"):
        files.need_hub('x', timeout=1)
    monkeypatch.setattr(hub, 'HF_HUB_OFFLINE', True)
    with pytest.raises(ConnectionError, match='HF_HUB_OFFLINE forbids'):
        files.need_hub('x')
