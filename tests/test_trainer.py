"""transformers' own Trainer with every network; what a named tuple must go on to do."""

import copy
import pickle
import pytest
import torch
from torch.utils import _pytree
from capsnb import CapsNet, SmallNORBNet, SSTNet
from capsnb.lab.capsnet import CapsOut
from capsnb.routing.dstep import Routed, RoutedR
from capsnb.routing.dynamic import Agreed
from capsnb.routing.em import EMRouted
from capsnb.engine.layers import Caps
from capsnb.lab.matrix_caps import MatrixCapsNet, MatrixCapsOut
from capsnb.lab.vision import BaselineCNN, DStepNet, PlainCNN, Scores

trunk, picture = dict(channels=(4, 4), strides=(2, 2)), dict(images=torch.rand(7, 1, 12, 12))
nets = dict(
    DStepNet=lambda: (DStepNet(3, n_types=2, n_parts=3, **trunk), picture),
    SmallNORBNet=lambda: (SmallNORBNet(3, 4, 4), dict(images=torch.rand(7, 2, 29, 29))),
    PlainCNN=lambda: (PlainCNN(3, n_hidden=4, **trunk), picture),
    BaselineCNN=lambda: (BaselineCNN(3, 1, 12), picture),
    CapsNet=lambda: (CapsNet(3, (1, 12, 12), 4, (3, 3), 2, 2, 4, 4, decoder=(8,)), picture),
    MatrixCapsNet=lambda: (
        MatrixCapsNet(4, 2, 2, 2, E=3, P=2, in_channels=1, size=18, preset='paper'),
        dict(images=torch.rand(7, 1, 18, 18)),
    ),
    SSTNet=lambda: (
        SSTNet(3, 8, 3, d_feat=4, n_parts=3),
        dict(mask=torch.ones(7, 5), embs=torch.rand(7, 5, 3, 8)),
    ),
)
each_net = pytest.mark.parametrize('name', nets)


def trained(name, tmp_path, labels=False, **kw):
    "A Trainer, its network, and seven samples; the last batch is smaller than the others."
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    net, columns = nets[name]()
    if labels:
        columns = {**columns, 'labels': torch.arange(7) % 3}
    rows = [{k: v[i] for k, v in columns.items()} for i in range(7)]
    how = dict(use_cpu=True, report_to='none', disable_tqdm=True, save_strategy='no', max_steps=1)
    args = transformers.TrainingArguments(str(tmp_path), per_device_eval_batch_size=3, **how, **kw)
    return transformers.Trainer(net, args, train_dataset=rows), net.eval(), rows, columns


@each_net
@pytest.mark.parametrize('steps', [None, 1])
def test_predictions_without_labels_are_what_the_network_returns(name, steps, tmp_path):
    trainer, net, rows, columns = trained(name, tmp_path, eval_accumulation_steps=steps)
    got = trainer.predict(rows).predictions
    with torch.no_grad():
        want = net(**columns)
    if isinstance(want, Scores):
        got = Scores(got)  # transformers takes a single field out of its tuple
    assert type(got) is type(want) and got._fields == want._fields
    for g, w in zip(got, want):
        torch.testing.assert_close(torch.from_numpy(g), w, rtol=1e-4, atol=1e-5)
    assert 'eval_runtime' in trainer.evaluate(rows)


@each_net
def test_predictions_with_labels_are_logits(name, tmp_path):
    trainer, net, rows, columns = trained(name, tmp_path, labels=True)
    out = trainer.predict(rows)
    assert out.predictions.shape == (7, 3) and out.label_ids.tolist() == columns['labels'].tolist()
    assert trainer.evaluate(rows)['eval_loss'] == pytest.approx(out.metrics['test_loss'])
    assert trainer.train().training_loss > 0


@each_net
def test_what_a_network_cannot_do_is_said_with_advice(name, tmp_path):
    with pytest.raises(AttributeError, match=f'a {name} has no config.*give soft labels'):
        trained(name, tmp_path, labels=True, label_smoothing_factor=0.1)
    said = f'a {name} has no gradient checkpointing.*smaller batches'
    with pytest.raises(ValueError, match=said):
        trained(name, tmp_path, labels=True, gradient_checkpointing=True)[0].train()


tuples = (Agreed, Caps, CapsOut, EMRouted, MatrixCapsOut, Routed, RoutedR, Scores)


@pytest.mark.parametrize('kind', tuples)
def test_a_named_tuple_it_is(kind):
    fields = [torch.full((2,), float(k)) for k in range(len(kind._fields))]
    one, named = kind(*fields), dict(zip(kind._fields, fields))
    assert kind(f for f in fields) == one == kind(**named) == kind._make(fields)
    assert tuple(one) == tuple(fields) and one._asdict() == named
    assert one._replace(**{kind._fields[0]: fields[-1]})[0] is fields[-1]
    mapped = _pytree.tree_map(lambda t: 1 * t, one)
    for two in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one), mapped):
        assert type(two) is kind and all(map(torch.equal, two, one))
    two = torch.utils.data.default_collate([one, one])
    assert type(two) is kind and two[0].shape == (2, 2)
    with pytest.raises(TypeError):
        kind(*fields, None)
