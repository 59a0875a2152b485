"""The toys against an independent renderer, the same bytes everywhere, killed and damaged caches.

What reads well in prose is in nbs/data/33_world.ipynb and nbs/data/34_toys.ipynb.
"""

import ast
import hashlib
import math
import operator
import os
import subprocess
import sys
import threading
from pathlib import Path
import pytest
import torch
from capsnb.data import toys, world as drawn
from capsnb.data.toys import cache_of, draw, instances, load_toys, plan, toys_tensors
from capsnb.data.world import World, build_toy, cast, categories, distance, field
from capsnb.data.world import ground_of, ground_white, lightings, object_pose
from capsnb.data.world import render, view_matrix

root = Path(__file__).resolve().parent.parent
every_toy = pytest.mark.parametrize('category', categories)


pytestmark = pytest.mark.usefixtures('no_machine')


# ---- an independent renderer: every ray against every part in float64, by a library ----


def meet(toy, world, origin, ray):
    "first parameter of rays [n, 3] from origins [n, 3], the normal there, and whether, by parts"
    n = len(ray)
    best, hit = torch.full((n,), math.inf).double(), torch.zeros(n, dtype=torch.bool)
    normal = torch.zeros(n, 3).double()
    for kind, pose, size in zip(toy.kinds, toy.poses, toy.sizes):
        M = world @ pose @ torch.diag(torch.cat([size, torch.ones(1).double()]))
        inv = torch.linalg.inv(M)
        p, d = origin @ inv[:3, :3].T + inv[:3, 3], ray @ inv[:3, :3].T
        ts = []  # (near, far, gradient at near)
        if kind != 'ellipsoid':
            for k in range(3) if kind == 'box' else [2]:
                a, b = (-1 - p[:, k]) / d[:, k], (1 - p[:, k]) / d[:, k]
                g = torch.zeros(n, 3).double()
                g[:, k] = -d[:, k].sign()
                ts.append((torch.minimum(a, b), torch.maximum(a, b), g))
        if kind != 'box':
            keep = torch.tensor([1, 1, float(kind == 'ellipsoid')]).double()
            a, b, c = (d * d * keep).sum(1), (p * d * keep).sum(1), (p * p * keep).sum(1) - 1
            miss, root = b * b < a * c, (b * b - a * c).clamp(min=0).sqrt()
            near = ((-b - root) / a).masked_fill(miss, math.inf)
            far = ((-b + root) / a).masked_fill(miss, -math.inf)
            ts.append((near, far, (p + near[:, None].nan_to_num(0, 0, 0) * d) * keep))
        near, far = torch.stack([t[0] for t in ts]), torch.stack([t[1] for t in ts]).amin(0)
        enter, which = near.max(0)
        g = torch.stack([t[2] for t in ts])[which, torch.arange(n)] @ inv[:3, :3]
        here = enter <= far
        hit |= here
        closer = here & (enter < best)
        best[closer] = enter[closer]
        normal[closer] = g[closer] / g[closer].norm(dim=1, keepdim=True)
    return best, normal, hit


def reference(toy, obj, view, S, lamp, ground, world):
    "grey levels [S, S] before noise and rounding, one ray per pixel"
    pixel = (torch.arange(S).double() + 0.5 - S / 2) * 2 * field / (S * distance)
    y, x = torch.meshgrid(pixel, pixel, indexing='ij')
    ray = torch.stack([x, y, torch.ones(S, S)], -1).view(-1, 3) @ view[:3, :3]
    origin = torch.linalg.inv(view)[:3, 3].expand(len(ray), 3)
    t, n, hit = meet(toy, obj, origin, ray)
    l, paint = lamp.direction, ground_white * (1 - world.contrast)
    floor = origin + ray * ((ground - origin[:, 2]) / ray[:, 2])[:, None]
    dark = meet(toy, obj, floor, l.expand(len(ray), 3))[2]
    on_toy = paint * (lamp.lamp * (n @ l).clamp(min=0) + lamp.sky * (1 + n[:, 2]) / 2)
    on_ground = ground_white * (lamp.sky + torch.where(dark, 0.0, lamp.lamp * l[2]))
    return (torch.where(hit, on_toy, on_ground) * 255).view(S, S)


@every_toy
@pytest.mark.parametrize(
    'instance, azimuth, elevation, code',
    [(0, 0, 30, 3), (4, 140, 45, 1), (7, 260, 70, 5), (9, 20, 30, 0)],
)
def test_the_fast_renderer_draws_what_the_plain_one_draws(
    category, instance, azimuth, elevation, code
):
    toy, obj = build_toy(category, instance), object_pose(category, instance, azimuth)
    world, ground, rows = World(samples=1), ground_of(toy), torch.tensor([[0, code]])
    fast = render(toy, obj[None], [elevation], rows, 64, ground, world)[0].double()
    for eye in (0, 1):
        view = view_matrix(elevation, 2 * eye - 1)
        slow = reference(toy, obj, view, 64, lightings[code], ground, world)
        same = (fast[eye] - slow).abs() <= 0.51
        assert same.double().mean() > 0.997  # a ray that grazes an edge may fall on its other side
        assert (slow.max() - slow.min()) > 80  # there is a toy


def test_samples_are_averaged():
    toy, obj = build_toy('car', 1), object_pose('car', 1, 60)[None]
    rows, ground = torch.tensor([[0, 2]]), ground_of(toy)
    one, two = (
        render(toy, obj, [40], rows, size, ground, World(samples=k))[0].double()
        for size, k in ((96, 1), (48, 2))
    )
    assert (one.unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2)) - two).abs().max() <= 1


# ---- the same bytes everywhere ----


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_single_operations_are_rounded_as_ieee_754_says(dtype):
    "equal bytes rest on this; a float32 result is the rounded float64 one (53 >= 2·24 + 2 bits)"
    raw = [bytearray(hashlib.shake_128(key).digest(8 * 100_003)) for key in (b'x', b'y')]
    x, y = (torch.frombuffer(o, dtype=torch.int64).double() * 2.0**-60 for o in raw)
    x, y = x.to(dtype), y.to(dtype)
    exact = lambda values: torch.tensor(list(values), dtype=torch.float64).to(dtype)
    for name in ('add', 'sub', 'mul', 'truediv'):
        f, pairs = getattr(operator, name), zip(x.tolist(), y.tolist())
        assert f(x, y).equal(exact(f(a, b) for a, b in pairs))
    assert drawn._root(x.abs()).equal(exact(math.sqrt(abs(a)) for a in x.tolist()))


def test_nothing_but_single_operations_and_the_own_root():
    "IEEE 754 says nothing of broken powers and of most of math's functions"
    sources = [Path(o.__file__).read_text(encoding='utf-8') for o in (drawn, toys)]
    used = set()
    for o in ast.walk(ast.parse('\n'.join(sources))):
        if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Pow):
            power = o.right
            assert isinstance(power, ast.Name) or float(ast.literal_eval(power)).is_integer()
        if isinstance(o, ast.Attribute) and isinstance(o.value, ast.Name) and o.value.id == 'math':
            used.add(o.attr)
    assert used <= {'floor', 'fmod', 'inf', 'pi', 'prod', 'sqrt'}  # prod: of whole numbers
    assert drawn._grain_sd == (4 * (256**2 - 1) / 12) ** 0.5


def test_threads_and_batches_change_nothing():
    wanted = dict(category=[2], azimuth=[0, 10], elevation=[0, 5, 8], lighting=[1, 4])
    rows, before = plan('test', wanted), torch.get_num_threads()
    rows = rows[rows[:, 1] == 3][:, 2:]
    try:
        torch.set_num_threads(1)
        one = draw(2, 3, rows, 96)
        torch.set_num_threads(4)
        assert one.equal(draw(2, 3, rows, 96))
    finally:
        torch.set_num_threads(before)
    backwards = draw(2, 3, rows.flip(0), 96)
    assert one.equal(backwards.flip(0)) and one[5].equal(draw(2, 3, rows[5:6], 96)[0])


@pytest.mark.slow
def test_checksum():
    "of twenty-five toys; a change here needs another `toys.version`"
    digest = hashlib.sha256()
    for split in instances:
        rows = plan(split, 50)
        for toy in rows[:, :2].unique_consecutive(dim=0):
            some = rows[(rows[:, :2] == toy).all(1)][:, 2:]
            digest.update(draw(*toy.tolist(), some, 48).numpy().tobytes())
    found = 'a6cd8e6dbd9ef505152d7c479998ea671e94cc2ade7f3106acad60b759521209'
    assert digest.hexdigest() == found


@every_toy
@pytest.mark.parametrize('seed', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_toys_are_sound(category, seed):
    flat = [build_toy(category, i, seed) for i in range(10)]
    for i, toy in enumerate(flat):
        assert len(set(toy.names)) == len(toy.names) >= 6 and (toy.sizes > 0).all()
        R = toy.poses[:, :3, :3]
        torch.testing.assert_close(R @ R.transpose(1, 2), torch.eye(3).double().expand_as(R))
        views = torch.stack([view_matrix(e) for e in (30, 70)])
        for a in (0, 100, 220):  # all of it is in the picture
            pose = object_pose(category, i, a, seed).expand(2, 4, 4)
            there = cast(toy, views, pose, 64)[0].isfinite()
            assert 0.03 < there.double().mean() < 0.6
            assert not there[:, [0, -1]].any() and not there[:, :, [0, -1]].any()
    assert len({(t.kinds, t.sizes.numpy().tobytes()) for t in flat}) == 10  # ten different ones


# ---- the cache ----

tiny = dict(size=16, progress=False)
one_view = dict(azimuth=[4], elevation=[3], lighting=[2])


killed = """
import os, sys
from capsnb.data import toys
one, count = toys.draw, []
def some(*args):
    count.append(1)
    if len(count) == 8: os._exit(9)
    return one(*args)
toys.draw = some
ask = dict(subset=dict(azimuth=[4], elevation=[3], lighting=[2]), workers=1, progress=False)
toys.toys_tensors('train', 16, cache=sys.argv[1], **ask)
"""


@pytest.mark.slow
def test_goes_on_after_a_kill(tmp_path, monkeypatch):
    command = [sys.executable, '-c', killed, str(tmp_path / 'a')]
    env = dict(os.environ, PYTHONPATH=str(root))
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    folder = cache_of('train', 16, plan('train', one_view), 0, World(), tmp_path / 'a')
    assert (n := len(list(folder.glob('*.bin')))) == 7
    (folder / '0-4.bin.0a.tmp').write_text('left by a killed process')
    drawn, draw = [], toys.draw
    monkeypatch.setattr(toys, 'draw', lambda *args: drawn.append(args[:2]) or draw(*args))
    again = toys_tensors('train', subset=one_view, cache=tmp_path / 'a', **tiny)
    assert len(drawn) == 25 - n
    whole = toys_tensors('train', subset=one_view, cache=tmp_path / 'b', **tiny)
    assert again.images.equal(whole.images)
    assert len(list(folder.iterdir())) == 25 == len(list(folder.glob('*.bin')))


def test_two_at_the_same_time(tmp_path, monkeypatch):
    got, drawn, draw = [], [], toys.draw
    monkeypatch.setattr(toys, 'draw', lambda *args: drawn.append(1) or draw(*args))
    ask = dict(split='test', subset=one_view, cache=tmp_path, workers=1, **tiny)
    both = [threading.Thread(target=lambda: got.append(toys_tensors(**ask))) for _ in range(2)]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert len(got) == 2 and got[0].images.equal(got[1].images) and len(drawn) == 25


@pytest.mark.parametrize('where', [0, 40, 200, -1, None])
def test_no_damaged_byte_passes(tmp_path, where):
    ask = dict(split='train', subset=dict(one_view, category=[1]), cache=tmp_path, **tiny)
    toys_tensors(**ask)
    path = cache_of('train', 16, plan('train', ask['subset']), 0, World(), tmp_path) / '1-7.bin'
    raw = bytearray(path.read_bytes())
    if where is not None:
        raw[where] ^= 4
    path.write_bytes(raw[:9] if where is None else raw)
    for load in (toys_tensors, load_toys):
        with pytest.raises(ValueError, match='1-7.bin. is damaged: remove it'):
            load(**ask)


def test_every_question_has_a_place_of_its_own(tmp_path, monkeypatch):
    few, ask = plan('train', 100), ('train', 96, plan('train', 200), 0, World())
    assert cache_of(*ask).parent == tmp_path / 'xdg' / 'capsnb' / 'toys'
    others = [('test', *ask[1:]), ('train', 48, *ask[2:]), ('train', 96, few, 0, World())]
    others += [(*ask[:3], 1, World()), (*ask[:4], World(noise=1.0))]
    assert len({cache_of(*o).name for o in (ask, *others)}) == 6


def test_a_data_set_is_known_again(tmp_path):
    "so what was computed from its rows is found in the cache of datasets"
    ask = dict(size=16, split='train', subset=one_view, cache=tmp_path, progress=False)
    assert load_toys(**ask)._fingerprint == load_toys(**ask)._fingerprint
