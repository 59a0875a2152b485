"""Reverse graphics: probes that must not see the test toys, views that turn."""

import math
from types import SimpleNamespace
import pytest
import torch
from torch.testing import assert_close
from rooms import room

azimuths = list(range(0, 360, 20))


def every(**values):
    grid = torch.cartesian_prod(*(torch.as_tensor(v) for v in values.values()))
    return {k: grid[:, n] for n, k in enumerate(values)}


@pytest.fixture(scope='module')
def study():
    return SimpleNamespace(**room('81_poses'))


@pytest.fixture(scope='module')
def planted(study):
    "Views of two classes: four objects to train on, one to choose by, three that are unknown."
    axes = dict(category=[0, 1], azimuth=azimuths[::2], elevation=[30, 50, 70])
    split = dict(train=[4, 6, 7, 8], validation=[9], test=[0, 1, 2])
    columns = {k: every(instance=v, **axes) for k, v in split.items()}
    torch.manual_seed(0)
    M = torch.randn(5, 12).double()
    truth = {k: study.pose_targets(c) @ M for k, c in columns.items()}
    noise = {k: torch.randn(len(v), 12).double() for k, v in truth.items()}
    return columns, truth, noise


def test_the_own_frame_removes_an_offset_exactly(study, planted):
    columns, truth, _ = planted
    offset = 50 * torch.randn(2, 10, 12).double()  # of every object
    for k, c in columns.items():
        moved = truth[k] + offset[c['category'], c['instance']]
        one, two = study._own_frame(truth[k], c), study._own_frame(moved, c)
        n = len(set(zip(c['category'].tolist(), c['instance'].tolist())))
        assert_close(one[0], two[0], rtol=0, atol=1e-10)
        assert len(one[0]) == len(c['azimuth']) - n  # a reference for each object, not told
        assert ((one[1]['azimuth'] != 0) | (one[1]['elevation'] != 0)).all()


def test_unknown_objects_neither_fit_nor_choose(study, planted):
    "whatever the test split holds, the maps and the setting are the same"
    columns, truth, noise = planted
    mixed = {k: truth[k] + noise[k] for k in truth}
    one = study.probe_pose(mixed, columns)
    two = study.probe_pose(
        mixed | dict(test=torch.cat([mixed['test'], noise['test']])),
        {**columns, 'test': {k: torch.cat([v, v]) for k, v in columns['test'].items()}},
    )
    assert one['setting'] == two['setting'] and one['r2'] != two['r2']
    assert two['sse']['axis'] > one['sse']['axis']
    with pytest.raises(ValueError, match="other instances in 'test' than in 'train'"):
        study.probe_pose(truth, columns | dict(test=columns['train']))


def test_r2_is_scikit_learns_and_its_interval_is_over_objects(study, planted):
    from sklearn.metrics import r2_score

    columns, truth, noise = planted
    Y = study.pose_targets(columns['test'])
    P = Y + 0.3 * torch.randn_like(Y)
    got, how = study._r2(Y, P), dict(multioutput='variance_weighted')
    assert got['azimuth'] == pytest.approx(r2_score(Y[:, :2], P[:, :2], **how))
    assert got['elevation'] == pytest.approx(r2_score(Y[:, 4], P[:, 4]))
    found = study.probe_pose({k: truth[k] + 2 * noise[k] for k in truth}, columns)
    sse, sst = found['sse']['azimuth'], found['sst']['azimuth']
    mean, low, high = study.r2_interval([sse], sst)
    assert mean == pytest.approx(found['r2']['azimuth']) and low < mean < high
    assert study.r2_interval([sse, sse], sst) == pytest.approx((mean, low, high))  # same objects


def test_differences_are_those_of_the_same_objects(study):
    "what objects have in common cancels: unpaired intervals overlap, the paired one does not"
    o = study
    torch.manual_seed(0)
    hard = 20 * torch.rand(25).double()  # some objects are hard for all
    sse = {k: (hard - k + 0.5 * torch.rand(25)).tolist() for k in (0, 2)}
    entry = lambda k: [dict(place='class', probe='linear', frame='world', sse=dict(axis=sse[k]))]
    probes = {f'{who} seed {n}': entry(k) for who, k in (('a', 0), ('b', 2)) for n in (0, 1)}
    record = dict(probes=probes, truth=dict(world=dict(sst=dict(axis=[20.0] * 25))))
    a, b = (o.r2_of(record, who, 'class', 'axis') for who in 'ab')
    assert a[2] > b[1]  # they overlap
    mean, low, high = o.r2_difference(record, ('b', 'class'), ('a', 'class'), 'axis')
    assert mean == pytest.approx(b[0] - a[0]) and 0.08 < low < mean < high < 0.12
    back = o.r2_difference(record, ('a', 'class'), ('b', 'class'), 'axis')
    assert back == pytest.approx((-mean, -high, -low))


def test_turned_views_are_dice_and_are_never_classified(study):
    PairTurns, PoseNet, RoutingNet = study.PairTurns, study.PoseNet, study.RoutingNet
    caps = dict(channels=(6, 6), strides=(2, 2), n_types=3, n_parts=3)
    images = torch.randint(0, 255, (8, 2, 16, 16), dtype=torch.uint8)
    collate, labels = PairTurns(5, 2, 0.0), torch.arange(8) % 5
    deal = lambda draw: collate.on_device(collate(dict(images=images, labels=labels, draw=draw)))
    one, two, held = deal((0, 0, 0)), deal((0, 0, 0)), deal(None)
    assert torch.equal(one['turn'], two['turn']) and not torch.equal(
        one['turn'], deal((0, 1, 0))['turn']
    )
    assert one['turn'].abs().max() <= math.radians(45) and set(held) == {'images', 'labels'}
    torch.manual_seed(0)
    plain = RoutingNet(5, 2, **caps)
    for wish in ({}, dict(equi=1.0), dict(decoder=(8,), recon=0.1)):
        net = PoseNet(5, 2, 16, **wish, caps=caps)
        net.load_state_dict(plain.state_dict(), strict=False)
        same = plain.eval()(**held)['loss']
        assert_close(net.eval()(**held)['loss'], same)  # validation knows no wish
        if wish:
            assert net.train()(**one)['loss'] > plain.train()(one['images'], one['labels'])['loss']
    with pytest.raises(ValueError, match='needs turn and move'):
        PoseNet(5, 2, 16, equi=1.0, caps=caps)(**held)
    with pytest.raises(ValueError, match='has no decoder'):
        net.__class__(5, 2, 16, caps=caps).draw(torch.zeros(1, 5, 4, 4), torch.zeros(1, 5))
