"""`RoutingClassifier` for users of transformers and datasets: Trainer, tables, names, odd files."""

import json
import shutil
import warnings
import pytest
import torch
from torch.testing import assert_close

tf = pytest.importorskip('transformers')
datasets = pytest.importorskip('datasets')
pytest.importorskip('accelerate')
from safetensors.torch import save_file
from capsnb.data.embed import tiny_transformer
from capsnb.lab.text import RoutingClassifier

tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()

TEXTS = ['a warm , funny film .', 'it never finds its feet .', 'twice .', 'good']
NAMES = ['sad', 'so so', 'glad']


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    return {
        k: tiny_transformer(tmp_path_factory.mktemp('tiny') / k, TEXTS, k) for k in ('gpt2', 'bert')
    }


def classifier(folder, **kw):
    return RoutingClassifier.from_encoder(
        folder, 3, device='cpu', **{**dict(d_feat=8, n_parts=4, names=NAMES), **kw}
    )


@pytest.fixture(scope='module', params=['gpt2', 'bert'])
def rc(tiny, request):
    torch.manual_seed(0)
    return classifier(tiny[request.param])


def data(**columns):
    return datasets.Dataset.from_dict(dict(text=TEXTS, label=[0, 1, 2, 0]) | columns)


# ---- predict


def test_one_text_is_one_text(rc):
    assert_close(rc.predict('good'), rc.predict(['good'])) and rc.predict('good').shape == (1, 3)


def test_a_data_set_is_its_texts(rc):
    want = rc.predict(TEXTS)
    for texts in (data(), data()['text'], data().to_pandas()['text'], tuple(TEXTS), iter(TEXTS)):
        assert_close(rc.predict(texts), want)
    other = data().rename_column('text', 'sentence')
    for wrong, what in (
        (other, "'sentence'"),
        (data().to_dict(), "'text'"),
        (datasets.DatasetDict(train=data()), "'train'"),
        (data().to_pandas(), "'text'"),
        (3, 'got 3'),
        (b'good', 'one text'),
    ):
        with pytest.raises(ValueError, match=f'expected a list of texts.*{what}'):
            rc.predict(wrong)


def test_tables_are_no_texts_elsewhere_either(rc, tmp_path):
    for f in (
        rc.reader,
        rc.reader.encode,
        rc.reader.stream,
        lambda t: rc.reader.cache(t, tmp_path / 'c'),
        lambda t: rc(text=t),
        lambda t: classifier(rc.reader.name, texts=t),
    ):
        for wrong in (dict(text=TEXTS), 'good', datasets.DatasetDict(train=data())):
            with pytest.raises(ValueError, match='expected a list of texts'):
                f(wrong)
    assert len(rc.reader.encode(data())) == 4 and not (tmp_path / 'c').exists()


def test_names_are_said(rc):
    p = rc.predict(TEXTS)
    assert [r['label'] for r in rc.predict(TEXTS, named=True)] == [NAMES[k] for k in p.argmax(1)]
    assert_close(torch.tensor([r['score'] for r in rc.predict(TEXTS, named=True)]), p.max(1).values)
    assert rc.id2label == dict(enumerate(NAMES)) and rc.label2id == {
        n: k for k, n in enumerate(NAMES)
    }


@pytest.mark.parametrize(
    'names',
    [
        ['a', 'b'],
        ['a', 'b', 'b'],
        ['a', 'b', 3],
        {0: 'a', 1: 'b', 5: 'c'},
        'abc',
        3,
        {'a': 0, 'b': 1, 'c': 2},
    ],
)
def test_odd_names_are_refused_before_anything_is_loaded(names):
    with pytest.raises(ValueError, match='3 different names of classes'):
        classifier('./nowhere', names=names)


def test_names_as_transformers_keeps_them(tiny):
    for names in (dict(enumerate(NAMES)), {str(k): n for k, n in enumerate(NAMES)}):
        assert classifier(tiny['bert'], names=names).names == tuple(NAMES)


# ---- tokens


def test_text_without_the_end_is_refused_and_tokenize_adds_it(rc):
    plain = tf.AutoTokenizer.from_pretrained(rc.reader.name)
    if plain.pad_token is None:
        plain.pad_token = plain.eos_token
    batch = plain(
        TEXTS, padding=True, padding_side='right', return_tensors='pt', add_special_tokens=False
    )
    with pytest.raises(
        ValueError,
        match=r"text 0 ends with the token ' ?\.', expected "
        r"'(<\|endoftext\|>|\[SEP\])'.*classifier.tokenize",
    ):
        rc(batch['input_ids'], batch['attention_mask'])
    rows = data().map(lambda r: rc.tokenize(r['text']), batched=True)
    assert_close(
        rc(**{k: v for k, v in rc.collate(rows.to_list()).items() if k != 'labels'}).a.softmax(-1),
        rc.predict(TEXTS),
    )
    assert_close(rc(text=TEXTS).a.softmax(-1), rc.predict(TEXTS))


def test_an_end_that_is_switched_off_is_not_asked_for(tiny):
    rc = classifier(tiny['gpt2'], end=None)
    ids = torch.tensor(rc.reader.tokens(['good']))
    assert_close(rc(ids, torch.ones_like(ids)).a.softmax(-1), rc.predict('good'))


def test_what_a_batch_lacks_is_named(rc):
    with pytest.raises(ValueError, match='data_collator=classifier.collate'):
        rc(labels=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"got \['label', 'sentence'\].*rename_column"):
        rc.collate([dict(sentence='a', label=0)])
    with pytest.raises(ValueError, match="expected numbers as labels, got 'glad'"):
        rc.collate([dict(text='a', label='glad')])


# ---- the Trainer, as it comes


def trainer(rc, out, rows, **kw):
    args = tf.TrainingArguments(
        str(out),
        num_train_epochs=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to='none',
        disable_tqdm=True,
        save_strategy='no',
        seed=0,
    )
    found = tf.Trainer(
        model=rc,
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        **{**dict(data_collator=rc.collate), **kw},
    )
    found.remove_callback(tf.PrinterCallback)
    return found


@pytest.mark.parametrize('frozen', [True, False])
@pytest.mark.parametrize('kind', ['gpt2', 'bert'])
def test_the_trainer_trains_and_what_it_saves_is_a_classifier(tiny, tmp_path, frozen, kind):
    torch.manual_seed(0)
    rc = classifier(tiny[kind], frozen=frozen)
    before = rc.predict(TEXTS)
    t = trainer(rc, tmp_path / 'out', data(more=['x'] * 4))
    t.train()
    assert t.evaluate()['eval_loss'] > 0 and t.predict(data()).predictions.shape == (4, 3)
    t.save_model(tmp_path / 'saved')
    back = RoutingClassifier.from_pretrained(tmp_path / 'saved', device='cpu')
    assert (
        not torch.allclose(rc.predict(TEXTS), before)
        and back.names == tuple(NAMES)
        and back.frozen == frozen
        and not back.training
    )
    assert_close(back.predict(TEXTS), rc.eval().predict(TEXTS))
    back.save_pretrained(tmp_path / 'again')
    again = RoutingClassifier.from_pretrained(tmp_path / 'again', device='cpu')
    assert again.names == tuple(NAMES)
    assert_close(again.predict(TEXTS), back.predict(TEXTS))


def test_the_trainer_takes_tokens_too(rc, tmp_path):
    trainer(rc, tmp_path, data().map(lambda r: rc.tokenize(r['text']), batched=True)).train()


def test_without_the_collator_the_trainer_says_what_to_pass(rc, tmp_path):
    with pytest.raises(ValueError, match='data_collator=classifier.collate'):
        trainer(rc, tmp_path, data(), data_collator=None).train()


def test_weights_of_another_reading_are_refused(tiny, tmp_path):
    one, two = classifier(tiny['gpt2'], layers=[0, 1]), classifier(tiny['gpt2'], layers=[1, 2])
    with pytest.raises(ValueError, match=r'layers \[0, 1\], this one has \[1, 2\]'):
        two.load_state_dict(one.state_dict())


# ---- odd files

ODD = [None, True, -1, 0, 10**9, 1.5, float('nan'), 'x', '', [], [0], [[]], ['x'], {}, {'x': 1}]


def odd(note):
    for key in note:
        for value in (*ODD, KeyError):
            yield (
                key,
                value,
                {
                    k: value if k == key else v
                    for k, v in note.items()
                    if k != key or value is not KeyError
                },
            )


def loads_or_says(folder):  # a number of classifiers that loaded
    try:
        RoutingClassifier.from_pretrained(folder, device='cpu')
    except (ValueError, OSError) as e:
        assert len(str(e).splitlines()) == 1 and type(e) in (
            ValueError,
            OSError,
            FileNotFoundError,
        ), repr(e)
        return 0
    return 1


def without_checksums(folder):  # as older versions wrote it
    path = folder / 'classifier.json'
    note = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in note.items() if k not in ('files', 'digest')}))


older = pytest.mark.filterwarnings('ignore:.*has no checksums')  # no checksum catches odd entries


@older
def test_every_odd_entry_of_a_classifiers_folder_is_one_sentence(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.chdir(tmp_path)
    classifier(tiny['gpt2']).save_pretrained('rc')
    n = 0
    without_checksums(tmp_path / 'rc')
    for name in ('classifier.json', 'head/config.json'):
        path = tmp_path / 'rc' / name
        good = path.read_text()
        for key, value, note in odd(json.loads(good)):
            path.write_text(json.dumps(note))
            loads_or_says('rc')
            n += 1
        for text in ('', '[]', '3', '{', '[' * 10**5, '\x00'):
            path.write_text(text)
            assert not loads_or_says('rc')
        path.write_text(good)
    assert n > 300 and loads_or_says('rc')
    for name in ('head/config.json', 'head/model.safetensors'):  # and nobody else is asked for them
        (tmp_path / 'rc' / name).rename(tmp_path / 'aside')
        with pytest.raises(ValueError, match='holds no head'):
            RoutingClassifier.from_pretrained('rc', device='cpu')
        (tmp_path / 'aside').rename(tmp_path / 'rc' / name)


@older
def test_every_odd_entry_of_the_transformers_config_is_one_sentence(tiny, tmp_path):
    classifier(tiny['gpt2']).save_pretrained(tmp_path / 'rc', with_encoder=True)
    without_checksums(tmp_path / 'rc')
    for name in ('config.json', 'tokenizer_config.json'):
        path = tmp_path / 'rc' / 'encoder' / name
        good = path.read_text()
        for key, value, note in odd(json.loads(good)):
            path.write_text(json.dumps(note))
            loads_or_says(tmp_path / 'rc')
        path.write_text(good)
    assert loads_or_says(tmp_path / 'rc')


def test_every_odd_entry_of_a_checkpoints_note_is_one_sentence(tiny, tmp_path):
    rc = classifier(tiny['gpt2'])
    path = tmp_path / 'model.safetensors'
    state = rc.state_dict()
    good = json.loads(state['_extra_state'].numpy().tobytes())

    def put(text):
        save_file(
            state | dict(_extra_state=torch.tensor(list(text.encode()), dtype=torch.uint8)), path
        )

    put(json.dumps(good))
    assert loads_or_says(tmp_path)
    for key, value, note in odd(good):
        put(json.dumps(note))
        loads_or_says(tmp_path)
    for key, value, note in odd(good['head']):
        put(json.dumps(good | dict(head=note)))
        loads_or_says(tmp_path)
    for text in ('', '[]', '3', '{', '[' * 10**5):
        put(text)
        assert not loads_or_says(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    assert not loads_or_says(tmp_path)
    save_file({k: v for k, v in state.items() if k != '_extra_state'}, path)
    with pytest.raises(ValueError, match='holds no classifier'):
        RoutingClassifier.from_pretrained(tmp_path, device='cpu')


# ---- checksums


def flipped(path, k, bit):  # the file as it was, after a bit of its byte k has been flipped
    whole = path.read_bytes()
    path.write_bytes(whole[:k] + bytes([whole[k] ^ 1 << bit]) + whole[k + 1 :])
    return whole


def test_a_flipped_bit_in_any_file_is_named(tiny, tmp_path):
    classifier(tiny['gpt2']).save_pretrained(tmp_path / 'rc', with_encoder=True)
    files = sorted(p for p in (tmp_path / 'rc').glob('*/**/*') if p.is_file())
    for name in (
        'head/model.safetensors',
        'head/config.json',
        'encoder/model.safetensors',
        'encoder/tokenizer.json',
    ):
        assert tmp_path / 'rc' / name in files
    for path in files:
        for k in (0, -1):
            k %= path.stat().st_size
            whole = flipped(path, k, 0)
            said = f"{path.name}' is damaged, or not the one that was saved"
            with pytest.raises(ValueError, match=said):
                RoutingClassifier.from_pretrained(tmp_path / 'rc', device='cpu')
            path.write_bytes(whole)
    assert loads_or_says(tmp_path / 'rc')


def test_a_flipped_bit_in_the_note_is_named(tiny, tmp_path):
    classifier(tiny['gpt2']).save_pretrained(tmp_path / 'rc')
    path = tmp_path / 'rc' / 'classifier.json'
    for k in range(path.stat().st_size):
        whole = flipped(path, k, k % 7)
        assert not loads_or_says(tmp_path / 'rc'), k
        path.write_bytes(whole)
    for key in ('files', 'digest'):
        path.write_text(json.dumps({k: v for k, v in json.loads(whole).items() if k != key}))
        with pytest.raises(ValueError, match='not the one that was saved'):
            RoutingClassifier.from_pretrained(tmp_path / 'rc', device='cpu')


def test_weights_of_another_classifier_are_not_taken(tiny, tmp_path):
    for seed in (0, 1):
        torch.manual_seed(seed)
        classifier(tiny['gpt2']).save_pretrained(tmp_path / f'{seed}')
    shutil.copy(
        tmp_path / '1' / 'head' / 'model.safetensors', tmp_path / '0' / 'head' / 'model.safetensors'
    )
    with pytest.raises(ValueError, match='not the one that was saved'):
        RoutingClassifier.from_pretrained(tmp_path / '0', device='cpu')


def test_a_file_that_is_gone_is_named_unless_it_is_not_read(tiny, tmp_path):
    classifier(tiny['gpt2']).save_pretrained(tmp_path / 'rc', with_encoder=True)
    shutil.rmtree(tmp_path / 'rc' / 'encoder')
    with pytest.raises(ValueError, match='encoder/.*is missing'):
        RoutingClassifier.from_pretrained(tmp_path / 'rc', device='cpu')
    RoutingClassifier.from_pretrained(tmp_path / 'rc', encoder=tiny['gpt2'], device='cpu')


def test_a_folder_of_an_older_version_is_read_with_a_warning(tiny, tmp_path):
    rc = classifier(tiny['gpt2']).eval()
    rc.save_pretrained(tmp_path / 'rc')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        RoutingClassifier.from_pretrained(tmp_path / 'rc', device='cpu')
    without_checksums(tmp_path / 'rc')
    with pytest.warns(UserWarning, match='has no checksums.*cannot be checked'):
        back = RoutingClassifier.from_pretrained(tmp_path / 'rc', device='cpu')
    assert_close(back.predict(TEXTS), rc.predict(TEXTS))
