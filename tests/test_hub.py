"""The Hub's doors: networks, runs with their cards, classifiers for pipelines, data sets."""

import copy
import json
import os
import re
import shutil
import pytest
import torch

tf = pytest.importorskip('transformers')
datasets = pytest.importorskip('datasets')
pytest.importorskip('accelerate')
pytest.importorskip('sklearn')
pytest.importorskip('typer')
import huggingface_hub
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from hub import stand_in
from test_doors import networks, score
from capsnb.cli import make_app
from capsnb.core import seed_everything
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.data.sst import load_sst, tiny_treebank
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import load_run, train
from capsnb.lab.own import OwnTexts
from capsnb.lab.hub import CapsConfig, RoutingClassifier, card_of, classifier_of, push_run

tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()
huggingface_hub.utils.disable_progress_bars()
quick = dict(epochs=1, device='cpu', progress=False)


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with stand_in(monkeypatch, tmp_path / 'hub') as found:
        yield found


# ---- networks


@pytest.mark.parametrize('name', networks)
def test_every_network_is_pushed_and_read_again(hub, name):
    seed_everything(0)
    make, given = networks[name]
    net, x = make().eval(), given()
    net.push_to_hub('me/net')
    assert set(hub.repos['models/me/net']) == {'README.md', 'config.json', 'model.safetensors'}
    other = type(net).from_pretrained('me/net').eval()
    torch.testing.assert_close(score(other, x), score(net, x), rtol=0, atol=0)


# ---- runs


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    "A run with a picture, as the command line leaves it."
    out = tmp_path_factory.mktemp('at home') / 'my runs' / 'digits'
    few = ('--limit', 60, '--test-limit', 50, '--epochs', 1, '--device', 'cpu', '--seed', 3)
    typed = ['train', 'digits', '--net', 'capsnet', *map(str, few), '--out', str(out)]
    with pytest.MonkeyPatch.context() as m:
        m.setattr('sys.argv', ['/somewhere/bin/capsnb', *typed])
        done = capsnb(*typed)
    assert done.exit_code == 0, done.output
    return out


def places(*folders):  # what must be in no file that is pushed
    return [os.path.expanduser('~'), *(str(p) for f in folders for p in (f, *f.parents[:-1]))]


def files_without(files, folders):
    for name, content in files.items():
        if not name.endswith(('.png', '.safetensors')):
            for place in places(*folders):
                assert place not in content.decode(), (name, place)


def test_a_run_is_pushed_with_its_card(hub, digits):
    done = capsnb('push', digits, 'me/digits', '--private', '--license', 'mit')
    assert done.exit_code == 0 and '/me/digits/commit/' in done.output, done.output
    made = [json.loads(b) for _, p, b in hub.asked if p == '/api/repos/create']
    assert [(m['name'], m['organization']) for m in made] == [('digits', 'me')]
    assert made[0].get('private') is True or made[0].get('visibility') == 'private'
    assert sum(p.endswith('/commit/main') for _, p, _ in hub.asked) == 1
    files = hub.repos['models/me/digits']
    assert set(files) == {'README.md', 'config.json', 'model.safetensors', 'drawings.png'}
    for name in set(files) - {'README.md'}:
        assert files[name] == (digits / name).read_bytes()
    files_without(files, [digits])
    text, m = files['README.md'].decode(), json.loads((digits / 'metrics.json').read_text())
    card = huggingface_hub.ModelCard(text)
    assert card.data.library_name == 'capsnb' and card.data.license == 'mit'
    found = {r.dataset_split: r for r in card.data.eval_results if r.metric_type == 'accuracy'}
    assert found['test'].metric_value == m['test_accuracy']
    assert found['validation'].metric_value == m['valid_accuracy']
    for said in (
        '![What the run drew at its end](drawings.png)',
        "CapsNet.from_pretrained('me/digits')",
        'https://arxiv.org/abs/1710.09829',
        'Sabour et al. 2017',
        f"| accuracy | {m['valid_accuracy']:.4g} | {m['test_accuracy']:.4g} |",
        'Epoch 1 of 1 was kept, the best by accuracy on the validation data.',
        'capsnb train digits --net capsnet --limit 60 --test-limit 50 --epochs 1 --device cpu '
        '--seed 3 --out PATH\n',
        '| seed | 3 |',
        f"| parameters | {m['n_params']} |",
        f"| torch | {torch.__version__} |",
    ):
        assert said in text, said


def test_a_card_is_written_without_the_hub(digits, tmp_path):
    done = capsnb('push', digits, 'me/digits', '--card', tmp_path / 'new' / 'card.md')
    assert done.exit_code == 0, done.output
    assert (tmp_path / 'new' / 'card.md').read_text() == str(card_of(digits, 'me/digits'))
    done = capsnb('push', digits, 'me/other', '--card', tmp_path / 'new' / 'card.md')
    assert done.exit_code == 0 and 'me/other' in (tmp_path / 'new' / 'card.md').read_text()
    (tmp_path / 'mine').write_text('mine')
    done = capsnb('push', digits, 'me/digits', '--card', tmp_path / 'mine')
    assert done.exit_code == 1 and "somebody's own file" in done.output
    assert (tmp_path / 'mine').read_text() == 'mine'
    done = capsnb('push', digits, '../x', '--card', tmp_path / 'x.md')
    assert done.exit_code == 1 and '../x' in done.output and not (tmp_path / 'x.md').exists()


evil = [
    '<script>alert(1)</script>',
    '[a](javascript:b) ![c](http://d)',
    '# x | y `z` **w**',
    "a\n---\nlicense: mit\n\u202ehttps://evil.example www.evil.example",
]


def test_what_strangers_wrote_is_shown_and_does_nothing(tmp_path):
    render = (
        pytest.importorskip('markdown_it')
        .MarkdownIt('gfm-like', {'html': True, 'linkify': False})
        .render
    )
    rows = [dict(x=float(k % 4), y=1.0, **{evil[2]: evil[k % 4]}) for k in range(80)]
    path = tmp_path / 'rows.jsonl'
    path.write_text('\n'.join(map(json.dumps, rows)))
    out = tmp_path / 'run'
    typed = ['train', f'file:{path}', '--columns', 'x,y', '--label', evil[2], '--net', 'plain']
    done = capsnb(*typed, '--epochs', 1, '--device', 'cpu', '--out', out)
    assert done.exit_code == 0, done.output
    card = card_of(out, 'me/rows')
    files_without({'card': str(card).encode()}, [tmp_path])
    assert card.data.license == 'apache-2.0' and card.data.model_name == 'rows'
    assert {r.dataset_name for r in card.data.eval_results} == {'files of the author'}
    page = re.sub(r'<pre>.*?</pre>', '', render(card.text), flags=re.S)
    assert '<script' not in page and '<img' not in page and '<strong' not in page
    assert re.findall('href="([^"]*)"', page) == ['https://github.com/capsnb/capsnb']
    for name in evil:
        assert (
            ' '.join(name.split())
            .replace('\u202e', '')[:15]
            .replace('<', '&lt;')
            .replace('>', '&gt;')
            in page
        )
    assert 'https\\://evil.example www\\.evil.example' in card.text
    assert page.count('<table>') == 2 and page.count('<h1>') == 1


@pytest.mark.parametrize('key', ['best_epoch', 'epochs', 'n_params', 'seed', 'date', 'made_with'])
def test_odd_metrics_of_a_strangers_run_do_nothing(digits, tmp_path, key):
    from capsnb.lab.runs import with_digest

    run = shutil.copytree(digits, tmp_path / 'run')
    m = json.loads((run / 'metrics.json').read_text())
    m.pop('digest')
    m[key] = '<img src=x onerror=alert(1)> [click](https://evil.example)'
    m[key] = {'torch': m[key], 'capsnb': m[key]} if key == 'made_with' else m[key]
    (run / 'metrics.json').write_text(json.dumps(with_digest(m)))
    card = str(card_of(run, 'me/x'))
    assert not re.search(r'(?<!\\)<img|(?<!\\)\]\(https://evil', card) and '<img' in card


def test_what_cannot_be_pushed_is_one_sentence(hub, digits, tmp_path, monkeypatch):
    def says(*args):
        done = capsnb('push', *args)
        assert done.exit_code == 1 and len(done.output.splitlines()) == 1, done.output
        assert not hub.repos
        return done.output

    unfinished = tmp_path / 'unfinished'
    shutil.copytree(digits, unfinished)
    for name in ('metrics.json', 'task.json'):
        (unfinished / name).unlink()
    assert 'has not come to its end' in says(unfinished, 'me/x')
    damaged = tmp_path / 'damaged'
    shutil.copytree(digits, damaged)
    weights = damaged / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-1] + b'\x01')
    assert 'is damaged' in says(damaged, 'me/x')
    assert 'no finished run' in says(tmp_path / 'none', 'me/x')
    assert 'no name!' in says(digits, 'no name!')
    assert 'log in with a token that may write' in says(digits, 'me/x', '--token', 'hf_wrong')
    with monkeypatch.context() as m:
        m.delenv('HF_TOKEN')
        m.setattr(huggingface_hub.constants, 'HF_TOKEN_PATH', str(tmp_path / 'none'))
        assert 'nobody is logged in; hf auth login' in says(digits, 'me/x')
    with monkeypatch.context() as m:
        m.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
        assert 'HF_HUB_OFFLINE is set' in says(digits, 'me/x')
    with monkeypatch.context() as m:
        m.setattr(huggingface_hub.constants, 'ENDPOINT', 'http://127.0.0.1:1')
        assert 'http://127.0.0.1:1 does not answer' in says(digits, 'me/x')
    assert not any(p.endswith('/commit/main') for _, p, _ in hub.asked)


# ---- classifiers for transformers


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('texts')
    trees = tiny_treebank(root / 'trees')
    texts = list(load_sst(trees, 'sst5', phrases=False, official=False)['train']['text'])
    return dict(root=root, trees=trees, texts=texts)


def encoder(world, kind):
    folder = world['root'] / kind
    return folder if folder.exists() else tiny_transformer(folder, world['texts'], kind)


def text_run(world, reads, net, out, **kw):
    usual = dict(roots=True, cache=False, folder=world['trees'], official=False)
    train(Sentiment('sst5', reads, **{**usual, **kw}), net, out, **quick)
    return out


@pytest.fixture(scope='module')
def run(world):
    return text_run(world, str(encoder(world, 'gpt2')), 'sstnet', world['root'] / 'run')


def save(source, folder, **kw):
    if not isinstance(source, RoutingClassifier):
        source = classifier_of(source, device='cpu', **kw)
    source.save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def saved(run, world):
    return save(run, world['root'] / 'saved')


def read(folder, **kw):
    return tf.AutoModelForSequenceClassification.from_pretrained(folder, **kw)


def logits(model, tokenizer, texts):
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, return_tensors='pt')).logits


@pytest.mark.parametrize(
    'kind, net',
    [
        ('gpt2', 'sstnet'),
        ('bert', 'sstnet'),
        ('gpt2', 'routing'),
        ('bert', 'plain'),
        ('gpt2', 'vectors'),
    ],
)
def test_a_pipeline_says_what_the_runs_own_network_says(world, tmp_path, kind, net):
    out = text_run(world, str(encoder(world, kind)), net, tmp_path / 'run')
    classify = tf.pipeline(
        'text-classification', model=str(save(out, tmp_path / 'saved')), device='cpu', top_k=None
    )
    network, task, note = load_run(out, 'cpu')
    texts = sorted(world['texts'], key=len)[:: max(1, len(world['texts']) // 5)]
    assert len({len(t.split()) for t in texts}) > 2
    want = [network(*task.reader()([t])).a[0].softmax(0) for t in texts]
    for size in (1, len(texts)):
        for scores, wanted in zip(classify(texts, batch_size=size), want):
            by_name = {s['label']: s['score'] for s in scores}
            found = torch.tensor([by_name[k] for k in note['names']])
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_a_frozen_transformer_is_named_not_copied(run, saved, world):
    folder = encoder(world, 'gpt2')
    weights, note = (
        load_file(saved / 'model.safetensors'),
        json.loads((saved / 'config.json').read_text()),
    )
    head = load_file(run / 'model.safetensors')
    assert {k.removeprefix('head.') for k in weights} == set(head)
    assert all(torch.equal(weights[f'head.{k}'], v) for k, v in head.items())
    assert note['reader']['encoder'] == str(folder) and note['encoder_config'] is None
    assert note['reader']['fingerprint'] == FrozenEncoder(folder, device='cpu').fingerprint
    assert isinstance(tf.AutoConfig.from_pretrained(saved), CapsConfig)
    model = read(saved)
    assert isinstance(model, RoutingClassifier) and not model.training
    assert model.train().head.training and not model.encoder.training
    trained = {k for k, p in model.named_parameters() if p.requires_grad}
    assert trained and all(k.startswith('head.') for k in trained)


def test_a_transformer_that_is_gone_or_another_is_one_sentence(world, saved, tmp_path):
    folder, other = encoder(world, 'gpt2'), tmp_path / 'other'
    tiny_transformer(other, world['texts'], seed=1)
    tokenizer = tf.AutoTokenizer.from_pretrained(saved)
    want = logits(read(saved), tokenizer, world['texts'][:3])
    aside = folder.rename(tmp_path / 'aside')
    try:
        for kw, said in (({}, 'there is no folder'), (dict(encoder=other), 'another transformer')):
            with pytest.raises((ValueError, OSError), match=said) as e:
                read(saved, **kw)
            assert len(str(e.value).splitlines()) == 1
        with pytest.raises(ValueError, match='is another transformer'):
            tf.pipeline('text-classification', str(saved), model_kwargs=dict(encoder=other))
        found = logits(read(saved, encoder=aside), tokenizer, world['texts'][:3])
    finally:
        aside.rename(folder)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize('lost', [True, False])
def test_weights_that_do_not_fit_are_refused(saved, tmp_path, lost):
    folder = shutil.copytree(saved, tmp_path / 'm')
    weights = load_file(folder / 'model.safetensors')
    if lost:
        weights.pop('head.depth_emb')
    else:
        weights['head.more'] = torch.ones(2)
    save_file(weights, folder / 'model.safetensors', dict(format='pt'))
    with pytest.raises(ValueError, match='head.depth_emb' if lost else 'head.more'):
        read(folder)


def test_tokens_are_read_as_in_training(world, run, saved):
    model, tokenizer = read(saved), tf.AutoTokenizer.from_pretrained(saved)
    network, task, _ = load_run(run, 'cpu')
    texts, reader = world['texts'][:4], task.reader()
    want = network(*reader(texts)).a.detach()
    torch.testing.assert_close(logits(model, tokenizer, texts), want)
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
    long = ' '.join(texts * (1 + 650 // n))
    with pytest.raises(ValueError, match='takes at most 600: truncation=True'):
        tf.pipeline('text-classification', str(saved), device='cpu')(long)
    whole = tf.pipeline('text-classification', str(saved), device='cpu', truncation=True)(long)
    assert 0 < whole[0]['score'] <= 1


@pytest.mark.parametrize('kind', ['gpt2', 'bert', 'llama'])
def test_a_trained_transformer_is_saved_whole(world, tmp_path, kind):
    folder = tmp_path / 'model'
    tiny_transformer(folder, world['texts'], 'bert' if kind == 'bert' else 'gpt2')
    if kind == 'llama':  # whose rotations are in no file
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=600)
        config = tf.LlamaConfig(intermediate_size=48, eos_token_id=0, bos_token_id=0, **sizes)
        tf.AutoModel.from_config(config).save_pretrained(folder)
    seed_everything(0)
    rc = RoutingClassifier.from_encoder(folder, 2, frozen=False, device='cpu', n_parts=4, d_feat=8)
    texts = world['texts'][:4]
    want = logits(rc, rc.tokenizer, texts)
    save(rc, tmp_path / 'saved')
    shutil.rmtree(folder)
    files_without({'config.json': (tmp_path / 'saved/config.json').read_bytes()}, [tmp_path])
    model, tokenizer = (
        read(tmp_path / 'saved'),
        tf.AutoTokenizer.from_pretrained(tmp_path / 'saved'),
    )
    torch.testing.assert_close(logits(model, tokenizer, texts), want)
    assert model.train().encoder.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('frozen', [True, False])
def test_transformers_trainer_trains_it(world, saved, tmp_path, frozen):
    start = saved
    if not frozen:
        seed_everything(0)
        folder = encoder(world, 'gpt2')
        rc = RoutingClassifier.from_encoder(folder, 5, frozen=False, device='cpu', d_feat=8)
        start = save(rc, tmp_path / 'start')
    model, tokenizer = read(start), tf.AutoTokenizer.from_pretrained(start)
    before = copy.deepcopy(model.state_dict())
    rows = datasets.Dataset.from_dict(dict(text=world['texts'][:8], label=[0, 1, 2, 3] * 2))
    rows = rows.map(lambda r: tokenizer(r['text']), batched=True, remove_columns='text')
    args = dict(num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, seed=0)
    args |= dict(eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True)
    args |= dict(use_cpu=True, report_to='none', disable_tqdm=True)
    trainer = tf.Trainer(
        model,
        tf.TrainingArguments(str(tmp_path / 'out'), **args),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.remove_callback(tf.PrinterCallback)
    trainer.train()
    trainer.save_model(tmp_path / 'again')
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert 'head.routings.0.W' in changed
    assert any(k.startswith('encoder.') for k in changed) is not frozen
    names = set(load_file(tmp_path / 'again' / 'model.safetensors'))
    assert any(k.startswith('encoder.') for k in names) is not frozen
    again, texts = read(tmp_path / 'again'), world['texts'][:4]
    torch.testing.assert_close(
        logits(again, tokenizer, texts), logits(model.eval(), tokenizer, texts)
    )
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
    with pytest.raises(ValueError, match='nor output_attentions'):
        model(**batch, output_attentions=True)
    for wrong, said in (
        (dict(num_labels=7), 'the head has 5 classes, num_labels is 7'),
        (dict(problem_type='multi_label_classification'), 'one class a text'),
    ):
        with pytest.raises(ValueError, match=said):
            read(saved, **wrong)


def whole(world):
    seed_everything(0)
    how = dict(frozen=False, device='cpu', n_parts=4, d_feat=8)
    return RoutingClassifier.from_encoder(encoder(world, 'gpt2'), 2, **how)


def test_checkpointing_gives_the_same_gradients(world):
    model = whole(world)
    batch = model.tokenizer(world['texts'][:4], padding=True, return_tensors='pt')
    found, calls = [], []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.encoder.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model.train()(**batch, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        found.append(grads)
    assert len(calls) == 3  # once, then once more in the backward pass
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for k, g in found[0].items():
        torch.testing.assert_close(found[1][k], g)


def test_adapters_are_trained_or_refused(saved, world):
    peft = pytest.importorskip('peft')
    how = dict(task_type='SEQ_CLS', r=2, target_modules=['c_attn'], modules_to_save=['head'])
    adapted = lambda model: peft.get_peft_model(model, peft.LoraConfig(**how)).train()
    frozen, tokenizer = read(saved), tf.AutoTokenizer.from_pretrained(saved)
    batch = tokenizer(world['texts'][:2], padding=True, return_tensors='pt')
    batch = dict(batch, labels=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match='lora_A.* would never be trained.*frozen=False'):
        adapted(frozen)(**batch)
    model = adapted(whole(world))
    model(**batch).loss.backward()
    grads = {k: p.grad for k, p in model.named_parameters() if 'lora_B' in k}
    assert grads and all(g is not None and g.any() for g in grads.values())


def test_a_trained_t5_has_no_config_of_its_encoder_alone(world, tmp_path):
    tiny_transformer(tmp_path / 'm', world['texts'])
    sizes = dict(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=600)
    tf.AutoModel.from_config(tf.T5Config(**sizes)).save_pretrained(tmp_path / 'm')
    with pytest.raises(ValueError, match='cannot be made again from its config: freeze it'):
        RoutingClassifier.from_encoder(tmp_path / 'm', 2, frozen=False, device='cpu', d_feat=8)


def test_what_an_older_version_saved_says_what_to_do(tmp_path):
    for name, said in (
        ('classifier.json', 'SSTNet.from_pretrained'),
        ('model.safetensors', 'state'),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / name).write_text('{}')
        with pytest.raises(ValueError, match=f'older capsnb.*from_encoder.*{said}'):
            RoutingClassifier.from_pretrained(tmp_path / name)


@pytest.mark.parametrize('names', [['a'], ['a', 'a'], 'ab', 3, dict(a=0, b=1)])
def test_odd_names_are_refused_before_anything_is_loaded(names):
    with pytest.raises(ValueError, match='expected 2 different names of classes'):
        RoutingClassifier.from_encoder('./nowhere', 2, names=names)


def test_a_padding_token_that_the_model_does_not_know(world, tmp_path):
    folder = tiny_transformer(tmp_path / 'm', world['texts'])
    known = tf.AutoTokenizer.from_pretrained(folder)
    known.add_special_tokens(dict(pad_token='<PAD>'))  # and the model is not resized
    known.save_pretrained(folder)
    rc = RoutingClassifier.from_encoder(folder, 2, device='cpu', n_parts=4, d_feat=8).eval()
    short, long = sorted(world['texts'], key=len)[:: len(world['texts']) - 1]
    want = logits(rc, rc.tokenizer, [short])
    for tokenizer in (rc.tokenizer, known):
        torch.testing.assert_close(logits(rc, tokenizer, [short, long])[:1], want)


def test_runs_on_pictures_are_no_classifiers_of_text(digits):
    with pytest.raises(ValueError, match='is no run on texts, but on digits'):
        classifier_of(digits)


odd = [None, True, -1, 10**9, 1.5, 'x', [], [0], [10**9], ['x'], {}, {'x': 1}]


def test_odd_entries_of_a_config_are_one_sentence(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / 'm')
    path, good = folder / 'config.json', json.loads((saved / 'config.json').read_text())
    refused = 0
    places = [*[('reader', k) for k in good['reader']], *[('head', k) for k in good['head']]]
    places += [(k,) for k in ('network', 'head', 'reader', 'encoder_config')]
    for *above, key in places:
        for value in odd:
            note = copy.deepcopy(good)
            (note[above[0]] if above else note)[key] = value
            path.write_text(json.dumps(note))
            try:
                tokenizer = tf.AutoTokenizer.from_pretrained(folder)
                logits(read(folder), tokenizer, ['it lasts .'])
            except (ValueError, OSError) as e:
                assert len(str(e).splitlines()) == 1, (key, value, e)
                refused += 1
    assert refused > 100


def test_a_run_on_texts_is_pushed_and_read_from_the_hub_alone(hub, world, tmp_path):
    api = huggingface_hub.HfApi()
    api.create_repo('me/tiny')
    api.upload_folder(repo_id='me/tiny', folder_path=encoder(world, 'gpt2'))
    out = text_run(world, 'me/tiny', 'sstnet', tmp_path / 'run', validate=False)
    address = push_run(out, 'me/moods')
    files = hub.repos['models/me/moods']
    assert {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json'} <= set(files)
    assert address.endswith('/me/moods/commit/' + 'c' * 40)
    files_without(files, [tmp_path, world['root']])
    note, card = (
        json.loads(files['config.json']),
        huggingface_hub.ModelCard(files['README.md'].decode()),
    )
    assert (note['reader']['encoder'], note['reader']['revision']) == ('me/tiny', 'c' * 40)
    assert card.data.pipeline_tag == 'text-classification' and card.data.base_model == 'me/tiny'
    assert 'The last of 1 epochs was kept: no data were held back' in card.text
    assert 'files in the format of: sst' in card.text
    assert {r.dataset_split for r in card.data.eval_results} == {'test'}
    network, task, _ = load_run(out, 'cpu')
    text = world['texts'][0]
    want = network(*task.reader()([text])).a[0].softmax(0).max().item()
    shutil.rmtree(tmp_path / 'hub')
    (use,) = re.findall(r'```python\n(import capsnb.*?)\n```', card.text, re.S)
    with pytest.raises(OSError, match="to fetch it, name it yourself: encoder='me/tiny'"):
        read('me/moods')  # a name in a file asks nobody
    scope = {}
    exec(use, scope)
    (found,) = scope['classify'](text)
    assert found['score'] == pytest.approx(want, rel=1e-5)


def test_a_transformer_that_nobody_else_has_is_not_named_on_the_hub(hub, run, world, tmp_path):
    done = capsnb('push', run, 'me/moods')
    assert done.exit_code == 1 and 'which nobody else has: name the same one' in done.output
    assert 'models/me/moods' not in hub.repos and len(done.output.splitlines()) == 1
    done = capsnb('push', run, 'me/moods', '--card', tmp_path / 'card.md')
    assert done.exit_code == 0, done.output
    files_without({'card.md': (tmp_path / 'card.md').read_bytes()}, [world['root']])
    api = huggingface_hub.HfApi()
    for name, seed in (('tiny', 0), ('other', 1)):
        folder = tiny_transformer(tmp_path / name, world['texts'], seed=seed)
        api.create_repo(f'me/{name}')
        api.upload_folder(repo_id=f'me/{name}', folder_path=folder)
    done = capsnb('push', run, 'me/moods', '--encoder', 'me/other')
    assert done.exit_code == 1 and 'is another transformer' in done.output
    done = capsnb('push', run, 'me/moods', '--encoder', 'me/tiny')
    assert done.exit_code == 0, done.output
    files_without(hub.repos['models/me/moods'], [world['root']])


# ---- data sets


def put(hub, name, tmp_path, **splits):  # a data set as the Hub keeps it
    files = hub.repos.setdefault(f'datasets/{name}', {})
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / 'rows.parquet')
        content = (tmp_path / 'rows.parquet').read_bytes()
        files[f'data/{split}-00000-of-00001.parquet'] = content


def test_pictures_of_a_data_set_of_the_hub(hub, tmp_path):
    Image = pytest.importorskip('PIL.Image')
    shade = lambda k: (30 + 190 * (k % 2), k, 0)
    rows = lambda n: [
        dict(seen=Image.new('RGB', (20, 15), shade(k)), kind=['dark', 'light'][k % 2])
        for k in range(n)
    ]
    put(hub, 'me/shapes', tmp_path, train=rows(40), test=rows(10))
    out = tmp_path / 'run'
    how = ('--image', 'seen', '--label', 'kind', '--size', 16, '--epochs', 2, '--net', 'cnn')
    done = capsnb('train', 'hub:me/shapes', *how, '--device', 'cpu', '--out', out)
    assert done.exit_code == 0, done.output
    note = json.loads((out / 'task.json').read_text())
    assert note['source'] == 'hub:me/shapes' and note['names'] == ['dark', 'light']
    assert len(load_run(out, 'cpu').task.open('test')['label']) == 10
    card = card_of(out, 'me/net')
    assert card.data.datasets == ['me/shapes'] and 'hub:me/shapes' in str(card)
    done = capsnb('train', 'hub:me/none', *how, '--device', 'cpu', '--out', tmp_path / 'none')
    assert done.exit_code == 1 and "'hub:me/none' cannot be read" in done.output
    assert len(done.output.splitlines()) == 1


def test_texts_of_a_data_set_of_the_hub(hub, world, tmp_path):
    moods = [('bad', 'it broke'), ('good', 'it lasts'), ('good', 'worth it'), ('bad', 'no')]
    rows = [dict(words=f'{t}, says {k}', mood=m) for k in range(8) for m, t in moods]
    put(hub, 'me/words', tmp_path, train=rows[:20], validation=rows[20:26], test=rows[26:])
    own = OwnTexts(
        encoder=encoder(world, 'gpt2'),
        source='hub:me/words',
        text='words',
        label='mood',
        cache=False,
    )
    m = train(own, None, tmp_path / 'run', **quick)
    assert m['valid_accuracy'] is not None and own.names == ('bad', 'good')
    assert [len(own.parts.labels[k]) for k in ('train', 'validation', 'test')] == [20, 6, 6]
