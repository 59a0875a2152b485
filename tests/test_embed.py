"""The frozen encoder and its cache: company, refusals, SIGKILL, damage, dtypes, workers."""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip('transformers')
pytest.importorskip('tokenizers')
np = pytest.importorskip('numpy')
from capsnb.data import embed
from capsnb.data.embed import (
    EmbeddingCache,
    FrozenEncoder,
    check_space,
    end_token,
    pad_embeddings,
    read_cache,
    tiny_transformer,
)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[1]
WORDS = 'a warm , funny and deeply humane film that never finds its feet but laughs twice .'.split()


def some_texts(n, longest, seed=0):
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(n)]


TEXTS = some_texts(12, 30)


def gap(x, y):  # the worst vector's relative error; hidden states have the scale they have
    assert x.shape == y.shape
    return ((x - y).norm(dim=-1) / y.norm(dim=-1)).max().item()


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp('tiny')
    found = {kind: tiny_transformer(root / kind, TEXTS, kind) for kind in ('gpt2', 'bert')}

    def other(name, like, config, cls=None):  # another architecture with a tokenizer we have
        folder = root / name
        shutil.copytree(found[like], folder)
        (folder / 'model.safetensors').unlink()
        torch.manual_seed(0)
        (cls or transformers.AutoModel).from_config(config).save_pretrained(folder)
        found[name] = folder

    other(
        't5',
        'bert',
        transformers.T5Config(
            vocab_size=200, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
        ),
    )
    other(
        'roberta',
        'bert',
        transformers.RobertaConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=66,
            pad_token_id=1,
        ),
    )
    other(
        'llama',
        'gpt2',
        transformers.LlamaConfig(
            vocab_size=400,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=600,
        ),
    )
    return found


@pytest.fixture(scope='module')
def encoders(folders):
    return {name: FrozenEncoder(folder, device='cpu') for name, folder in folders.items()}


every = pytest.mark.parametrize('kind', ['gpt2', 'bert', 't5', 'roberta', 'llama'])

# ---- states


@every
def test_company_and_padding_do_not_matter(encoders, kind):
    enc, texts = encoders[kind], some_texts(17, 25, seed=3)
    alone = [enc([t]).embs[0] for t in texts]
    for batch_size, seed in ((1, 0), (5, 1), (17, 2)):
        order = random.Random(seed).sample(range(17), 17)
        for k, e in zip(order, enc.encode([texts[k] for k in order], batch_size)):
            assert gap(e, alone[k]) < 1e-5
    mask, embs = enc(texts)
    assert mask.sum(1).tolist() == [len(e) for e in alone]
    assert not embs[mask == 0].any() and embs.shape[2:] == (3, 32) == (enc.n_layers, enc.d_emb)


@pytest.mark.parametrize('kind', ['gpt2', 'bert', 'llama'])
def test_one_token_and_512(folders, kind):
    enc = FrozenEncoder(folders[kind], device='cpu', end=None)
    frame = enc.tokenizer.num_special_tokens_to_add()
    short, long = 'a', ' '.join(['a'] * (512 - frame)) if kind == 'bert' else '!' * 512
    assert [len(r) for r in enc.tokens([short, long])] == [1 + frame, 512]
    mask, embs = enc([short, long])
    assert embs.shape == (2, 512, 3, 32) and embs.isfinite().all()
    assert gap(embs[0, : 1 + frame], enc([short]).embs[0]) < 1e-5


def test_longer_than_the_model(folders, encoders):
    with pytest.raises(ValueError, match='text 1 has 513 tokens, the model takes at most 512'):
        encoders['bert'].encode(['a', ' '.join(['a'] * 511)])
    assert encoders['roberta'].most == 64  # 66 positions, two of which are lost to the padding id
    enc = encoders['roberta']
    assert enc([' '.join(['a'] * 62)]).embs.shape[1] == 64
    with pytest.raises(ValueError, match='65 tokens, the model takes at most 64'):
        enc([' '.join(['a'] * 63)])
    assert encoders['t5'].most is None  # relative positions


def test_a_stored_truncation_is_not_obeyed(folders, tmp_path):
    "sentence-transformers' tokenizers carry one, at 128 tokens, and padding to it"
    tok = transformers.AutoTokenizer.from_pretrained(folders['bert'])
    tok.backend_tokenizer.enable_truncation(8)
    tok.backend_tokenizer.enable_padding(length=8)
    folder = shutil.copytree(folders['bert'], tmp_path / 'cut')
    tok.backend_tokenizer.save(str(folder / 'tokenizer.json'))
    enc = FrozenEncoder(folder, device='cpu')
    assert [len(r) for r in enc.tokens(['a', ' '.join(['a'] * 50)])] == [3, 52]


def test_states_are_those_of_transformers(folders, encoders):
    tok, net = (
        transformers.AutoTokenizer.from_pretrained(folders['gpt2']),
        transformers.AutoModel.from_pretrained(folders['gpt2']).eval(),
    )
    ids = tok(TEXTS[0] + '<|endoftext|>', return_tensors='pt').input_ids
    with torch.no_grad():
        want = torch.stack(net(ids, output_hidden_states=True).hidden_states, 2)[0]
    assert gap(encoders['gpt2'](TEXTS[:1]).embs[0], want) < 1e-5


def test_a_network_can_be_trained_on_them(encoders):
    mask, embs = encoders['gpt2'](TEXTS[:3])
    net = torch.nn.Linear(32, 2)
    net(embs).sum().backward()  # tensors made in inference mode would refuse
    assert net.weight.grad.abs().sum() > 0 and all(
        p.grad is None and not p.requires_grad for p in encoders['gpt2'].model.parameters()
    )


def test_order_and_stream(encoders):
    enc = encoders['gpt2']
    assert [len(e) for e in enc.encode(TEXTS, 5)] == [len(r) for r in enc.tokens(TEXTS)]
    pairs = list(enc.stream(TEXTS, 5))
    assert sorted(k for k, _ in pairs) == list(range(12))
    assert [len(e) for _, e in pairs] == sorted((len(r) for r in enc.tokens(TEXTS)), reverse=True)


@pytest.mark.parametrize('dtype', ['bfloat16', torch.float64])
def test_compute_dtype(folders, encoders, dtype):
    enc = FrozenEncoder(folders['gpt2'], device='cpu', dtype=dtype)
    assert (
        enc([TEXTS[0]]).embs.dtype
        == enc([TEXTS[0]]).mask.dtype
        == getattr(torch, str(dtype).split('.')[-1])
    )
    assert gap(enc([TEXTS[0]]).embs.float(), encoders['gpt2']([TEXTS[0]]).embs) < (
        1e-5 if dtype is torch.float64 else 0.05
    )


# ---- the end of a text


def test_one_end_token(encoders):
    for kind, end in (('gpt2', 0), ('bert', 3), ('llama', 0)):
        for row in encoders[kind].tokens(TEXTS):
            assert row[-1] == end and row.count(end) == 1


def test_end_token_that_also_stands_in_front(folders):
    "OPT's tokenizer opens a text with the token that ends it: the end is still missing"
    t = pytest.importorskip('tokenizers')
    tok = transformers.AutoTokenizer.from_pretrained(folders['gpt2'])
    tok.backend_tokenizer.post_processor = t.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
    )
    assert end_token(tok) == 0


def test_end_named_and_off(folders):
    assert FrozenEncoder(folders['gpt2'], device='cpu', end=None).tokens(['a'])[0][-1] != 0
    assert FrozenEncoder(folders['bert'], device='cpu', end='[PAD]').tokens(['a'])[0][-2:] == [3, 0]
    with pytest.raises(ValueError, match="no token '<eot>' to end a text with"):
        FrozenEncoder(folders['gpt2'], device='cpu', end='<eot>')


def test_tokenizer_without_an_end(folders, tmp_path):
    folder = shutil.copytree(folders['gpt2'], tmp_path / 'endless')
    tok = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok.backend_tokenizer).save_pretrained(
        folder
    )
    with pytest.raises(ValueError, match=r"no end token \(eos_token, or sep_token\).*end=None"):
        FrozenEncoder(folder, device='cpu')
    assert FrozenEncoder(folder, device='cpu', end=None)(['a']).mask.shape == (1, 1)


# ---- refusals


@pytest.mark.parametrize(
    'texts, message',
    [
        (['a', ''], 'text 1 is empty'),
        ([' \t\n'], 'text 0 is empty'),
        (['a', 3], 'text 1 is of type int'),
        ('a', 'got one text'),
    ],
)
def test_no_texts_of_that_kind(encoders, tmp_path, texts, message):
    for f in (
        encoders['gpt2'],
        encoders['gpt2'].encode,
        encoders['gpt2'].stream,
        lambda t: encoders['gpt2'].cache(t, tmp_path / 'c'),
    ):
        with pytest.raises(ValueError, match=message):
            f(texts)
    assert not (tmp_path / 'c').exists()


def test_no_text_at_all(encoders, tmp_path):
    with pytest.raises(ValueError, match='at least one text'):
        encoders['gpt2']([])
    with pytest.raises(ValueError, match='at least one text to cache'):
        encoders['gpt2'].cache([], tmp_path / 'c')
    assert encoders['gpt2'].encode([]) == []


@pytest.mark.parametrize('layers', [[3], [-4], 'first', [], [1.5], 7])
def test_unknown_layers(folders, layers):
    with pytest.raises(ValueError, match='unknown layers .* from 0 .* to 2'):
        FrozenEncoder(folders['gpt2'], layers=layers, device='cpu')


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match='holds no model: expected config.json, found nothing'):
        FrozenEncoder(tmp_path, device='cpu')
    with pytest.raises(ValueError, match='holds no model: expected a.gguf'):
        FrozenEncoder(tmp_path, gguf_file='a.gguf', device='cpu')
    with pytest.raises(ValueError, match='there is no folder'):
        FrozenEncoder(tmp_path / 'x', device='cpu')


def test_weights_that_are_missing(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(folders['gpt2'], tmp_path / 'm')
    w = load_file(folder / 'model.safetensors')
    w.pop('h.1.mlp.c_fc.weight')
    save_file(w, folder / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(ValueError, match='lacks 1 weights, such as h.1.mlp.c_fc.weight'):
        FrozenEncoder(folder, device='cpu')


def test_a_missing_pooler_is_no_loss_and_no_identity(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(folders['bert'], tmp_path / 'm')
    w = load_file(folder / 'model.safetensors')
    save_file(
        {k: v for k, v in w.items() if 'pooler' not in k},
        folder / 'model.safetensors',
        metadata={'format': 'pt'},
    )
    one, two = FrozenEncoder(folder, device='cpu'), FrozenEncoder(folder, device='cpu')
    assert (
        not one.model.pooler.dense.weight.equal(two.model.pooler.dense.weight)
        and one.fingerprint == two.fingerprint
    )


def test_name_that_cannot_be_fetched():
    tries = "try: FrozenEncoder(device='cpu')\nexcept OSError as e: print(e)"
    code = f"from capsnb.data.embed import FrozenEncoder\n{tries}"
    with_empty_cache = {
        **os.environ,
        'HF_HUB_OFFLINE': '1',
        'PYTHONPATH': str(ROOT),
        'HF_HOME': str(ROOT / 'there' / 'is' / 'none'),
    }
    done = subprocess.run(
        [sys.executable, '-c', code],
        env=with_empty_cache,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "cannot load 'gpt2-large', which is no folder here" in done.stdout, (
        done.stdout + done.stderr
    )


def test_fingerprint_is_the_same_in_another_process(folders, encoders):
    made = f"FrozenEncoder({str(folders['bert'])!r}, device='cpu')"
    code = f"from capsnb.data.embed import FrozenEncoder; print({made}.fingerprint)"
    done = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == encoders['bert'].fingerprint, done.stderr


# ---- padding


def test_pad_embeddings():
    items = [torch.randn(n, 2, 3).half() for n in (4, 1, 7)]
    mask, embs = pad_embeddings(items)
    assert mask.dtype == embs.dtype == torch.float32 and mask.sum(1).tolist() == [4, 1, 7]
    for k, o in enumerate(items):
        assert_close(embs[k, : len(o)], o.float(), rtol=0, atol=0)
        assert not embs[k, len(o) :].any()
    memory = torch.full((200,), float('nan'))
    assert pad_embeddings(items, out=memory).embs.equal(embs)
    with pytest.raises(ValueError, match='expected out of 126'):
        pad_embeddings(items, out=memory[:125])
    with pytest.raises(ValueError, match='expected out of 126'):
        pad_embeddings(items, out=memory.double())
    with pytest.raises(ValueError, match='no items'):
        pad_embeddings([])


# ---- the cache


@pytest.mark.parametrize(
    'dtype, rtol', [('float16', 2**-11), ('bfloat16', 2**-8), ('float32', 0), (torch.float32, 0)]
)
def test_cache_holds_what_was_computed(encoders, tmp_path, dtype, rtol):
    enc = encoders['bert']
    cache = enc.cache(TEXTS, tmp_path / 'c', dtype=dtype, batch_size=5, progress=False)
    assert len(cache) == 12 and cache.lengths.tolist() == [len(r) for r in enc.tokens(TEXTS)]
    for k, e in enumerate(enc.encode(TEXTS, batch_size=5)):
        assert_close(cache[k].float(), e, rtol=rtol, atol=1e-7)
        assert cache[k].dtype == cache.dtype
    assert (tmp_path / 'c' / 'embeddings.bin').stat().st_size == enc.cache_bytes(TEXTS, dtype)
    assert cache[-1].equal(cache[11])
    with pytest.raises(IndexError):
        cache[12]


def test_an_item_is_yours(encoders, tmp_path):
    cache = encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    before, on_disk = cache[3].clone(), (tmp_path / 'c' / 'embeddings.bin').read_bytes()
    cache[3].zero_()
    assert cache[3].equal(before)
    cache.look(3).zero_()
    assert (
        tmp_path / 'c' / 'embeddings.bin'
    ).read_bytes() == on_disk  # the file itself is out of reach


def test_works_from_a_folder_that_cannot_be_written(encoders, tmp_path):
    cache = encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    item = cache[0]
    for p in (tmp_path / 'c').iterdir():
        p.chmod(0o444)
    assert EmbeddingCache(tmp_path / 'c')[0].equal(item)


def test_workers_and_pickle(encoders, tmp_path):
    cache = encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    assert len(pickle.dumps(cache)) < 500 and pickle.loads(pickle.dumps(cache))[5].equal(cache[5])
    loader = torch.utils.data.DataLoader(
        cache,
        batch_size=5,
        collate_fn=pad_embeddings,
        num_workers=2,
        multiprocessing_context='spawn',
    )
    for k, batch in enumerate(loader):
        assert batch.embs.equal(cache.batch(range(5 * k, min(5 * k + 5, 12))).embs)


def reading(encoder):  # texts in each batch that goes through
    seen = []
    note = lambda net, args, kw: seen.append(len(kw['input_ids']))
    return seen, encoder.model.register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.parametrize('kind', ['gpt2', 'bert'])
def test_equal_texts_are_read_once(encoders, kind, tmp_path):
    "from a cache and in memory each has its own place in the order, as if it had been read alone"
    encoder, order = encoders[kind], [0, 1, 0, 2, 3, 1, 0]
    texts, alone = [TEXTS[k] for k in order], [encoder([TEXTS[k]]).embs[0] for k in range(4)]
    seen, hook = reading(encoder)
    try:
        cache = encoder.cache(texts, tmp_path / 'c', 'float32', progress=False)
        assert sum(seen) == 4 and len(cache) == len(texts)
        held = encoder.hold({'a': (texts, None)}, 'float32')['a']
        some = encoder.hold({'a': (texts, [6, 2, 5])}, 'float32')['a']
        assert sum(seen) == 4 + 4 + 2
    finally:
        hook.remove()
    assert len(held.flat) == sum(map(len, alone)) < cache.header['n_tokens']
    assert len(some.flat) == len(alone[0]) + len(alone[1])
    for k, who in enumerate(order):
        mask, where = held.places([k])
        for found in (cache[k], held.look(where)[mask > 0], encoder.encode(texts)[k]):
            assert_close(found, alone[who], atol=1e-5, rtol=1e-4)
    assert torch.equal(*(some.places([k])[1] for k in (2, 6)))
    with pytest.raises(ValueError, match='text 0 is not among'):
        some.places([0])  # the same text as 2, but it was not asked for


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
@pytest.mark.parametrize('end', ['auto', None])
def test_a_tokenizer_without_a_token_to_pad_with(folders, kind, end):
    "as GPT-2's: of what fills the box nothing is seen"
    encoder = FrozenEncoder(folders[kind], device='cpu', end=end)
    assert encoder.tokenizer.pad_token is None and (end is None or encoder.pad_id == encoder.end_id)
    texts = sorted(TEXTS, key=len)[:: len(TEXTS) - 1]
    mask, embs = encoder(texts)
    lengths = [len(r) for r in encoder.tokens(texts)]
    assert lengths[0] < lengths[1] and mask.sum(1).tolist() == lengths
    for text, e, n in zip(texts, embs, lengths):
        assert_close(e[:n], encoder([text]).embs[0], atol=1e-5, rtol=1e-4)
        assert not e[n:].any()


def test_empty_folder_is_taken_and_a_full_one_left_alone(encoders, tmp_path):
    (tmp_path / 'c').mkdir()
    encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    (tmp_path / 'd').mkdir()
    (tmp_path / 'd' / 'thesis.txt').write_text('all of it')
    with pytest.raises(ValueError, match='holds no cache'):
        encoders['gpt2'].cache(TEXTS, tmp_path / 'd', progress=False)
    assert [p.name for p in (tmp_path / 'd').iterdir()] == ['thesis.txt']


RUN = """
import sys, time, torch
from capsnb.data.embed import FrozenEncoder
enc = FrozenEncoder(sys.argv[1], device='cpu')
enc.model.register_forward_pre_hook(lambda *_: time.sleep(.02))       # give the parent time to kill
print('starts', flush=True)
enc.cache(sys.argv[3:], sys.argv[2], batch_size=2, save_seconds=0., progress=False)
"""


def test_killed_and_resumed(folders, encoders, tmp_path):
    texts, env, enc = (
        some_texts(60, 12, seed=9),
        {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'},
        encoders['gpt2'],
    )
    p = subprocess.Popen(
        [sys.executable, '-c', RUN, str(folders['gpt2']), str(tmp_path / 'c'), *texts],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    wanted = random.Random().randint(5, 35)
    assert p.stdout.readline() == 'starts\n'

    def ticked():
        return (
            int((np.fromfile(tmp_path / 'c' / 'ticks.bin', '<u8') != 0).sum())
            if (tmp_path / 'c' / 'ticks.bin').exists()
            else 0
        )

    while ticked() < wanted and p.poll() is None:
        time.sleep(0.001)
    p.kill()
    p.wait()
    p.stdout.close()
    assert p.returncode == -signal.SIGKILL, 'the run ended before it could be killed'
    done = ticked()
    print('killed with', done, 'texts done')
    assert 5 <= done < 60
    with pytest.raises(ValueError, match=f'not finished, {60 - done} of 60 texts are missing'):
        EmbeddingCache(tmp_path / 'c')
    with pytest.raises(ValueError, match='another text'):
        enc.cache(texts[::-1], tmp_path / 'c', progress=False)
    seen = []
    hook = enc.model.register_forward_pre_hook(
        lambda net, args, kw: seen.append(len(kw['input_ids'])), with_kwargs=True
    )
    try:
        cache = enc.cache(texts, tmp_path / 'c', batch_size=2, progress=False)
    finally:
        hook.remove()
    assert sum(seen) == 60 - done
    cache.verify()
    for k, e in enumerate(enc.encode(texts)):
        assert gap(cache[k].float(), e) < 1e-3


def test_killed_while_it_was_laid_out(encoders, tmp_path):
    (tmp_path / 'c').mkdir()
    (tmp_path / 'c' / 'index.npy').write_bytes(b'half')
    with pytest.raises(ValueError, match='holds no cache'):
        EmbeddingCache(tmp_path / 'c')
    encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False).verify()
    assert len(list((tmp_path / 'c').iterdir())) == 4


@pytest.mark.parametrize('name', ['embeddings.bin', 'ticks.bin', 'index.npy'])
def test_any_flipped_byte_is_found(encoders, tmp_path, name):
    encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    good, rng = (tmp_path / 'c' / name).read_bytes(), random.Random(5)
    start = 128 if name == 'index.npy' else 0  # its head has padding that says nothing
    for _ in range(30):
        bad = bytearray(good)
        bad[rng.randrange(start, len(bad))] ^= 1 << rng.randrange(8)
        (tmp_path / 'c' / name).write_bytes(bad)
        with pytest.raises(ValueError, match='damaged|not finished'):
            EmbeddingCache(tmp_path / 'c').verify()
    (tmp_path / 'c' / name).write_bytes(good)
    EmbeddingCache(tmp_path / 'c').verify()


@pytest.mark.parametrize(
    'name, message',
    [
        ('embeddings.bin', 'cut short: embeddings.bin'),
        ('ticks.bin', 'cut short: ticks.bin'),
        ('index.npy', 'damaged'),
        ('header.json', 'damaged|no cache'),
    ],
)
def test_any_cut_is_found(encoders, tmp_path, name, message):
    encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    good = (tmp_path / 'c' / name).read_bytes()
    for n in (0, 1, len(good) // 2, len(good) - 1, None):
        if n is None:
            (tmp_path / 'c' / name).unlink()
        else:
            (tmp_path / 'c' / name).write_bytes(good[:n])
        for f in (
            lambda: EmbeddingCache(tmp_path / 'c'),
            lambda: encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False),
        ):
            with pytest.raises(ValueError, match=message):
                f()


def test_another_format(encoders, tmp_path):
    encoders['gpt2'].cache(TEXTS, tmp_path / 'c', progress=False)
    p = tmp_path / 'c' / 'header.json'
    p.write_text(p.read_text().replace('embeddings 2', 'embeddings 3'))
    with pytest.raises(
        ValueError,
        match="format 'capsnb embeddings 3', expected one of capsnb embeddings 1, capsnb emb",
    ):
        EmbeddingCache(tmp_path / 'c')


def test_each_kind_of_wrong_cache(folders, encoders, tmp_path):
    enc = encoders['gpt2']
    enc.cache(TEXTS, tmp_path / 'c', progress=False)
    at = tmp_path / 'c'
    other = FrozenEncoder(tiny_transformer(tmp_path / 'other', TEXTS, seed=1), device='cpu')
    cases = [
        (other, TEXTS, {}, 'made by another encoder'),
        (encoders['bert'], TEXTS, {}, 'made by another encoder'),
        (
            FrozenEncoder(folders['gpt2'], layers=[1], device='cpu'),
            TEXTS,
            {},
            r'has layers \[0, 1, 2\], this asks for \[1\]',
        ),
        (enc, TEXTS, dict(dtype='bfloat16'), 'has dtype float16, this asks for bfloat16'),
        (enc, TEXTS[1:], {}, 'holds 12 texts, this asks for 11'),
        (enc, TEXTS[1:] + TEXTS[:1], {}, 'holds another text at 0'),
        (
            FrozenEncoder(folders['gpt2'], end=None, device='cpu'),
            TEXTS,
            {},
            'tokens of another tokenizer',
        ),
    ]
    before = {p.name: p.read_bytes() for p in at.iterdir()}
    for e, texts, kw, message in cases:
        with pytest.raises(ValueError, match=message):
            e.cache(texts, at, progress=False, **kw)
    with pytest.raises(ValueError, match='made by another encoder'):
        EmbeddingCache(at, other)
    assert len(EmbeddingCache(at, enc)) == 12 and before == {
        p.name: p.read_bytes() for p in at.iterdir()
    }


def test_of_two_writers_one_waits(folders, tmp_path):
    enc, seen, got = FrozenEncoder(folders['gpt2'], device='cpu'), [], []
    enc.model.register_forward_pre_hook(
        lambda net, args, kw: seen.append(len(kw['input_ids'])), with_kwargs=True
    )
    work = lambda: got.append(enc.cache(TEXTS, tmp_path / 'c', batch_size=2, progress=False))
    both = [threading.Thread(target=work) for _ in range(2)]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert sum(seen) == len(TEXTS) and len(got) == 2
    for cache in got:
        cache.verify()


def test_overflow_is_refused_with_its_layer(folders, tmp_path):
    enc = FrozenEncoder(folders['gpt2'], device='cpu')
    enc.model.h[0].mlp.c_proj.bias[3] = 1e5
    with pytest.raises(
        ValueError,
        match=r"layer 1 reach 1\d\d,\d\d\d, more than float16 .*: choose dtype='bfloat16'",
    ):
        enc.cache(TEXTS, tmp_path / 'c', progress=False)
    assert enc.cache(TEXTS, tmp_path / 'd', dtype='bfloat16', progress=False)[0].isfinite().all()
    enc.model.h[0].mlp.c_proj.bias[3] = float('nan')
    for dtype in ('float16', 'float32'):
        with pytest.raises(ValueError, match='inf or NaN, first in layer 1'):
            FrozenEncoder.cache(enc, TEXTS, tmp_path / f'e{dtype}', dtype=dtype, progress=False)


def test_states_read_on_the_fly_are_finite(folders):
    "the transformer and the layer are named, by its own number"
    enc = FrozenEncoder(folders['gpt2'], layers=[0, 2], device='cpu')
    assert enc(TEXTS).embs.isfinite().all()
    enc.model.h[1].mlp.c_proj.bias[3] = float('nan')
    with pytest.raises(ValueError, match="transformer '.*' gives inf or NaN in layer 2"):
        enc(TEXTS)


def test_overflow_keeps_what_was_finished(folders, tmp_path):
    enc, seen = FrozenEncoder(folders['gpt2'], device='cpu'), []

    def third_batch_overflows(net, args):
        if len(seen) == 2:
            net.h[0].mlp.c_proj.bias.data[3] = 1e5
        seen.append(1)

    enc.model.register_forward_pre_hook(third_batch_overflows)
    enc.fingerprint  # before the weights change
    with pytest.raises(ValueError, match='more than float16'):
        enc.cache(TEXTS, tmp_path / 'c', batch_size=3, progress=False)
    assert int((read_cache(tmp_path / 'c')[2] != 0).sum()) == 6


def test_no_room(encoders, tmp_path, monkeypatch):
    usage = namedtuple('usage', 'total used free')
    monkeypatch.setattr(embed.shutil, 'disk_usage', lambda _: usage(10**6, 10**6 - 500, 500))
    with pytest.raises(OSError, match='needs 0.00 GB more, the disk has 0.00 GB'):
        encoders['gpt2'].cache(TEXTS, tmp_path / 'a' / 'b', progress=False)
    assert not (tmp_path / 'a' / 'b').exists()
    check_space(tmp_path / 'x', 400)


def test_same_text_twice(encoders, tmp_path):
    cache = encoders['gpt2'].cache(['a film', 'a film'], tmp_path / 'c', progress=False)
    assert gap(cache[0].float(), cache[1].float()) < 1e-5
