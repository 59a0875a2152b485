"""The Hub's doors: runs with their cards, classifiers for pipelines, data sets."""

import copy
import json
import os
import re
import shutil
import pytest
import torch

tf = pytest.importorskip('transformers')
datasets = pytest.importorskip('datasets')
import huggingface_hub
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from hub import put_in_cache, stand_in
from capsnb.cli import make_app
from capsnb.core import seed_everything
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.data.sst import load_sst, tiny_treebank
from capsnb.lab.predict import explain, load
from capsnb.lab.hub import RoutingClassifier, card_of, classifier_of, push_run
from capsnb.lab.runs import with_digest
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import load_run, train

tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()
huggingface_hub.utils.disable_progress_bars()
quick = dict(epochs=1, device='cpu', progress=False)
few = dict(device='cpu', n_parts=4, d_feat=8)


def capsnb(*args, code=0):  # what it said
    done = CliRunner().invoke(make_app(), [str(a) for a in args])
    assert done.exit_code == code and (not code or len(done.output.splitlines()) == 1), done.output
    return done.output


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with stand_in(monkeypatch, tmp_path / 'hub') as found:
        yield found


def upload(name, folder):
    api = huggingface_hub.HfApi()
    api.create_repo(name)
    api.upload_folder(repo_id=name, folder_path=folder)


def names_no_place(files, *folders):
    "Nothing that is pushed says where things lay."
    places = [os.path.expanduser('~'), *(str(p) for f in folders for p in (f, *f.parents[:-1]))]
    for name, content in files.items():
        if not name.endswith(('.png', '.safetensors')):
            assert not [p for p in places if p in content.decode()], name


# ---- runs


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    "A run with a picture, as the command line leaves it."
    out = tmp_path_factory.mktemp('at home') / 'my runs' / 'digits'
    typed = 'train digits --net capsnet --limit 60 --test-limit 50 --epochs 1 --device cpu --seed 3'
    typed = [*typed.split(), '--out', str(out)]
    with pytest.MonkeyPatch.context() as m:
        m.setattr('sys.argv', ['/somewhere/bin/capsnb', *typed])
        capsnb(*typed)
    return out


def test_a_run_is_pushed_with_its_card(hub, digits):
    said = capsnb('push', digits, 'me/digits', '--private', '--license', 'mit')
    assert '/me/digits/commit/' in said
    (made,) = [json.loads(b) for _, p, b in hub.asked if p == '/api/repos/create']
    assert (made['name'], made['organization']) == ('digits', 'me')
    assert made.get('private') is True or made.get('visibility') == 'private'
    assert sum(p.endswith('/commit/main') for _, p, _ in hub.asked) == 1
    files = hub.repos['models/me/digits']
    copies = {'config.json', 'model.safetensors', 'drawings.png'}
    assert set(files) == copies | {'README.md', 'task.json'}
    for name in copies:
        assert files[name] == (digits / name).read_bytes()
    names_no_place(files, digits)
    text, m = files['README.md'].decode(), json.loads((digits / 'metrics.json').read_text())
    card = huggingface_hub.ModelCard(text)
    assert card.data.library_name == 'capsnb' and card.data.license == 'mit'
    found = {r.dataset_split: r for r in card.data.eval_results}
    assert found['test'].metric_value == m['test_accuracy']
    assert found['validation'].metric_value == m['valid_accuracy']
    for said in (
        'from the longest other one.](drawings.png)',
        "capsnb.load('me/digits').predict(pictures)",
        f"| validation accuracy | {m['valid_accuracy']:.2%} |",
        '--net capsnet --limit 60 --test-limit 50 --epochs 1 --device cpu --seed 3 --out PATH\n',
        f"| parameters | {m['n_params']:,} |",
    ):
        assert said in text, said


def test_a_card_is_written_without_the_hub(digits, tmp_path):
    card, mine = tmp_path / 'new' / 'card.md', tmp_path / 'mine'
    capsnb('push', digits, 'me/digits', '--card', card)
    assert card.read_text() == str(card_of(digits, 'me/digits'))
    mine.write_text('mine')
    assert "somebody's own file" in capsnb('push', digits, 'me/x', '--card', mine, code=1)
    assert mine.read_text() == 'mine'


evil = [
    '<script>alert(1)</script>',
    '[a](javascript:b) ![c](http://d)',
    '# x | y `z` **w**',
    "a\n---\nlicense: mit\n\u202ehttps://evil.example www.evil.example",
]


def test_what_strangers_wrote_is_shown_and_does_nothing(tmp_path):
    md = pytest.importorskip('markdown_it')
    rows = [dict(x=float(k % 4), y=1.0, **{evil[2]: evil[k % 4]}) for k in range(80)]
    path, out = tmp_path / 'rows.jsonl', tmp_path / 'run'
    path.write_text('\n'.join(map(json.dumps, rows)))
    typed = ['train', f'file:{path}', '--columns', 'x,y', '--label', evil[2], '--net', 'plain']
    capsnb(*typed, '--epochs', 1, '--device', 'cpu', '--out', out)
    card = card_of(out, 'me/rows')
    names_no_place({'card': str(card).encode()}, tmp_path)
    assert card.data.license == 'apache-2.0' and card.data.model_name == 'rows'
    assert {r.dataset_name for r in card.data.eval_results} == {'files of the author'}
    page = md.MarkdownIt('gfm-like', {'html': True, 'linkify': False}).render(card.text)
    page = re.sub(r'<pre>.*?</pre>', '', page, flags=re.S)
    assert not re.search('<script|<img|<strong', page)
    assert re.findall('href="([^"]*)"', page) == ['https://github.com/capsnb/capsnb']
    for name in evil:
        said = ' '.join(name.split()).replace('\u202e', '')[:15]
        assert said.replace('<', '&lt;').replace('>', '&gt;') in page
    assert 'https\\://evil.example www\\.evil.example' in card.text
    assert page.count('<table>') == 3 and page.count('<h1>') == 1


def test_odd_metrics_of_a_strangers_run_do_nothing(digits, tmp_path):
    run = shutil.copytree(digits, tmp_path / 'run')
    m = json.loads((digits / 'metrics.json').read_text())
    m.pop('digest')
    odd = '<img src=x onerror=alert(1)> [click](https://evil.example)'
    for key in ('best_epoch', 'epochs', 'n_params', 'seed', 'date', 'made_with'):
        value = {'torch': odd, 'capsnb': odd} if key == 'made_with' else odd
        (run / 'metrics.json').write_text(json.dumps(with_digest(m | {key: value})))
        card = str(card_of(run, 'me/x'))
        assert not re.search(r'(?<!\\)<img|(?<!\\)\]\(https://evil', card) and '<img' in card


@pytest.mark.slow
def test_what_cannot_be_pushed_is_one_sentence(hub, digits, tmp_path, monkeypatch):
    unfinished, damaged = (shutil.copytree(digits, tmp_path / k) for k in 'ab')
    for name in ('metrics.json', 'task.json'):
        (unfinished / name).unlink()
    weights = damaged / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-1] + b'\x01')
    says = lambda *args: capsnb('push', *args, code=1)
    assert 'has not come to its end' in says(unfinished, 'me/x')
    assert 'is damaged' in says(damaged, 'me/x')
    assert 'there is no folder' in says(tmp_path / 'none', 'me/x')
    assert 'no name!' in says(digits, 'no name!')
    assert 'with a token that may write there' in says(digits, 'me/x', '--token', 'hf_wrong')
    constants = huggingface_hub.constants
    for key, value, said in (
        ('HF_HUB_OFFLINE', True, 'HF_HUB_OFFLINE forbids'),
        ('ENDPOINT', 'http://127.0.0.1:1', 'http://127.0.0.1:1 does not answer'),
        ('HF_TOKEN_PATH', str(tmp_path / 'none'), 'nobody is logged in; hf auth login'),
    ):
        with monkeypatch.context() as m:
            m.setattr(constants, key, value)
            if key == 'HF_TOKEN_PATH':
                m.delenv('HF_TOKEN')
            assert said in says(digits, 'me/x')
    assert not hub.repos and not any(p.endswith('/commit/main') for _, p, _ in hub.asked)


# ---- classifiers for transformers


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('texts')
    trees = tiny_treebank(root / 'trees')
    texts = list(load_sst(trees, 'sst5', phrases=False, official=False)['train']['text'])
    return dict(root=root, trees=trees, texts=texts)


def encoder(world, kind='gpt2'):
    folder = world['root'] / kind
    return folder if folder.exists() else tiny_transformer(folder, world['texts'], kind)


def text_run(world, reads, net, out, **kw):
    usual = dict(roots=True, cache=False, folder=world['trees'], official=False)
    train(Sentiment('sst5', str(reads), **usual, **kw), net, out, **quick)
    return out


@pytest.fixture(scope='module')
def run(world):
    return text_run(world, encoder(world), 'sstnet', world['root'] / 'run')


@pytest.fixture(scope='module')
def saved(run, world):
    classifier_of(run, device='cpu').save_pretrained(world['root'] / 'saved')
    return world['root'] / 'saved'


def whole(folder, n=2):
    seed_everything(0)
    return RoutingClassifier.from_encoder(folder, n, frozen=False, **few)


def read(folder, **kw):
    return tf.AutoModelForSequenceClassification.from_pretrained(folder, **kw)


def logits(model, texts, tokenizer=None):
    tokenizer = tokenizer or model.tokenizer or tf.AutoTokenizer.from_pretrained(model.name_or_path)
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, return_tensors='pt')).logits


@pytest.mark.parametrize('kind, net', [('bert', 'sstnet'), ('gpt2', 'routing'), ('bert', 'plain')])
def test_a_pipeline_says_what_the_runs_own_network_says(world, tmp_path, kind, net):
    out = text_run(world, encoder(world, kind), net, tmp_path / 'run')
    classifier_of(out, device='cpu').save_pretrained(tmp_path / 'saved')
    classify = tf.pipeline('text-classification', str(tmp_path / 'saved'), device='cpu', top_k=None)
    network, task, note = load_run(out, 'cpu')
    texts = sorted(world['texts'], key=len)[::2]
    want = [network(*task.reader()([t])).scores[0].softmax(0) for t in texts]
    for size in (1, len(texts)):
        for scores, wanted in zip(classify(texts, batch_size=size), want):
            by_name = {s['label']: s['score'] for s in scores}
            found = torch.tensor([by_name[k] for k in note['names']])
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_a_frozen_transformer_is_named_not_copied(run, saved, world):
    folder, head = encoder(world), load_file(run / 'model.safetensors')
    weights = load_file(saved / 'model.safetensors')
    assert {k.removeprefix('head.') for k in weights} == set(head)
    assert all(torch.equal(weights[f'head.{k}'], v) for k, v in head.items())
    note = json.loads((saved / 'config.json').read_text())
    assert note['reader']['encoder'] == str(folder) and note['encoder_config'] is None
    assert note['reader']['fingerprint'] == FrozenEncoder(folder, device='cpu').fingerprint
    model = read(saved)
    assert not model.training
    assert model.train().head.training and not model.encoder.training
    trained = {k for k, p in model.named_parameters() if p.requires_grad}
    assert trained and all(k.startswith('head.') for k in trained)


def test_a_transformer_that_is_gone_or_another_is_one_sentence(world, saved, tmp_path):
    folder, other = encoder(world), tiny_transformer(tmp_path / 'other', world['texts'], seed=1)
    want = logits(read(saved), world['texts'][:3])
    aside = folder.rename(tmp_path / 'aside')
    try:
        for kw, said in (({}, 'there is no folder'), (dict(encoder=other), 'another transformer')):
            with pytest.raises((ValueError, OSError), match=said) as e:
                read(saved, **kw)
            assert len(str(e.value).splitlines()) == 1
        found = logits(read(saved, encoder=aside), world['texts'][:3])
    finally:
        aside.rename(folder)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize('key', ['head.depth_emb', 'head.more'])
def test_weights_that_do_not_fit_are_refused(saved, tmp_path, key):
    folder = shutil.copytree(saved, tmp_path / 'm')
    weights = load_file(folder / 'model.safetensors')
    if weights.pop(key, None) is None:
        weights[key] = torch.ones(2)
    save_file(weights, folder / 'model.safetensors', dict(format='pt'))
    with pytest.raises(ValueError, match=key):
        read(folder)


def test_tokens_are_read_as_in_training(world, run, saved):
    model = read(saved)
    network, task, _ = load_run(run, 'cpu')
    texts, reader = world['texts'][:4], task.reader()
    want = network(*reader(texts)).scores.detach()
    torch.testing.assert_close(logits(model, texts), want)
    rows = reader.tokens(texts)  # closed already
    n = max(map(len, rows)) + 2
    ids = torch.tensor([r + [7] * (n - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (n - len(r)) for r in rows])
    with torch.no_grad():
        torch.testing.assert_close(model(ids, mask).logits, want)
        torch.testing.assert_close(model(ids[:1, : len(rows[0])]).logits, want[:1])
    for wrong, said in ((mask.flip(1), 'padding on the right'), (0 * mask, 'text 0 is empty')):
        with pytest.raises(ValueError, match=said):
            model(ids, wrong)
    long, classify = ' '.join(texts * (1 + 650 // n)), ('text-classification', str(saved))
    with pytest.raises(ValueError, match='takes at most 600: truncation=True'):
        tf.pipeline(*classify, device='cpu')(long)
    assert 0 < tf.pipeline(*classify, device='cpu', truncation=True)(long)[0]['score'] <= 1


@pytest.mark.parametrize('kind', ['bert', 'llama'])
def test_a_trained_transformer_is_saved_whole(world, tmp_path, kind):
    folder = tiny_transformer(tmp_path / 'm', world['texts'], 'bert' if kind == 'bert' else 'gpt2')
    if kind == 'llama':  # whose rotations are in no file
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=600)
        config = tf.LlamaConfig(intermediate_size=48, eos_token_id=0, bos_token_id=0, **sizes)
        tf.AutoModel.from_config(config).save_pretrained(folder)
    rc, texts = whole(folder), world['texts'][:4]
    want = logits(rc, texts)
    rc.save_pretrained(tmp_path / 'saved')
    shutil.rmtree(folder)
    names_no_place({'config.json': (tmp_path / 'saved/config.json').read_bytes()}, tmp_path)
    model = read(tmp_path / 'saved')
    torch.testing.assert_close(logits(model, texts), want)
    loaded = load(tmp_path / 'saved', 'cpu')
    torch.testing.assert_close(loaded.predict(texts).p, want.softmax(-1))
    assert len(explain(loaded, texts)) == len(texts)
    assert model.train().encoder.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize('frozen', [True, False])
def test_transformers_trainer_trains_it(world, saved, tmp_path, frozen):
    model = read(saved) if frozen else whole(encoder(world), 5)
    tokenizer = model.tokenizer or tf.AutoTokenizer.from_pretrained(saved)
    before = copy.deepcopy(model.state_dict())
    rows = datasets.Dataset.from_dict(dict(text=world['texts'][:8], label=[0, 1, 2, 3] * 2))
    rows = rows.map(lambda r: tokenizer(r['text']), batched=True, remove_columns='text')
    args = dict(num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, seed=0)
    args |= dict(eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True)
    args |= dict(use_cpu=True, report_to='none', disable_tqdm=True)
    args = tf.TrainingArguments(str(tmp_path / 'out'), **args)
    how = dict(train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer = tf.Trainer(model, args, **how)
    trainer.remove_callback(tf.PrinterCallback)
    trainer.train()
    trainer.save_model(tmp_path / 'again')
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    kept = set(load_file(tmp_path / 'again' / 'model.safetensors'))
    assert 'head.routings.0.W' in changed
    for names in (changed, kept):
        assert any(k.startswith('encoder.') for k in names) is not frozen
    again, texts = read(tmp_path / 'again'), world['texts'][:4]
    torch.testing.assert_close(logits(again, texts), logits(model.eval(), texts, tokenizer))
    trainer.train(resume_from_checkpoint=True)


def test_what_callers_of_transformers_ask_for(saved, world):
    model, tokenizer = read(saved), tf.AutoTokenizer.from_pretrained(saved)
    batch = tokenizer(world['texts'][:2], padding=True, return_tensors='pt')
    plain, told = model(**batch), model(**batch, output_hidden_states=True)
    assert plain.hidden_states is None and len(told.hidden_states) == 3
    assert len(read(saved, output_hidden_states=True)(**batch).hidden_states) == 3
    loss, scores = model(**batch, labels=torch.tensor([0, 1]), return_dict=False)
    torch.testing.assert_close(scores, plain.logits)
    assert loss.ndim == 0 and model.num_labels == model.config.num_labels == 5
    with pytest.raises(ValueError, match='expected 2 different names of classes'):
        RoutingClassifier.from_encoder('./nowhere', 2, names=['a', 'a'])


odd = [None, True, -1, 10**9, 1.5, 'x', [], [0], [10**9], ['x'], {}, {'x': 1}]


@pytest.mark.slow
def test_odd_entries_of_a_config_are_one_sentence(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / 'm')
    path, good = folder / 'config.json', json.loads((saved / 'config.json').read_text())
    refused = 0
    places = [(above, k) for above in ('reader', 'head') for k in good[above]]
    places += [(k,) for k in ('network', 'head', 'reader', 'encoder_config')]
    for *above, key in places:
        for value in odd:
            note = copy.deepcopy(good)
            (note[above[0]] if above else note)[key] = value
            path.write_text(json.dumps(note))
            try:
                logits(read(folder), ['it lasts .'])
            except (ValueError, OSError) as e:
                assert len(str(e).splitlines()) == 1, (key, value, e)
                refused += 1
    assert refused > 100


def test_a_run_on_texts_is_pushed_and_read_from_the_hub_alone(hub, world, tmp_path):
    upload('me/tiny', encoder(world))
    out = text_run(world, 'me/tiny', 'sstnet', tmp_path / 'run', validate=False)
    assert push_run(out, 'me/moods').endswith('/me/moods/commit/' + 'c' * 40)
    files = hub.repos['models/me/moods']
    assert {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json'} <= set(files)
    names_no_place(files, tmp_path, world['root'])
    note = json.loads(files['config.json'])['reader']
    assert (note['encoder'], note['revision']) == ('me/tiny', 'c' * 40)
    card = huggingface_hub.ModelCard(files['README.md'].decode())
    assert card.data.pipeline_tag == 'text-classification' and card.data.base_model == 'me/tiny'
    assert 'The last of 1 epochs was kept: no data were held back' in card.text
    assert {r.dataset_split for r in card.data.eval_results} == {'test', 'validation'}
    network, task, _ = load_run(out, 'cpu')
    text = world['texts'][0]
    want = network(*task.reader()([text])).scores[0].softmax(0).max().item()
    shutil.rmtree(tmp_path / 'hub')
    (use,) = re.findall(r'```python\n(import capsnb.*?)\n```', card.text, re.S)
    with pytest.raises(OSError, match="to fetch it, name it yourself: encoder='me/tiny'"):
        read('me/moods')  # a name in a file asks nobody
    where = dict(model='me/moods', model_kwargs=dict(encoder='me/tiny'))
    (found,) = tf.pipeline('text-classification', **where, device='cpu')(text)
    assert found['score'] == pytest.approx(want, rel=1e-5)
    scope = dict(texts=[text])
    exec(use, scope)
    assert scope['found'].p.max().item() == pytest.approx(want, rel=1e-5)
    loaded = load('me/moods', 'cpu', encoder='me/tiny')
    (e,) = explain(loaded, [text])
    assert [word for word, _ in e.parts][:-1] == text.split() and e.p == pytest.approx(want)
    how = ('me/moods', text, '--encoder', 'me/tiny', '--device', 'cpu')
    assert e.label in capsnb('predict', *how) and 'at random' in capsnb('explain', *how)


def test_a_transformer_that_nobody_else_has_is_not_named_on_the_hub(hub, run, world, tmp_path):
    push = ('push', run, 'me/moods')
    assert 'which nobody else has: name the same one' in capsnb(*push, code=1)
    assert 'models/me/moods' not in hub.repos
    capsnb(*push, '--card', tmp_path / 'card.md')
    names_no_place({'card.md': (tmp_path / 'card.md').read_bytes()}, world['root'])
    for name, seed in (('tiny', 0), ('other', 1)):
        upload(f'me/{name}', tiny_transformer(tmp_path / name, world['texts'], seed=seed))
    assert 'is another transformer' in capsnb(*push, '--encoder', 'me/other', code=1)
    capsnb(*push, '--encoder', 'me/tiny')
    names_no_place(hub.repos['models/me/moods'], world['root'])


# ---- data sets


@pytest.mark.slow
def test_pictures_of_a_data_set_of_the_hub(hub, tmp_path):
    Image = pytest.importorskip('PIL.Image')
    one = lambda k: Image.new('RGB', (20, 15), (30 + 190 * (k % 2), k, 0))
    rows = [dict(seen=one(k), kind=['dark', 'light'][k % 2]) for k in range(40)]
    parts = dict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:10]))
    put_in_cache(tmp_path / 'hub' / 'datasets', 'me/shapes', 'c' * 40, parts)
    out = tmp_path / 'run'
    how = '--image seen --label kind --size 16 --epochs 2 --net cnn --device cpu --out'.split()
    capsnb('train', f"hub:me/shapes@{'c' * 40}", *how, out)
    note = json.loads((out / 'task.json').read_text())
    assert note['source'].startswith('hub:me/shapes') and note['names'] == ['dark', 'light']
    assert len(load_run(out, 'cpu').task.open('test')['label']) == 10
    assert card_of(out, 'me/net').data.datasets == ['me/shapes']
    said = capsnb('train', 'hub:me/none', *how, tmp_path / 'none', code=1)
    assert "'hub:me/none' cannot be read" in said
