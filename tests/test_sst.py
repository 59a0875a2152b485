"Fuzz and download tests of the sentiment trees; the rest is in nbs/data/38_sst.ipynb."

import hashlib
import os
import re
import zipfile
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st
from capsnb.data import sst
from capsnb.data.sst import files, load_sst, parse_tree, phrase_text, read_sst
from capsnb.data.sst import read_trees, tiny_treebank, unique_phrases
from web import Web, served

some = settings(max_examples=300, deadline=None, derandomize=True)
few = settings(max_examples=60, deadline=None, derandomize=True)
odd = ['a', "n't", '.', '-LRB-', 'and\\/or', '\\*', '2\u00a01\\/2', 'Fauré', '3', '\u2028', '\x85']
letters = st.characters(exclude_characters='()', exclude_categories=['Cc', 'Cs', 'Zs'])
words = st.one_of(st.sampled_from(odd), st.text(letters, min_size=1, max_size=5))
labels = st.sampled_from('01234')
lines = st.recursive(
    st.builds('({} {})'.format, labels, words),
    lambda t: st.builds('({} {} {})'.format, labels, t, t),
    max_leaves=12,
)


@pytest.fixture
def tiny(tmp_path):
    return tiny_treebank(tmp_path / 'tiny')


@pytest.fixture(autouse=True)
def no_web(no_machine, monkeypatch):
    monkeypatch.setitem(sst.archive, 'url', 'http://127.0.0.1:1/a.zip')


# ---- one line ----


def by_recursion(line):
    "an independent reader, for sound lines only: nested (label, word) or (label, left, right)"

    def read(at):
        label, at = line[at + 1], at + 3
        if line[at] != '(':
            end = line.index(')', at)
            return (label, line[at:end]), end + 1
        left, at = read(at)
        right, at = read(at + 1)
        return (label, left, right), at + 1

    return read(0)[0]


def nested(tree, k=0):
    start, _, label = tree.nodes[k]
    inside = [nested(tree, p) for p in tree.parts(k)] or [tree.words[start]]
    return (str(label), *inside)


@some
@given(lines)
def test_reads_what_is_there(line):
    tree = parse_tree(line)
    assert str(tree) == line and len(tree.nodes) == 2 * len(tree.words) - 1
    assert nested(tree) == by_recursion(line)
    assert tree.nodes[0] == (0, len(tree.words), int(line[1])) and tree.label == int(line[1])
    for k, (start, end, _) in enumerate(tree.nodes):
        if parts := tree.parts(k):
            (a, b, _), (c, d, _) = (tree.nodes[p] for p in parts)
            assert start == a < b == c < d == end


@few
@given(lines)
def test_cut_lines_are_refused(line):
    for i in range(len(line)):
        for damaged in (line[:i], line[i + 1 :]):
            with pytest.raises(ValueError, match=r'^here, column \d+: expected .+, got '):
                parse_tree(damaged, 'here')


signs = st.text(st.sampled_from('() 0123459a\t\n\u00a0é'), max_size=3)
edits = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), signs), min_size=1, max_size=4)


@some
@given(lines, edits)
def test_random_damage_is_refused_or_read_as_it_stands(line, edits):
    for at, n, new in edits:
        line = line[:at] + new + line[at + n :]
    try:
        tree = parse_tree(line)
    except ValueError as e:
        assert re.match(r'line 1, column \d+: expected ', str(e))
    else:
        assert str(tree) == line and nested(tree) == by_recursion(line)


def test_phrases_in_phrases_without_end_are_one_sentence():
    with pytest.raises(ValueError, match='line 1, column 300001: expected .*the end of the line'):
        parse_tree('(2 ' * 10**5)
    line = '(1 w)'
    for n in range(200):  # three times as deep as the treebank's deepest
        line = f'(2 {line} (3 w{n}))'
    assert str(parse_tree(line)) == line


# ---- files ----


@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda b: b[:-3], 'line 12, column'),
        (lambda b: b.replace(b'\n', b'\n\n', 1), 'line 2, column 1: '),
        (lambda b: b.replace('é'.encode(), b'\xe9'), 'line 8: expected UTF-8'),
        (lambda b: b.replace(b'(0 dreadful)', b'(dreadful)', 1), 'line 4, column 41: '),
        (lambda b: b'\xef\xbb\xbf' + b, 'line 1, column 1: '),
        (lambda b: b.decode().encode('utf-16'), 'line 1: expected UTF-8'),
        (lambda b: b.replace(b'\n', b'\r'), 'line 1, column 71: expected nothing after the tree'),
    ],
)
def test_damaged_files_name_file_and_line(tiny, damage, message):
    path = tiny / 'train.txt'
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(f'{path} {message}')) as e:
        load_sst(tiny, official=False)
    assert type(e.value) is ValueError  # not its subclass UnicodeDecodeError


def test_the_official_files_are_told_by_content(tiny, monkeypatch):
    with pytest.raises(ValueError, match='got 12 with .*load with official=False'):
        read_sst(tiny)
    sums = {k: hashlib.sha256((tiny / name).read_bytes()).hexdigest() for k, name in files.items()}
    monkeypatch.setattr(sst, '_sums', sums)
    assert len(read_sst(tiny)['train']) == 12
    for name in files.values():
        (tiny / name).write_bytes((tiny / name).read_bytes().replace(b'\n', b'\r\n'))
    assert len(read_sst(tiny)['test']) == 4  # a checkout on Windows
    (tiny / 'dev.txt').write_bytes((tiny / 'dev.txt').read_bytes().replace(b'witty', b'wiity'))
    with pytest.raises(ValueError, match=r'dev.txt: expected trees .*: a word or label differs'):
        read_sst(tiny)


# ---- where it is ----


def test_nothing_to_be_had(tmp_path):
    with pytest.raises(ConnectionError, match='name that in CAPSNB_DATA or as `folder`'):
        load_sst()
    left = [p for p in (tmp_path / 'xdg').rglob('*') if p.is_file()]
    assert not [p for p in left if p.suffix != '.lock']


@pytest.fixture
def web(tiny, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as z:
        for name in files.values():
            z.write(tiny / name, f'trees/{name}')

    class Here(Web):
        body, asked = (tmp_path / 'a.zip').read_bytes(), []

    with served(Here) as address:
        sha256 = hashlib.sha256(Here.body).hexdigest()
        whole = dict(url=f'{address}/a.zip', size=len(Here.body), sha256=sha256)
        for key, value in whole.items():
            monkeypatch.setitem(sst.archive, key, value)
        yield Here


def test_download_fills_the_cache_once_also_after_a_kill(web):
    replace, n = os.replace, iter(range(100))

    def dies(a, b):
        if Path(b).suffix == '.txt' and next(n) == 1:
            raise KeyboardInterrupt
        replace(a, b)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, 'replace', dies)
        with pytest.raises(KeyboardInterrupt):
            load_sst(official=False)
    for _ in range(2):
        assert load_sst(official=False)['train'].num_rows == 108 and len(web.asked) == 1


# ---- the data set ----


@few
@given(st.lists(lines, min_size=1, max_size=6))
def test_phrases_are_found_once_and_where_they_are(some_lines):
    trees = [parse_tree(o) for o in some_lines]
    known = {}
    for t in trees:
        for start, end, label in t.nodes:
            known.setdefault(t.words[start:end], set()).add(label)
    if any(len(o) > 1 for o in known.values()):
        said = r"^f line \d+: '.*' has label \d, but label \d in line \d+$"
        with pytest.raises(ValueError, match=said):
            unique_phrases(trees, 'f')
    else:
        rows = unique_phrases(trees)
        in_order = sorted(rows, key=lambda r: (r[0], trees[r[0]].nodes.index(r[1:])))
        assert len(rows) == len(known) and rows == in_order
        for t, start, end, label in rows:
            assert known.pop(trees[t].words[start:end]) == {label}


@pytest.mark.parametrize('phrases', [True, False])
def test_columns(tiny, phrases):
    fine, binary, raw = (
        load_sst(tiny, task, phrases, official=False, raw=raw)
        for task, raw in (('sst5', False), ('sst2', False), ('sst5', True))
    )
    assert fine['test'].features['label'].names == list(sst.label_names)
    assert binary['train'].features['label'].names == ['negative', 'positive']
    for split, name in files.items():
        trees = read_trees(tiny / name)
        for row in fine[split]:
            assert row['text'] == phrase_text(trees[row['tree']], row['start'], row['end'])
        for row in raw[split]:
            words = trees[row['tree']].words[row['start'] : row['end']]
            assert row['text'] == ' '.join(words)
        kept = [dict(row, label=int(row['label'] > 2)) for row in fine[split] if row['label'] != 2]
        assert binary[split].to_list() == kept
        if split != 'train' or not phrases:
            assert [row['tree'] for row in fine[split]] == list(range(len(trees)))
