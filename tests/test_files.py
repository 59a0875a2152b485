"Downloads that break off, and folders that hold half of what they should; what reads well in prose is in nbs/09_files.ipynb."
import hashlib, os, re
import pytest
from hypothesis import given, settings, strategies as st
from capsnb.files import cache_folder, checksum, fetch, find_folder, holds
from web import Web, served

body = bytes(range(256))*64
sums = dict(size=len(body), sha256=hashlib.sha256(body).hexdigest())

@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'xdg'))

@pytest.fixture
def web():
    class Here(Web): asked = []
    Here.body = body
    with served(Here) as Here.address: yield Here

@pytest.mark.parametrize('ranges', [True, False])
def test_goes_on_where_it_broke_off(web, tmp_path, ranges):
    web.breaks, web.ranges, n = 2, ranges, len(body)
    for have in ([n//3, n//3 + (n - n//3)//3] if ranges else [n//3, n//3]):
        with pytest.raises(ConnectionError, match=rf'broke off after {have:,} of {n:,} bytes; the next call goes on from there'):
            fetch(web.address, tmp_path/'a', **sums)
        assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [('a.part', have)]
    assert fetch(web.address, tmp_path/'a', **sums).read_bytes() == body
    assert web.asked == [None, f'bytes={n//3}-', f'bytes={have}-'] and [p.name for p in tmp_path.iterdir()] == ['a']

@pytest.mark.parametrize('wrong', [dict(sha256='0'*64), dict(md5='0'*32)])
def test_another_file_is_not_kept(web, tmp_path, wrong):
    with pytest.raises(ValueError, match=r'expected (SHA-256|MD5) 0000.*nothing was kept'): fetch(web.address, tmp_path/'a', **{**sums, **wrong})
    assert list(tmp_path.iterdir()) == []

def test_a_longer_file_is_another_file(web, tmp_path):
    web.body = body + b'.'
    with pytest.raises(ValueError, match='nothing was kept'): fetch(web.address, tmp_path/'a', **sums)
    assert list(tmp_path.iterdir()) == []

def test_a_spoilt_part_is_not_built_on(web, tmp_path):
    (tmp_path/'a.part').write_bytes(b'?'*100)
    with pytest.raises(ValueError, match='nothing was kept'): fetch(web.address, tmp_path/'a', **sums)
    assert fetch(web.address, tmp_path/'a', **sums).read_bytes() == body

def test_a_good_file_stays_when_a_new_one_fails(web, tmp_path):
    (tmp_path/'a').write_bytes(body)
    web.body = b'?'*len(body)
    with pytest.raises(ValueError): fetch(web.address, tmp_path/'a', **sums)
    assert (tmp_path/'a').read_bytes() == body and [p.name for p in tmp_path.iterdir()] == ['a']

@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.binary(max_size=3000), st.sampled_from(['md5', 'sha256', 'sha1']))
def test_checksum_is_hashlibs(tmp_path_factory, data, kind):
    path = tmp_path_factory.mktemp('c')/'a'
    path.write_bytes(data)
    assert checksum(path, kind) == hashlib.new(kind, data).hexdigest()

def test_checksum_of_more_than_one_piece(tmp_path):
    data = os.urandom(2**20 + 1)
    (tmp_path/'a').write_bytes(data)
    assert checksum(tmp_path/'a') == hashlib.sha256(data).hexdigest()

names = ['one.mat', 'two.mat']
def put(folder, *some):
    folder.mkdir(parents=True, exist_ok=True)
    for o in some: (folder/o).touch()
    return folder

def test_order_of_places(tmp_path, monkeypatch):
    def find(folder=None): return find_folder('toy', names, folder, ('raw',), ('', '.gz'))
    assert find() is None
    cache = put(cache_folder('toy'), 'one.mat', 'two.mat.gz')
    assert cache == tmp_path/'xdg'/'capsnb'/'toy' and find() == cache
    monkeypatch.setenv('CAPSNB_DATA', ''); assert find() == cache
    monkeypatch.setenv('CAPSNB_DATA', str(tmp_path/'data'))
    with pytest.raises(FileNotFoundError, match=r'CAPSNB_DATA.*found none of them'): find()
    put(tmp_path/'data'); assert find() == cache       # another data set's
    for sub in ('raw', 'toy', ''):                      # the nearer, the earlier
        place = put(tmp_path/'data'/sub, *names)
        assert find() == place
    mine = put(tmp_path/'mine'/'raw', *names)
    assert find(tmp_path/'mine') == find(str(mine)) == mine
    (mine/'two.mat').unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("or its sub-folder 'toy', found ['one.mat']")): find(tmp_path/'mine')
    for bad in ('', tmp_path, tmp_path/'nowhere'):
        with pytest.raises(FileNotFoundError, match='found none of them'): find(bad)

def test_a_folder_is_not_a_file(tmp_path):
    put(tmp_path/'one.mat')
    assert holds(tmp_path, names) == []
