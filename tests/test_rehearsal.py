"""GPT-2-large, rehearsed: every act in a process of its own; at full size where memory allows."""

import os
import shutil
import pytest
from capsnb.data.embed import FrozenEncoder, read_config, stand_in
from capsnb.data.sst import tiny_treebank
from capsnb.lab.sentiment import apart, python_texts, rehearse

small = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=400)


def free_memory():
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (ValueError, OSError, AttributeError):
        return 0


def treebank(folder, times):
    "The tiny one, its twelve training sentences so many times over."
    path = tiny_treebank(folder) / 'train.txt'
    path.write_bytes(path.read_bytes() * times)
    return path.parent


def test_its_sizes_are_those_of_the_model_it_stands_in_for(tmp_path):
    encoder = FrozenEncoder(stand_in(tmp_path, python_texts(2), **small), device='cpu')
    config, real = encoder.model.config, read_config('gpt2-large')
    assert (real.n_embd, real.n_layer, real.n_head, real.vocab_size) == (1280, 36, 20, 50257)
    differ = {k for k, v in real.to_dict().items() if config.to_dict().get(k) != v}
    assert differ - {'_name_or_path', 'architectures', 'dtype', 'torch_dtype', 'use_cache'} == {
        *small,
        'bos_token_id',
        'eos_token_id',
    }
    with pytest.raises(ValueError, match='expected texts for 9,000 tokens, they give 2[0-9]{2}'):
        stand_in(tmp_path, ['a'], vocab_size=9000)


def test_an_act_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="failed in 'read'.*there is no folder"):
        how = dict(dtype='float32', texts=['a'], device='cpu')
        apart('read', tmp_path, tmp_path / 'read.json', **how)
    assert not list(tmp_path.iterdir())


def test_another_rehearsal_is_not_mixed_in(tmp_path):
    trees = tiny_treebank(tmp_path / 'trees')
    (tmp_path / 'asked.json').write_text('{"limit": 7}')
    with pytest.raises(ValueError, match='holds another rehearsal.*now .*60'):
        rehearse(tmp_path, 60, trees, False)


def check(told, steps):
    acts = told['acts']
    assert told['resumed_is_whole'] and acts['resumed']['weights'] == acts['whole']['weights']
    assert all(acts[k]['steps'] == steps for k in ('whole', 'half', 'resumed', 'cached', 'reread'))
    assert 0 < acts['resumed']['resumed_from'] < steps and steps >= 3
    assert 'resumed_from' not in acts['whole']
    assert acts['cached']['weights'] == acts['reread']['weights'] != acts['whole']['weights']
    assert acts['half']['weights'] not in (acts['whole']['weights'], acts['cached']['weights'])
    assert all(acts[k]['batch_seconds'] > 0 for k in ('whole', 'half', 'cached', 'reread'))
    assert acts['cached']['cache_bytes'] > 0 == acts['whole']['cache_bytes']
    assert {'gorgeous', 'movie'} <= {w for w, _ in acts['explain']['words']}


@pytest.mark.slow
def test_all_acts_with_a_small_double(tmp_path):
    trees = treebank(tmp_path / 'trees', 15)
    told = rehearse(tmp_path / 'all', 180, trees, False, files=3, sizes=small)
    check(told, 9)
    assert (
        rehearse(tmp_path / 'all', 180, trees, False, files=3, sizes=small)['acts'] == told['acts']
    )


@pytest.mark.slow
@pytest.mark.skipif(free_memory() < 16e9, reason='needs 16 GB of free memory')
def test_all_acts_at_full_size(tmp_path):
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip('needs 8 GB of disk')
    trees = treebank(tmp_path / 'trees', 5)
    told = rehearse(tmp_path / 'all', 60, trees, False)
    check(told, 3)
    assert told['acts']['make']['bytes'] > 3.0e9
    assert told['acts']['float32']['shape'][2:] == [37, 1280]
