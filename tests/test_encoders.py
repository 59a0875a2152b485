"""Where an encoder comes from: no code of its own runs, names from files ask nobody."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
import pytest

transformers = pytest.importorskip('transformers')
hub = pytest.importorskip('huggingface_hub')
from capsnb.data import files
from capsnb.data.embed import FrozenEncoder, pinned, read_config, tiny_transformer
from capsnb.data.files import checksum
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import train
from capsnb.lab.text import encoder_note, noted_encoder

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ['a warm , funny film .', 'it never finds its feet .', 'twice .']


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    return tiny_transformer(tmp_path_factory.mktemp('tiny') / 'gpt2', TEXTS)


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch):  # no test asks the Hub; what would, fails
    monkeypatch.setattr(hub.constants, 'HF_HUB_OFFLINE', True)


def in_the_cache(folder, name, commit, root, main=True):
    "the folder as the Hub's local cache keeps it; its home there"
    home = root / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, home / 'snapshots' / commit)
    for sub in ('refs', 'blobs'):
        (home / sub).mkdir(exist_ok=True)
    if main:
        (home / 'refs' / 'main').write_text(commit)
    return home


def alone(code, tmp_path, **env):
    "what a process of its own prints, on a machine that has nothing"
    env = os.environ | dict(PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path / 'home')) | env
    start = 'from capsnb.data.embed import FrozenEncoder\n'
    command = [sys.executable, '-c', start + code]
    how = dict(env=env, input='y\n', capture_output=True, text=True, timeout=200)
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr * ('Do you wish' in done.stderr)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    (tmp_path / 'hub').mkdir()
    return tmp_path / 'hub'


# ---- code

CODE = """import pathlib; pathlib.Path({!r}).write_text("ran")
from transformers import GPT2Config as C, GPT2Model as M
"""


@pytest.mark.slow
def test_a_models_own_code_never_runs_and_nobody_is_asked(tiny, tmp_path):
    files, mark = ('config.json', 'tokenizer_config.json'), tmp_path / 'ran'
    for k, (where, kind) in enumerate(itertools.product(files, ('gpt2', 'unheard-of'))):
        folder = shutil.copytree(tiny, tmp_path / f'm{k}')
        (folder / 'evil.py').write_text(CODE.format(str(mark)))
        note = json.loads((folder / where).read_text())
        entry = dict(AutoConfig='evil.C', AutoModel='evil.M')
        entry = entry if where == 'config.json' else dict(AutoTokenizer=['evil.C', None])
        note |= dict(auto_map=entry, model_type=kind, tokenizer_class='Evil')
        (folder / where).write_text(json.dumps(note))
    made = f"FrozenEncoder({str(tmp_path)!r} + f'/m{{k}}', device='cpu')"
    code = f"for k in range(4):\n try: {made}\n except (ValueError, OSError) as e: print(k, e)"
    said = alone(code, tmp_path, HF_HUB_OFFLINE='1').splitlines()
    assert not mark.exists() and len({line[:2] for line in said}) == len(said), said


def test_a_config_cannot_name_a_kernel(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / 'm')
    note = json.loads((folder / 'config.json').read_text())
    for how in ('someone/kernel', 'flash_attention_2', {'': 'someone/kernel'}):
        (folder / 'config.json').write_text(json.dumps(note | dict(attn_implementation=how)))
        with pytest.raises(ValueError, match='attention|cannot use'):
            FrozenEncoder(folder, device='cpu')


# ---- names


def test_a_name_from_a_note_asks_nobody(tiny, cache, monkeypatch):
    asked = []
    monkeypatch.setattr(files, 'need_hub', lambda name, timeout=5.0: asked.append(name))
    note = encoder_note(FrozenEncoder(tiny, device='cpu')) | dict(encoder='someone/model')
    with pytest.raises(OSError, match=r"encoder='someone/model' \(--encoder someone/model\)"):
        noted_encoder(note, device='cpu')
    assert asked == []
    in_the_cache(tiny, 'someone/model', 'a' * 40, cache)
    assert noted_encoder(note, device='cpu').fingerprint == note['fingerprint'] and asked == []


def test_the_revision_is_pinned_noted_and_used_again(tiny, cache, tmp_path):
    other = tiny_transformer(tmp_path / 'other', TEXTS, seed=1)
    in_the_cache(tiny, 'someone/model', 'a' * 40, cache)
    old = FrozenEncoder('someone/model', device='cpu')
    assert old.revision == encoder_note(old)['revision'] == 'a' * 40
    assert FrozenEncoder(tiny, device='cpu').revision is None
    assert old.cache(TEXTS, tmp_path / 'c', progress=False).header['revision'] == 'a' * 40
    in_the_cache(other, 'someone/model', 'b' * 40, cache)  # the name moves on
    assert FrozenEncoder('someone/model', device='cpu').revision == 'b' * 40
    for where in (None, 'someone/model'):
        again = noted_encoder(encoder_note(old), where, 'cpu')
        assert again.revision == 'a' * 40 and again.fingerprint == old.fingerprint
    in_the_cache(tiny, 'gpt2-large', 'c' * 40, cache)  # not the state that is pinned
    with pytest.raises(OSError, match="cannot load 'gpt2-large'.*HF_HUB_OFFLINE"):
        FrozenEncoder('gpt2-large', device='cpu')
    assert FrozenEncoder('gpt2-large', device='cpu', revision='main').revision == 'c' * 40
    in_the_cache(tiny, 'gpt2-large', pinned['gpt2-large'], cache, main=False)
    assert FrozenEncoder('gpt2-large', device='cpu').revision == pinned['gpt2-large']


def test_what_is_missing_is_named_before_anything_is_read(cache, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="cannot load 'gpt2-large'.*HF_HUB_OFFLINE"):
        read_config('gpt2-large')
    with pytest.raises(ValueError, match='there is no folder'):
        read_config(tmp_path / 'none')
    monkeypatch.setattr(Sentiment, 'read', lambda *a: pytest.fail('the treebank was read'))
    with pytest.raises(OSError, match="cannot load 'gpt2-large'"):
        train('sst5', epochs=1, out=tmp_path / 'run', device='cpu', progress=False)


# ---- what was downloaded


@pytest.mark.parametrize('how', ['changed', 'cut', 'fetch'])
def test_a_download_with_wrong_bytes_says_so(tiny, cache, how):
    commit, name = 'c' * 40, 'somebody/tiny'
    home = in_the_cache(tiny, name, commit, cache)
    weights = home / 'snapshots' / commit / 'model.safetensors'
    blob = home / 'blobs' / checksum(weights)
    weights.rename(blob)
    weights.symlink_to(blob)
    assert FrozenEncoder(name, device='cpu').n_layers
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1  # same size, readable, another number
    blob.write_bytes(data[: len(data) // 2] if how == 'cut' else data)
    with pytest.raises(ValueError, match='model.safetensors is damaged.*SHA-256') as told:
        FrozenEncoder(name, device='cpu', **dict(fetch=False) if how == 'fetch' else {})
    assert str(blob) in str(told.value)
