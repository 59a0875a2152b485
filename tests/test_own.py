"""Data of one's own: what can be read, what is refused and in which words, runs and their test."""

import csv
import json
import math
import re
import shutil
import warnings
from pathlib import Path
import numpy as np
import pytest
import torch

datasets = pytest.importorskip('datasets')
Image = pytest.importorskip('PIL.Image')
from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.data.embed import tiny_transformer
from capsnb.lab.runs import task_of
from capsnb.lab.tasks import evaluate, load_run, train
from capsnb.lab.own import OwnPictures, OwnTable, OwnTexts
from capsnb.lab.own import _counts, in_parts, open_columns, own_task

few = dict(device='cpu', progress=False, epochs=1)


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf')


def numbers(n=60, **more):
    rows = [dict(a=k % 7 + (k % 2) * 5.0, b=float(k), kind='xy'[k % 2], **more) for k in range(n)]
    return datasets.Dataset.from_list(rows)


def sheet(path, n=60):
    with open(path, 'w', newline='') as f:
        out = csv.DictWriter(f, ['a', 'b', 'kind'])
        out.writeheader()
        out.writerows(numbers(n).to_list())
    return path


def photographs(folder, n=12, splits=('',)):
    for split in splits:
        for kind, shade in (('dark', 30), ('light', 220)):
            place = folder / split / kind
            place.mkdir(parents=True)
            for k in range(n):
                Image.new('RGB', (20 + k, 15), (shade, shade, k)).save(place / f'{k}.png')
    return folder


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


@pytest.mark.parametrize('kind', ['csv', 'tsv', 'jsonl', 'parquet', 'folder'])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    wanted, path = numbers().to_list(), tmp_path / f'all.{kind}'
    if kind in ('csv', 'tsv'):
        wanted = [{k: str(v) for k, v in row.items()} for row in wanted]
        text = open(sheet(path), newline='').read()
        path.write_text(text.replace(',', '\t') if kind == 'tsv' else text)
    elif kind == 'jsonl':
        path.write_text('\n'.join(map(json.dumps, wanted)))
    else:
        path.mkdir() if kind == 'folder' else None
        numbers().to_parquet(path / 'x.parquet' if kind == 'folder' else path)
    for source in (str(path), f'file:{path}'):
        assert open_columns(source)['train'].to_list() == wanted


def test_data_frames():
    frame = numbers().to_pandas().sample(frac=1, random_state=0)  # its index is no column
    assert open_columns(frame)['train'].to_list() == frame.to_dict('records')
    frame = frame.astype(dict(kind='category'))
    halves = dict(train=frame[:40], test=frame[40:])
    found = in_parts(halves, 'kind')
    assert [len(found.labels[k]) for k in ('train', 'validation', 'test')] == [34, 6, 20]
    for k, labels in found.labels.items():
        assert [found.names[v] for v in labels] == list(found.splits[k]['kind'])


def test_a_split_that_is_there_is_taken_whole_and_others_are_cut_from_training():
    whole = datasets.DatasetDict(train=numbers(), dev=numbers(10), test=numbers(20))
    assert {k: len(v) for k, v in in_parts(whole, 'kind').labels.items()} == {
        'train': 60,
        'validation': 10,
        'test': 20,
    }
    found = in_parts(whole, 'kind', test='dev')
    assert [len(found.labels[k]) for k in ('train', 'validation', 'test')] == [52, 8, 10]
    rows = [r['b'] for k in ('train', 'validation') for r in found.splits[k]]
    assert sorted(rows) == [float(k) for k in range(60)]


def test_labels_that_are_missing_or_unknown_and_a_test_on_training():
    with pytest.raises(ValueError, match='trained on and tested'):
        in_parts(numbers(), 'kind', test='train')
    strange = numbers(20).map(lambda row: dict(kind='z'))
    with pytest.raises(ValueError, match="none of training: 'z'"):
        in_parts(dict(train=numbers(), test=strange), 'kind')
    some = numbers(20).map(lambda row: dict(kind='y' if row['b'] else None))
    with pytest.raises(ValueError, match="1 of 20 rows of the split 'test' have no label"):
        in_parts(dict(train=numbers(), test=some), 'kind')
    lone = datasets.concatenate_datasets([numbers(), strange.select([0])])
    with pytest.raises(ValueError, match="cannot be set apart"):
        in_parts(lone, 'kind')


@pytest.mark.slow
def test_a_table_is_trained_tested_and_found_again(tmp_path):
    path = sheet(tmp_path / 'all.csv', 200)
    task = OwnTable(f'file:{path}', 'kind')
    m = train(task, 'table', tmp_path / 'run', **few | dict(epochs=30))
    assert m['test_accuracy'] > 0.7
    assert evaluate(tmp_path / 'run', device='cpu')['accuracy'] == m['test_accuracy']
    assert task_of(tmp_path / 'run')['source'] == str(path)
    lines = path.read_text().splitlines()
    path.write_text('\n'.join([lines[0], *lines[:0:-1]]))  # in another order: cut as before
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert evaluate(tmp_path / 'run', device='cpu')['accuracy'] == m['test_accuracy']
    path.write_text('\n'.join(lines[:150]))
    with pytest.warns(UserWarning, match='the data have changed'):
        evaluate(tmp_path / 'run', device='cpu')
    path.write_text('\n'.join(lines).replace('x', 'q'))
    with pytest.raises(ValueError, match="classes x, y; the data have q, y"):
        evaluate(tmp_path / 'run', device='cpu')
    path.unlink()
    with pytest.raises(OSError, match="there is no file or folder"):
        evaluate(tmp_path / 'run', device='cpu')


@pytest.mark.parametrize('hidden', [None, -1, 'no column'])
def test_a_test_without_labels_is_left_out(hidden):
    data = numbers().map(lambda row: dict(kind=ord(row['kind'])))
    test = data.select(range(20)).remove_columns('kind')
    test = test if hidden == 'no column' else test.add_column('kind', [hidden] * 20)
    with pytest.warns(UserWarning, match="1 left out: split 'test' of 20 rows, without labels"):
        found = in_parts(dict(train=data, validation=data.select(range(30)), test=test), 'kind')
    assert found.cut == ('test',) and len(found.labels['validation']) == 30
    with pytest.raises(ValueError, match="the split 'test' has no labels"):
        in_parts(dict(train=data, test=test), 'kind', test='test')


@pytest.mark.parametrize(
    'name,text,rows',
    [
        ('words.csv', 'x,y\n1,None\n2,NA\n3,null\n', [('1', 'None'), ('2', 'NA'), ('3', 'null')]),
        ('names.csv', 'x,y\n01,1.5\n1,\n', [('01', '1.5'), ('1', None)]),
        ('bom.csv', '\ufeffx,y\n1,"a,b"\n', [('1', 'a,b')]),
        ('index.csv', ',x,y\n0,5,6\n1,7,8\n', [('5', '6'), ('7', '8')]),
        ('quote.tsv', 'x\ty\n1\t"What\n0\tI, "a"\n', [('1', '"What'), ('0', 'I, "a"')]),
        ('lines.jsonl', '{"x": "01"}\n\n{"y": "NA", "x": "1"}\n', [('01', None), ('1', 'NA')]),
        ('list.json', '[{"x": 1, "y": null},\n {"x": 2}]', [(1, None), (2, None)]),
    ],
)
def test_what_a_file_says(tmp_path, name, text, rows):
    (tmp_path / name).write_text(text, encoding='utf-8')
    found = open_columns(tmp_path / name)['train'].to_list()
    assert [tuple(r.values()) for r in found] == rows
    assert [[type(v) for v in r.values()] for r in found] == [[type(v) for v in r] for r in rows]


def test_words_for_no_number_and_columns_that_are_left_out():
    odd = [
        dict(n=('?' if k % 5 == 0 else str(k)), m=('1,5' if k % 7 == 0 else str(k)), e=None)
        for k in range(60)
    ]
    data = datasets.Dataset.from_list([a | b for a, b in zip(numbers().to_list(), odd)])
    with pytest.warns(UserWarning) as said:
        rows = OwnTable(data, 'kind').open('train')['rows']
    numbers_rows, said = sorted({str(o.message) for o in said})
    assert "column 'b' differs in every row" in numbers_rows
    assert _counts([5, 4, 9, 8], 'xxyy') and _counts([9, 8, 7], 'xyx')
    assert _counts([1, math.nan, 3, 4], 'xyxy') and not _counts([0.1, 0.3, 0.2, 0.9], 'xxxy')
    assert not _counts([1, 1, 2, 3], 'xxyy') and not _counts([1, 3, 2, 4], 'xxyy')
    for part in ("entries '?' of column 'n'", " of 44 no numbers: '1,5')", "'e' (empty)"):
        assert part in said
    assert rows.shape == (44, 3) and 0 < rows[:, 2].isnan().sum() < 20
    with pytest.raises(ValueError, match="'m' is no column of numbers: .*'1,5'"):
        OwnTable(data, 'kind', columns=('m',)).read


def test_numbers_far_from_zero_keep_their_digits(tmp_path):
    rows = [dict(t=1_700_000_000 + k % 90 / 8, kind='xy'[k % 90 > 45]) for k in range(400)]
    task = OwnTable(datasets.Dataset.from_list(rows), 'kind')
    train(task, 'plain', tmp_path / 'run', **few)
    found = load_run(tmp_path / 'run', 'cpu', task=OwnTable(task.source, 'kind'))
    seen = found.task.open('test')['rows']
    assert len(seen.unique()) == len({r['t'] for r in task.parts.splits['test']})
    torch.testing.assert_close(seen, task.open('test')['rows'])


def test_holes_in_a_table_are_absent_parts(tmp_path):
    holes = numbers().map(lambda row: dict(b=None if row['b'] % 3 else row['b']))
    task = OwnTable(holes, 'kind')
    rows = task.open('train')['rows']
    assert rows[:, 1].isnan().any() and not rows[:, 0].isnan().any()
    net = task.make('table').eval()
    assert net.mean[1] == rows[:, 1][~rows[:, 1].isnan()].mean()
    one = torch.tensor([[1.0, math.nan]])
    assert net.credit(one)[0, 1].eq(0).all() and net(one).scores.isfinite().all()
    assert net(torch.full((2, 2), math.nan)).scores.isfinite().all()
    train(task, 'plain', tmp_path / 'run', **few)
    far = numbers().map(lambda row: dict(a=math.inf))
    with pytest.warns(UserWarning, match="'a' .44 of 44 no numbers: inf"):
        assert OwnTable(far, 'kind').read == ('b',)


def test_pictures_in_folders(tmp_path):
    folder, out = photographs(tmp_path / 'all'), tmp_path / 'run'
    how = ('--image', 'image', '--size', 16, '--epochs', 6, '--device', 'cpu', '--out', out)
    done = capsnb('train', f'file:{folder}', *how, '--no-colour')
    assert done.exit_code == 0, done.output
    done = capsnb('train', f'file:{folder}', '--image', 'imag', '--out', out)
    assert "no column 'imag'" in done.output  # which the run that is there does not hide
    assert task_of(out)['colour'] is False and task_of(out)['names'] == ['dark', 'light']
    assert capsnb('eval', out, '--device', 'cpu').exit_code == 0
    assert load_run(out, 'cpu').task.open('test')['image'].shape[1:] == (1, 16, 16)
    x = OwnPictures(folder, size=16).open('test')['image']
    assert x.shape[1:] == (3, 16, 16) and x.dtype == torch.uint8
    assert {int(p[2].float().mean().round()) for p in x} <= set(range(12))  # which image it was


def test_lines_that_are_no_objects_and_the_epochs_of_few_rows(tmp_path):
    path = tmp_path / 'words.json'
    path.write_text('["a", "b"]')
    with pytest.raises(ValueError, match="expected an object a row.*got 'a'"):
        open_columns(path)
    for n, size, steps in ((40, 20, 400), (40, 7, 400), (1000, 20, 1400)):
        found = OwnTable(numbers(n), 'kind').epochs(dict(epochs=40, samples_per_step=size))
        assert steps <= found * -(-round(0.7 * n) // size) < steps + 20


def test_names_of_folders_and_files(tmp_path):
    folder = photographs(tmp_path / 'all', splits=('Train', 'TEST'))
    assert {k: len(v) for k, v in open_columns(folder).items()} == dict(train=24, test=24)
    (folder / 'dark').mkdir()
    shutil.copy(folder / 'Train' / 'dark' / '1.png', folder / 'dark')
    with pytest.raises(ValueError, match="'TEST' looks like a split, 'dark' like a class"):
        open_columns(folder)
    folder = photographs(tmp_path / 'flat')
    for k, p in enumerate(sorted((folder / 'dark').iterdir())[:5]):
        p.rename(p.with_name(f'test_{k}.png'))
    (folder / 'light').rename(folder / 'train')  # which is a vehicle
    (folder / 'notes.txt').write_text('mine')
    with pytest.warns(UserWarning, match='1 left out: notes.txt'):
        found = in_parts(folder)
    assert found.names == ('dark', 'train') and sum(map(len, found.labels.values())) == 24
    name = lambda r: Path(r['image'].filename).name
    names = [*map(name, found.splits['test'])]
    shutil.move(folder, tmp_path / 'moved')  # another place: the same rows
    with pytest.warns(UserWarning, match='notes.txt'):
        moved = in_parts(tmp_path / 'moved')
    assert [*map(name, moved.splits['test'])] == names
    tables = tmp_path / 'tables'
    tables.mkdir()
    for stem in ('train-00000-of-00002', 'train-00001-of-00002', 'test'):
        numbers(20).to_parquet(tables / f'{stem}.parquet')
    assert {k: len(v) for k, v in open_columns(tables).items()} == dict(train=40, test=20)
    numbers(20).to_parquet(tables / 'more.parquet')
    with pytest.raises(ValueError, match="which split is 'more.parquet'"):
        open_columns(tables)


kinds = ('bool', 1), ('uint8', 255), ('uint16', 65535), ('float32', 1), ('float64', 255)
kinds += ('int64', 255), ('int32', 1), ('float32', 65535)


@pytest.mark.parametrize('dtype,white', kinds)
@pytest.mark.parametrize('first', [False, True])
def test_arrays_of_any_kind(dtype, white, first):
    levels = [0, white] if dtype == 'bool' else [white / 5, white]
    shape = (3, 9, 12) if first else (9, 12, 3)
    rows = [np.full(shape, levels[k % 2]).astype(dtype).tolist() for k in range(40)]
    kind = datasets.Array3D(shape, dtype)
    data = datasets.Dataset.from_dict(
        dict(image=rows, label=[k % 2 for k in range(40)]),
        features=datasets.Features(image=kind, label=datasets.Value('int64')),
    )
    for data in (data, data.with_format('torch')):
        seen = OwnPictures(data, size=8).open('test')
        want = {k: round(float(levels[k]) / white * 255) for k in (0, 1)}
        if dtype.startswith('int') and white == 1:
            want[0] = 0
        for x, y in zip(seen['image'], seen['label'].tolist()):
            assert x.float().mean() == want[y]


def test_images_of_16_bits_transparent_and_of_other_modes(tmp_path):
    def one(image):
        rows = datasets.Dataset.from_dict(
            dict(image=[image] * 10 + [Image.new('L', (4, 4))] * 10, label=[0] * 10 + [1] * 10)
        )
        x = OwnPictures(rows, size=4).open('test')
        return x['image'][x['label'] == 0][0, :, 0, 0].tolist()

    deep = Image.fromarray(np.full((4, 4), 12000, 'uint16'))
    assert one(deep) == [47, 47, 47]
    assert one(Image.new('RGBA', (4, 4), (255, 0, 0, 0))) == [255, 255, 255]
    assert one(Image.new('LA', (4, 4), (0, 255))) == [0, 0, 0]
    palette = Image.new('P', (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    assert one(palette) == [10, 200, 30]


def test_errors_say_what_to_add(tmp_path):
    data = datasets.Dataset.from_dict(dict(words=['so', 'no'] * 20, kind=['x', 'y'] * 20))
    cures = ({}, '--label names'), (dict(label='kind'), 'text words'), (dict(encoder='x'), '--text')
    for options, said in cures:
        with pytest.raises(ValueError, match=said):
            own_task(data, **options).read
    flat = photographs(tmp_path / 'all') / 'dark'
    with pytest.raises(ValueError, match='a sub-folder for each class'):
        OwnPictures(flat).names
    file = flat / '3.png'
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(OSError, match=f"'{file}'. cannot be read: "):
        [*map(OwnPictures(flat.parent).open, ('train', 'test', 'validation'))]


def test_paths_in_a_column(tmp_path):
    files = sorted(photographs(tmp_path / 'all').rglob('*.png'))
    rows = [dict(at=str(p), shade=p.parent.name) for p in files]
    own = OwnPictures(datasets.Dataset.from_list(rows), 'shade', image='at', size=16)
    assert own.open('train')['image'].float().std() > 50


@pytest.mark.slow
def test_texts(tmp_path):
    say = [('bad', 'it broke'), ('good', 'it lasts'), ('good', 'worth it'), ('bad', 'no')]
    rows = [dict(words=f'{t}, says {k}', mood=m) for k in range(10) for m, t in say]
    path = tmp_path / 'all.jsonl'
    path.write_text('\n'.join(map(json.dumps, rows)))
    folder = tiny_transformer(tmp_path / 'model', [r['words'] for r in rows])
    out, cache = tmp_path / 'run', tmp_path / 'cache'
    how = ('--text', 'words', '--label', 'mood', '--encoder', folder, '--cache', cache)
    how += ('--epochs', 1, '--device', 'cpu', '--out', out)
    done = capsnb('train', f'file:{path}', *how)
    assert done.exit_code == 0, done.output
    found = load_run(out, 'cpu', cache=cache)
    assert isinstance(found.task, OwnTexts) and found.task.names == ('bad', 'good')
    accuracy = evaluate(out, device='cpu', cache=cache)['accuracy']
    assert accuracy == json.loads((out / 'metrics.json').read_text())['test_accuracy']
    done = capsnb('explain', out, 'it broke, worth it', '--device', 'cpu')
    assert done.exit_code == 0 and 'at random' in done.output, done.output
    assert '\x1b[' not in done.output  # no colours for a file
    left = (out / 'report_credit.html').read_text()
    assert re.findall('<span[^>]*>([^<]+)</span>', left)[0].strip() == 'it'
    done = capsnb('explain', out, 'it broke', '--device', 'cpu', '--json')
    (e,) = json.loads(done.stdout)
    assert [w for w, _ in e['parts']][:2] == ['it', 'broke'] and e['label'] in ('bad', 'good')
    said, page = tmp_path / 'said.txt', tmp_path / 'new' / 'page.html'
    said.write_text('it lasts\n\nno <b> way\n')
    how = ('explain', out, 'it broke', said, '--device', 'cpu', '--html')
    done = capsnb(*how, page)
    assert done.exit_code == 0 and done.output.count('at random') == 3, done.output
    assert '<b> way' not in page.read_text() and '&lt;b&gt;' in page.read_text()
    done = capsnb(*how, said)
    assert done.exit_code == 1 and "somebody's own file" in done.output
    assert said.read_text() == 'it lasts\n\nno <b> way\n'


def test_classes_without_an_order_are_weighed_one_by_one(tmp_path):
    rows = [dict(text=f'{w} number {k}', label=w) for k in range(12) for w in ('one', 'two', 'six')]
    path = tmp_path / 'all.jsonl'
    path.write_text('\n'.join(map(json.dumps, rows)))
    folder = tiny_transformer(tmp_path / 'model', [r['text'] for r in rows])
    task = OwnTexts(encoder=folder, source=str(path), cache=tmp_path / 'cache')
    train(task, None, tmp_path / 'run', **few)
    done = capsnb('explain', tmp_path / 'run', 'one number 3', '--device', 'cpu')
    assert done.exit_code == 0 and '  number' in done.output, done.output
