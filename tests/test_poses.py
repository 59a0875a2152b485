"""Reverse graphics: grids with holes, known rotations, probes that must not see the test toys."""

import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.lab.inspect import (
    Flat,
    Watched,
    check_novel,
    class_pose,
    features_of,
    in_degrees,
    in_batches,
    mds_path,
    plot_change,
    plot_paths,
    plot_sheet,
    pose_change,
    poses_of,
    probe_viewpoint,
    r_squared,
    reach,
    ridge_by_class,
    viewpoint_grid,
    viewpoint_targets,
)
from capsnb.lab.vision import BaselineCNN, PlainCNN, SmallNORBNet, norb_trunk

azimuths = list(range(0, 360, 20))


def every(**values):
    grid = torch.cartesian_prod(*(torch.as_tensor(v) for v in values.values()))
    return {k: grid[:, n] for n, k in enumerate(values)}


def world(instance=(0, 1, 2), category=(0, 1), elevation=(30, 50, 70), lighting=(0, 3)):
    return every(
        category=category,
        instance=instance,
        elevation=elevation,
        azimuth=azimuths,
        lighting=lighting,
    )


def rotations(degrees, h=2):
    a = degrees.double().deg2rad()
    R = torch.zeros(len(a), 2, h, dtype=torch.float64)
    R[:, 0, 0] = R[:, 1, 1] = a.cos()
    R[:, 1, 0] = a.sin()
    R[:, 0, 1] = -a.sin()
    return R


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(['azimuth', 'elevation']))
def test_a_grid_does_not_depend_on_the_order_of_the_images(seed, vary):
    columns = world()
    n = len(columns['azimuth'])
    code = (
        columns['category'] * 10**7
        + columns['instance'] * 10**6
        + columns['elevation'] * 10**4
        + columns['azimuth'] * 10
        + columns['lighting']
    )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    g = viewpoint_grid(
        code[order], {k: v[order] for k, v in columns.items()}, vary, dict(lighting=3)
    )
    for t, (c, i) in enumerate(g.toys.tolist()):
        for v, view in enumerate(g.views.tolist()):
            az, el = (view, 30) if vary == 'azimuth' else (0, view)
            assert g.x[t, v].item() == c * 10**7 + i * 10**6 + el * 10**4 + az * 10 + 3


def test_a_grid_of_lists_and_of_an_incomplete_world():
    columns = {k: v.tolist() for k, v in world(lighting=(0,)).items()}
    assert viewpoint_grid(torch.zeros(324, 2), columns).x.shape == (6, 18, 2)
    with pytest.raises(ValueError, match='323, got .324'):
        viewpoint_grid(torch.zeros(323), columns)
    some = [
        k for k in range(324) if not (columns['instance'][k] == 2 and columns['category'][k] == 1)
    ]  # a toy less: no hole
    assert (
        len(
            viewpoint_grid(
                torch.zeros(len(some)), {k: [v[n] for n in some] for k, v in columns.items()}
            ).toys
        )
        == 5
    )


@pytest.mark.parametrize(
    'kw, what',
    [
        (dict(vary='lighting'), "vary must be 'azimuth' or 'elevation', got 'lighting'"),
        (dict(at=dict(azimuth=3)), 'got azimuth'),
        (dict(at=dict(colour=3)), 'at can hold .*got colour'),
        (dict(at=dict(lighting=9)), "no image is at .*'lighting': 9.0"),
    ],
)
def test_wrong_grids(kw, what):
    with pytest.raises(ValueError, match=what):
        viewpoint_grid(torch.zeros(648), world(), **kw)


def test_change_of_a_rotation_and_of_a_stretch():
    a = torch.tensor(azimuths)
    poses = torch.stack([rotations(a), 3 * rotations(a + 77)])  # size and start do not matter
    c, want = pose_change(poses), a.double().deg2rad()[None, :, None].expand(2, 18, 2)
    assert_close(c.distance, 2 * (want / 2).sin().abs())
    assert_close(c.cosine, want.cos())
    assert_close(c.norm, torch.ones(2, 18, 2).double())
    s = torch.linspace(1, 3, 5)
    stretched = pose_change((s[:, None, None] * torch.ones(1, 3))[None].expand(1, 5, 1, 3))
    assert_close(stretched.distance[0, :, 0], s - 1)
    assert_close(stretched.norm[0, :, 0], s)
    assert_close(stretched.cosine[0, :, 0], torch.ones(5))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 5))
def test_change_does_not_depend_on_the_frame(seed, c, h):
    g = torch.Generator().manual_seed(seed)
    poses = torch.randn(3, 6, c, h, generator=g, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(h, h, generator=g, dtype=torch.float64)).Q
    for x, y in zip(pose_change(poses), pose_change(7 * poses @ Q)):
        assert_close(x, y)


@pytest.mark.parametrize('poses', [torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), math.nan)])
def test_change_from_nothing(poses):
    with pytest.raises(ValueError, match='other than 0 at the first'):
        pose_change(poses)


def test_change_of_one_toy_needs_its_row():
    with pytest.raises(ValueError, match=r'\[toys, views, c, h\], got shape \(3, 2, 2\)'):
        pose_change(torch.ones(3, 2, 2))


@pytest.mark.parametrize('h', [1, 2, 4])
def test_mds_keeps_distances_that_fit_into_the_plane(h):
    x = rotations(torch.tensor(azimuths), max(h, 2))[..., :h]
    flat, p = mds_path(x), x.flatten(0, 1)
    y = flat.xy.flatten(0, 1)
    assert flat.stress < 1e-5 and flat.xy.shape == (18, 2, 2)
    assert_close((y[:, None] - y).norm(dim=-1), (p[:, None] - p).norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_mds_says_what_it_loses_and_repeats():
    torch.manual_seed(0)
    x = torch.randn(9, 4, 4)
    one, two = mds_path(x), mds_path(x.clone().requires_grad_())
    assert 0.05 < one.stress < 0.6
    assert_close(one.xy, two.xy, rtol=0, atol=0)
    p = x.double().flatten(0, 1)
    D = torch.cdist(p, p)
    y = one.xy.flatten(0, 1)
    U, S, _ = torch.linalg.svd(p - p.mean(0), full_matrices=False)
    stress = lambda y: ((torch.cdist(y, y) - D).square().sum() / D.square().sum()).sqrt().item()
    assert one.stress == pytest.approx(stress(y), rel=1e-4) and one.stress < stress(
        (U * S)[:, :2]
    )  # better than two principal axes


def test_mds_of_a_point():
    with pytest.raises(ValueError, match='all are the same'):
        mds_path(torch.ones(3, 2, 4))
    with pytest.raises(ValueError, match=r'one toy, got shape \(1, 3, 2, 4\)'):
        mds_path(torch.ones(1, 3, 2, 4))
    broken = torch.randn(5, 2, 4)
    broken[1, 0, 3], broken[4] = float('nan'), float('inf')
    with pytest.raises(ValueError, match='finite poses, got NaN or inf in 2 of 5 views'):
        mds_path(broken)


def splits():
    return {
        k: world(instance, lighting=(0,))
        for k, instance in dict(train=(4, 6, 7, 8), validation=(9,), test=(0, 1, 2, 3, 5)).items()
    }


def test_a_probe_of_the_truth_and_of_its_linear_images():
    torch.manual_seed(0)
    M, s = torch.randn(3, 16).double(), splits()
    for f in (viewpoint_targets, lambda c: viewpoint_targets(c) @ M + 5):
        p = probe_viewpoint({k: f(c) for k, c in s.items()}, s)
        assert all(r > 1 - 1e-6 for r in p.r2.values()) and p.degrees < 0.1
    swapped = probe_viewpoint(
        {
            k: viewpoint_targets(c) * torch.where(c['category'] == 0, 1, -2)[:, None]
            for k, c in s.items()
        },
        s,
    )
    assert min(swapped.r2.values()) > 1 - 1e-6  # each class has its own map


def test_a_probe_turned_in_the_test_is_off_by_that_angle():
    s = splits()
    turn = {k: dict(c, azimuth=c['azimuth'] + (90 if k == 'test' else 0)) for k, c in s.items()}
    p = probe_viewpoint({k: viewpoint_targets(c) for k, c in turn.items()}, s)
    assert p.degrees == pytest.approx(90, abs=0.1) and p.r2['sin azimuth'] == pytest.approx(
        -1, abs=1e-2
    )


def test_the_ridge_is_chosen_on_validation_and_never_on_test():
    "noise features: only the strongest ridge does not hurt; the test split changes nothing"
    torch.manual_seed(0)
    s = splits()
    X = {k: torch.randn(len(c['azimuth']), 100) for k, c in s.items()}
    p = probe_viewpoint(X, s)
    assert p.alpha == 10.0 and abs(p.r2['sin azimuth']) < 0.2
    alphas = {
        probe_viewpoint({**X, 'test': f}, s).alpha
        for f in (X['test'], viewpoint_targets(s['test']).repeat(1, 34)[:, :100])
    }
    assert alphas == {10.0}
    wide = {
        k: viewpoint_targets(c)
        @ torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).double()
        for k, c in s.items()
    }
    assert probe_viewpoint(wide, s).alpha == 1e-6
    fitted = ridge_by_class(
        X['train'].double(), viewpoint_targets(s['train']), s['train']['category'], 1.0
    )
    one, two = (
        fitted(x, s['test']['category'])
        for x in (X['test'].double(), torch.cat([X['test'][:1], 0 * X['test'][1:]]).double())
    )
    assert_close(one[0], two[0])  # a prediction does not look at its neighbours


def test_toys_must_be_novel():
    s = splits()
    check_novel(s)
    with pytest.raises(
        ValueError,
        match=r"other instances in 'validation' than in 'train', "
        r"got \(category, instance\) \[\(0, 4\), \(1, 4\)\]",
    ):
        check_novel({**s, 'validation': world((4, 9), lighting=(0,))})
    with pytest.raises(ValueError, match="in 'test' than in 'train'"):
        probe_viewpoint({}, {**s, 'test': s['train']})
    only = {**s, 'validation': world((4,), category=(2,))}
    check_novel(only)  # instance 4 of another category is another toy


def test_probes_need_views_and_classes():
    s = {k: {**c, 'elevation': c['elevation'] * 0 + 30} for k, c in splits().items()}
    with pytest.raises(ValueError, match='several azimuths and elevations'):
        probe_viewpoint({k: viewpoint_targets(c) for k, c in s.items()}, s)
    s = splits()
    s['test'] = world((0,), category=(0, 7), lighting=(0,))
    with pytest.raises(ValueError, match=r'expected classes \[0, 1\], got \[7\]'):
        probe_viewpoint({k: viewpoint_targets(c) for k, c in s.items()}, s)


def test_r_squared_is_scikit_learns():
    from sklearn.metrics import r2_score

    torch.manual_seed(0)
    Y, P = torch.randn(2, 50, 3).double()
    assert_close(
        r_squared(Y, P), torch.tensor(r2_score(Y.numpy(), P.numpy(), multioutput='raw_values'))
    )


@pytest.mark.parametrize('batch_size', [1, 3, 100])
@pytest.mark.parametrize('training', [True, False])
def test_batches(batch_size, training):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (7, 2, 32, 30), dtype=torch.uint8)
    for net in (
        SmallNORBNet(5, 4, 4).double(),
        BaselineCNN(size=(32, 30)),
        PlainCNN(5, **norb_trunk(4)),
    ):
        net.train(training)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        dtype = next(net.parameters()).dtype
        f = (
            (lambda x: poses_of(net, x, batch_size).mu)
            if isinstance(net, SmallNORBNet)
            else (lambda x: features_of(net, x, batch_size))
        )
        got = f(images)
        assert_close(f(images.to(dtype) / 255), got)
        for k, v in net.state_dict().items():
            assert_close(v, before[k], rtol=0, atol=0)  # batch norm has learned nothing
        assert net.training == training and not got.requires_grad
        whole = net.eval()
        with torch.no_grad():
            want = (
                whole(images.to(dtype) / 255).mu
                if isinstance(net, SmallNORBNet)
                else whole.features(images.to(dtype) / 255)
            )
        assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_batches_of_nothing_and_a_network_that_fails():
    net = PlainCNN(5, **norb_trunk(4)).train()
    with pytest.raises(ValueError, match='at least one image'):
        features_of(net, torch.zeros(0, 2, 32, 32))
    with pytest.raises(ValueError, match='batch_size of at least 1, got 2 and 0'):
        in_batches(net.features, net, torch.zeros(2, 2, 32, 32), 0)
    with pytest.raises(ValueError, match='at least 29'):
        features_of(net, torch.zeros(2, 2, 16, 16))
    assert net.training  # left as it came


def test_the_activated_capsule():
    torch.manual_seed(0)
    net = SmallNORBNet(5, 4, 4)
    p = poses_of(net, torch.rand(6, 2, 32, 32))
    category = [4, 0, 1, 1, 3, 2]
    assert_close(class_pose(p, category), torch.stack([p.mu[n, c] for n, c in enumerate(category)]))
    assert_close(class_pose(p), torch.stack([p.mu[n, p.a[n].argmax()] for n in range(6)]))


def test_plots_show_what_they_are_given():
    import matplotlib

    matplotlib.use('Agg')
    a = torch.tensor(azimuths)
    change = pose_change(torch.stack([rotations(a), rotations(-2 * a), 2 * rotations(a)]))
    fig = plot_change(change, a)
    assert len(fig.axes) == 6 and all(
        len(ax.lines) == 4 for ax in fig.axes
    )  # three toys and their mean
    assert_close(
        torch.as_tensor(fig.axes[1].lines[-1].get_ydata()), change.distance[..., 1].mean(0)
    )
    assert_close(torch.as_tensor(fig.axes[4].lines[1].get_ydata()), change.cosine[1, :, 0])
    fig = plot_paths({'one': mds_path(rotations(a)), 'two': Flat(torch.zeros(3, 4, 2), 0.5)})
    assert [len(ax.lines) for ax in fig.axes] == [18, 3] and 'stress 0.50' in fig.axes[
        1
    ].get_title()
    columns = world(lighting=(0,))
    images = torch.arange(324)[:, None, None, None].expand(324, 2, 4, 6).to(torch.uint8)
    fig = plot_sheet(images, columns, instance=1, step=6, names=('cow', 'car'))
    assert (
        len(fig.axes) == 6
        and fig.axes[3].get_ylabel() == 'car'
        and fig.axes[2].get_title() == '240°'
    )
    assert fig.axes[0].images[0].get_array().shape == (4, 12)
    with pytest.raises(ValueError, match=r'no toy is instance 8; there are \[0, 1, 2\]'):
        plot_sheet(images, columns, instance=8)
    matplotlib.pyplot.close('all')


def test_a_missing_image_or_a_second_one_is_an_error():
    columns = world()
    n = len(columns['azimuth'])
    for rows in (torch.arange(1, n), torch.cat([torch.arange(n), torch.tensor([0])])):
        with pytest.raises(ValueError, match='expected one image for each of 6 toys from each'):
            viewpoint_grid(torch.zeros(len(rows)), {k: v[rows] for k, v in columns.items()})


@pytest.mark.parametrize('vary, codes', [('azimuth', range(0, 36, 2)), ('elevation', range(9))])
def test_codes_do_not_pass_for_degrees(vary, codes):
    with pytest.raises(ValueError, match=f'{vary}: expected degrees, got the codes'):
        in_degrees(torch.tensor(list(codes)), vary)
    assert in_degrees(torch.tensor([30, 50]), vary).tolist() == [30, 50]


def test_reach_holds_a_share_of_the_data():
    distance = torch.tensor([1.0, 2.0, 3.0, 10.0]).view(1, 1, 4, 1)
    weight = torch.tensor([0.5, 0.3, 0.19, 0.01]).view(1, 1, 4, 1)
    w = Watched(distance, weight, None, None, None)
    assert reach(w) == 3 and reach(w, 0.5) == 1 and reach(w, 1.0) == 10
