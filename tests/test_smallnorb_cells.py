"Chapter 10's cells for a reader with smallNORB and a GPU, on tiny files in its exact format."

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
import pytest
from capsnb.data import norb
from capsnb.lab import tasks

chapter = Path(__file__).parents[1] / 'nbs' / 'book' / '10_images.ipynb'


def flagged():
    for c in json.loads(chapter.read_text(encoding='utf-8'))['cells']:
        source = ''.join(c['source'])
        if source.startswith('#| data\n#| cuda\n'):
            yield pytest.param(source, id=c['id'])


@pytest.mark.slow
@pytest.mark.parametrize('source', list(flagged()))
def test_a_cell_runs_and_can_be_run_again(source, tmp_path, monkeypatch, capsys):
    files = norb.tiny_smallnorb(
        tmp_path / 'smallnorb', elevations=(0,), azimuths=(0,), lightings=(0,)
    )
    for key, o in list(norb.norb_files.items()):
        raw = (files / o.name).read_bytes()
        mine = o._replace(md5=hashlib.md5(raw).hexdigest(), unpacked=len(raw))
        monkeypatch.setitem(norb.norb_files, key, mine)
    monkeypatch.setenv('CAPSNB_DATA', str(tmp_path))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.chdir(tmp_path)
    epochs, fit = [], tasks.fit_decks

    def once(net, deck, held, test, collator, out, recipe, **kw):
        epochs.append(recipe['epochs'])
        return fit(net, deck, held, test, collator, out, recipe | dict(epochs=1), **kw)

    monkeypatch.setattr(tasks, 'fit_decks', once)
    gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))  # for the cell alone
    left = {}
    for again in (False, True):
        exec(source, dict(torch=gpu))
        weights = next((tmp_path / 'runs').rglob('model.safetensors'))
        left[again] = weights.read_bytes(), weights.stat().st_mtime_ns
    said = capsys.readouterr().out.splitlines()
    assert left[False] == left[True] and said[-2:] == [said[-1]] * 2
    assert 'the paper: 9' in said[-1] and epochs in ([50] * 2, [300] * 2)
