"""The frozen encoder and its cache: company, refusals, damage, dtypes, workers."""

import hashlib
import json
import pickle
import random
import shutil
import threading
import zlib
import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip('transformers')
np = pytest.importorskip('numpy')
from safetensors.torch import load_file, save_file
from capsnb.data import embed
from capsnb.data.embed import EmbeddingCache, FrozenEncoder, tiny_transformer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

WORDS = 'a warm , funny and deeply humane film that never finds its feet but laughs twice .'.split()


def some_texts(n, longest, seed=0):
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(n)]


TEXTS = some_texts(12, 30)


def gap(x, y):  # the worst vector's relative error; hidden states have the scale they have
    assert x.shape == y.shape
    return ((x - y).norm(dim=-1) / y.norm(dim=-1)).max().item()


def opened(folder, **kw):
    return FrozenEncoder(folder, device='cpu', **kw)


sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
t5 = dict(vocab_size=400, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
roberta = dict(vocab_size=400, max_position_embeddings=66, pad_token_id=1, **sizes)
llama = dict(vocab_size=400, max_position_embeddings=600, num_key_value_heads=2, **sizes)
others = dict(  # architectures with a tokenizer we have
    t5=('bert', transformers.T5Config(**t5)),
    roberta=('bert', transformers.RobertaConfig(**roberta)),
    llama=('gpt2', transformers.LlamaConfig(**llama)),
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp('tiny')
    found = {kind: tiny_transformer(root / kind, TEXTS, kind) for kind in ('gpt2', 'bert')}
    for name, (like, config) in others.items():
        found[name] = shutil.copytree(found[like], root / name)
        (found[name] / 'model.safetensors').unlink()
        torch.manual_seed(0)
        transformers.AutoModel.from_config(config).save_pretrained(found[name])
    return found


@pytest.fixture(scope='module')
def encoders(folders):
    return {name: opened(folder) for name, folder in folders.items()}


@pytest.fixture
def counted(folders):
    "an encoder of its own, and how many texts went through in each batch"
    encoder, seen = opened(folders['gpt2']), []
    note = lambda net, args, kw: seen.append(len(kw['input_ids']))
    encoder.model.register_forward_pre_hook(note, with_kwargs=True)
    seen.clear()
    return encoder, seen


def cached(encoder, folder, texts=TEXTS, **kw):
    return encoder.cache(texts, folder, progress=False, **kw)


@pytest.mark.parametrize('kind', ['gpt2', 'bert', *others])
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


def test_longer_than_the_model(encoders):
    with pytest.raises(ValueError, match='text 1 has 513 tokens, the model takes at most 512'):
        encoders['bert'].encode(['a', ' '.join(['a'] * 511)])
    assert encoders['roberta'].most == 64  # 66 positions, two of which are lost to the padding id
    assert encoders['roberta']([' '.join(['a'] * 62)]).embs.shape[1] == 64
    assert encoders['t5'].most is None  # relative positions


def test_a_stored_truncation_is_not_obeyed(folders, tmp_path):
    "sentence-transformers' tokenizers carry one, at 128 tokens, and padding to it"
    tok = transformers.AutoTokenizer.from_pretrained(folders['bert'])
    tok.backend_tokenizer.enable_truncation(8)
    tok.backend_tokenizer.enable_padding(length=8)
    folder = shutil.copytree(folders['bert'], tmp_path / 'cut')
    tok.backend_tokenizer.save(str(folder / 'tokenizer.json'))
    assert [len(r) for r in opened(folder).tokens(['a', ' '.join(['a'] * 50)])] == [3, 52]


def test_states_are_those_of_transformers(folders, encoders):
    tok = transformers.AutoTokenizer.from_pretrained(folders['gpt2'])
    net = transformers.AutoModel.from_pretrained(folders['gpt2']).eval()
    ids = tok(TEXTS[0] + '<|endoftext|>', return_tensors='pt').input_ids
    with torch.no_grad():
        want = torch.stack(net(ids, output_hidden_states=True).hidden_states, 2)[0]
    assert gap(encoders['gpt2'](TEXTS[:1]).embs[0], want) < 1e-5
    mask, embs = opened(folders['gpt2'], dtype='bfloat16')(TEXTS[:1])
    assert embs.dtype == mask.dtype == torch.bfloat16 and gap(embs[0].float(), want) < 0.05


# ---- the end of a text, and what fills the box


def test_one_end_token(encoders, folders, tmp_path):
    for kind, end in (('gpt2', 0), ('bert', 2), ('llama', 0)):
        for row in encoders[kind].tokens(TEXTS):
            assert row[-1] == end and row.count(end) == 1
    assert opened(folders['gpt2'], end=None).tokens(['a'])[0][-1] != 0
    assert opened(folders['bert'], end='[PAD]').tokens(['a'])[0][-2:] == [2, 0]
    with pytest.raises(ValueError, match="no token '<eot>'"):
        opened(folders['gpt2'], end='<eot>')
    t = pytest.importorskip('tokenizers')  # OPT's opens a text with the token that ends it
    tok = transformers.AutoTokenizer.from_pretrained(folders['gpt2'])
    tok.backend_tokenizer.post_processor = t.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
    )
    assert embed._end_token(tok) == 0
    folder = shutil.copytree(folders['gpt2'], tmp_path / 'endless')
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok.backend_tokenizer).save_pretrained(
        folder
    )
    with pytest.raises(ValueError, match=r"no end token \(eos_token, or sep_token\).*end=None"):
        opened(folder)
    assert opened(folder, end=None)(['a']).mask.shape == (1, 2)


# ---- refusals


def test_weights_that_are_missing(folders, tmp_path):
    def without(kind, gone):  # a copy that lacks some weights
        place = shutil.copytree(folders[kind], tmp_path / kind)
        w = load_file(place / 'model.safetensors')
        kept = {k: v for k, v in w.items() if gone not in k}
        save_file(kept, place / 'model.safetensors', metadata={'format': 'pt'})
        return place

    with pytest.raises(ValueError, match='lacks 2 weights, such as h.1.mlp.c_fc'):
        opened(without('gpt2', 'h.1.mlp.c_fc'))
    folder = without('bert', 'pooler')  # no loss, and no identity
    one, two = opened(folder), opened(folder)
    assert not one.model.pooler.dense.weight.equal(two.model.pooler.dense.weight)
    assert one.fingerprint == two.fingerprint


# ---- the cache


@pytest.mark.parametrize(
    'dtype, rtol', [('float16', 2**-11), ('bfloat16', 2**-8), (torch.float32, 0)]
)
def test_cache_holds_what_was_computed(encoders, tmp_path, dtype, rtol):
    enc = encoders['bert']
    cache = cached(enc, tmp_path / 'c', dtype=dtype, batch_size=5, shard_bytes=4000)
    assert len(cache) == 12 and len(list((tmp_path / 'c').iterdir())) > 3
    for k, e in enumerate(enc.encode(TEXTS, batch_size=5)):
        assert_close(cache[k].float(), e, rtol=rtol, atol=1e-7 if rtol else 1e-5)
        assert cache[k].dtype == cache.dtype
    assert cache[-1].equal(cache[11])
    with pytest.raises(IndexError):
        cache[12]
    before, on_disk = cache[3].clone(), bytes_in(tmp_path / 'c')
    cache[3].zero_()
    assert cache[3].equal(before)  # an item is yours
    cache.look(3).zero_()
    assert bytes_in(tmp_path / 'c') == on_disk  # the file itself is out of reach


def bytes_in(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.slow
def test_workers_and_pickle(encoders, tmp_path):
    cache = cached(encoders['gpt2'], tmp_path / 'c')
    cache.verify()  # files are open
    assert len(pickle.dumps(cache)) < 500 and pickle.loads(pickle.dumps(cache))[5].equal(cache[5])
    how = dict(collate_fn=list, num_workers=2, multiprocessing_context='spawn', batch_size=5)
    found = sum(torch.utils.data.DataLoader(cache, **how), [])
    assert all(e.equal(cache[k]) for k, e in enumerate(found))


def test_equal_texts_are_read_once(counted, tmp_path):
    "from a cache and in memory each has its own place in the order, as if it had been read alone"
    (encoder, seen), order = counted, [0, 1, 0, 2, 3, 1, 0]
    texts, alone = [TEXTS[k] for k in order], [encoder([TEXTS[k]]).embs[0] for k in range(4)]
    seen.clear()
    cache = cached(encoder, tmp_path / 'c', texts, dtype='float32')
    assert sum(seen) == 4 and len(cache) == len(texts)
    held = encoder.hold({'a': (texts, None)}, 'float32')['a']
    some = encoder.hold({'a': (texts, [6, 2, 5])}, 'float32')['a']
    assert sum(seen) == 4 + 4 + 2
    assert len(held.flat) == sum(map(len, alone)) < cache.header['n_tokens']
    assert len(some.flat) == len(alone[0]) + len(alone[1])
    for k, who in enumerate(order):
        mask, where = held.places([k])
        for found in (cache[k], held.look(where)[mask > 0], encoder.encode(texts)[k]):
            assert_close(found, alone[who], atol=1e-5, rtol=1e-4)
    assert torch.equal(*(some.places([k])[1] for k in (2, 6)))
    with pytest.raises(ValueError, match='text 0 is not among'):
        some.places([0])  # the same text as 2, but it was not asked for


def old_cache(folder, encoder, number=1):
    "as the first two formats were: a file of numbers, one of lengths and hashes, one of checksums"
    header = dict(cached(encoder, folder / 'new').header, format=f'capsnb embeddings {number}')
    items, at = encoder.encode(TEXTS), folder / 'old'
    at.mkdir()
    raw = [e.half().numpy().tobytes() for e in items]
    (at / 'embeddings.bin').write_bytes(b''.join(raw))
    np.array([2**32 + zlib.crc32(r) for r in raw], '<u8').tofile(at / 'ticks.bin')
    short = lambda b: int(np.frombuffer(hashlib.blake2b(b, digest_size=8).digest(), '<i8')[0])
    ids = encoder.tokens(TEXTS)
    hashes = [[short(np.array(r, '<i8').tobytes()) for r in ids]]
    hashes.insert(0, [short(t.encode()) for t in TEXTS])
    np.save(at / 'index.npy', np.array([[*map(len, ids)], *hashes], '<i8').T.copy())
    for key in ('shards', 'sum', *(['revision'] if number == 1 else [])):
        del header[key]
    if number == 2:
        header['sum'] = embed._sum(header)
    (at / 'header.json').write_text(json.dumps(header))
    return at


@pytest.mark.parametrize('number', [1, 2])
def test_old_caches_are_read(encoders, tmp_path, number):
    enc, at = encoders['gpt2'], old_cache(tmp_path, encoders['gpt2'], number)
    before = bytes_in(at)
    for cache in (EmbeddingCache(at, enc), cached(enc, at)):
        cache.verify()
        assert all(gap(cache[k].float(), e) < 1e-3 for k, e in enumerate(enc.encode(TEXTS)))
    with pytest.raises(ValueError, match='other texts'):
        cached(enc, at, TEXTS[::-1])
    assert bytes_in(at) == before


new_files, old_files = 'header.json 0.safetensors', 'embeddings.bin ticks.bin index.npy'


@pytest.mark.parametrize('name', f'{new_files} {old_files}'.split())
def test_any_flipped_byte_and_any_cut_is_found(encoders, tmp_path, name):
    enc, at = encoders['gpt2'], tmp_path / 'c'
    at = old_cache(tmp_path, enc) if name in old_files.split() else cached(enc, at).folder
    path, rng = at / name, random.Random(5)
    good, start = path.read_bytes(), 128 if name == 'index.npy' else 0  # its head has padding
    spoilt = [good[:n] for n in (0, 1, len(good) // 2, len(good) - 1)]
    for _ in range(30):
        bad = bytearray(good)
        bad[rng.randrange(start, len(bad))] ^= 1 << rng.randrange(8)
        spoilt.append(bad)
    for bad in spoilt:
        path.write_bytes(bad)
        with pytest.raises(ValueError, match='damaged|not finished'):
            cached(enc, at).verify()
        with pytest.raises(ValueError, match='damaged|not finished'):
            EmbeddingCache(at).verify()
    path.unlink()
    with pytest.raises((ValueError, OSError), match='damaged|not finished|no cache'):
        EmbeddingCache(at)


def test_each_kind_of_wrong_cache(folders, encoders, tmp_path):
    enc, at = encoders['gpt2'], tmp_path / 'c'
    at.mkdir()
    (at / 'thesis.txt').write_text('all of it')
    for f in (lambda at: cached(enc, at), EmbeddingCache):
        with pytest.raises(ValueError, match='holds no cache'):
            f(at)
    assert bytes_in(at) == {'thesis.txt': b'all of it'}
    (at / 'thesis.txt').unlink()
    cached(enc, at)
    other = opened(tiny_transformer(tmp_path / 'other', TEXTS, seed=1))
    one, endless = (opened(folders['gpt2'], **kw) for kw in (dict(layers=[1]), dict(end=None)))
    before = bytes_in(at)
    for e, texts, kw, message in (
        (other, TEXTS, {}, 'made by another encoder'),
        (one, TEXTS, {}, r'has layers \[0, 1, 2\], this asks for \[1\]'),
        (enc, TEXTS, dict(dtype='bfloat16'), 'has dtype float16, this asks for bfloat16'),
        (enc, TEXTS[1:], {}, 'other texts'),
        (enc, TEXTS[1:] + TEXTS[:1], {}, 'other texts'),
        (endless, TEXTS, {}, 'tokens of another tokenizer'),
    ):
        with pytest.raises(ValueError, match=message):
            cached(e, at, texts, **kw)
    with pytest.raises(ValueError, match='made by another encoder'):
        EmbeddingCache(at, other)
    assert len(EmbeddingCache(at, enc)) == 12 and before == bytes_in(at)


def test_of_two_writers_one_waits(counted, tmp_path):
    (enc, seen), got = counted, []
    enc.fingerprint
    work = lambda: got.append(cached(enc, tmp_path / 'c', batch_size=2))
    both = [threading.Thread(target=work) for _ in range(2)]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert sum(seen) == len(TEXTS) and len(got) == 2
    for cache in got:
        cache.verify()


def test_overflow_is_refused_with_its_layer(folders, tmp_path):
    enc = opened(folders['gpt2'])
    bias = enc.model.h[0].mlp.c_proj.bias
    bias[3] = 1e5
    said = r"layer 1 reach 1\d\d,\d\d\d, more than float16 .*: choose dtype='bfloat16'"
    with pytest.raises(ValueError, match=said):
        cached(enc, tmp_path / 'c')
    assert cached(enc, tmp_path / 'd', dtype='bfloat16')[0].isfinite().all()
    bias[3] = float('nan')
    for f in (enc, lambda texts: cached(enc, tmp_path / 'e', texts, dtype='float32')):
        with pytest.raises(ValueError, match="transformer '.*' gives inf or NaN in layer 1"):
            f(TEXTS)
