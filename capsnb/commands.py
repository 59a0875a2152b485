"""The commands of `capsnb`: options, and calls of the lab's `train`, `evaluate` and `study`.

Rooms of the library are imported when a command runs (`room`), so that `--help` needs no PyTorch.
Written by hand, no notebook; nbs/lab/58_command_line.ipynb shows what the commands print.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .cli import again, entrance, is_first, room
from .options import fields_of, options_of, with_options
from .study import Studies


def typed(ctx: typer.Context, name: str) -> bool:  # whether an option was given
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == 'COMMANDLINE'


def here_too():
    "Let modules of the current folder be found; none of them takes an installed one's place."
    if '' not in sys.path:
        sys.path.append('')


def leave(what: str, *args, quiet: bool = False):
    "Leave a page beside what is finished, and say where; nothing that goes wrong there is fatal."
    if not is_first():
        return
    try:
        path = getattr(room('lab.hub'), f'leave_{what}')(*args)
    except Exception as e:  # whatever it is: the results are on the disk, and must be told
        return print(f"no page: {e!r}", file=sys.stderr)
    if not quiet:
        print(f"look at {path}")


def told(m: dict, out: Path, trained_on: str = '') -> str:
    "What a finished run found, by its metrics."
    n, found = m['epochs'], f"epoch {m['epochs']}"
    if m['valid_accuracy'] is not None:
        by = ' by loss' if m.get('metric_for_best_model') == 'loss' else ''
        found = f"best of {n} epochs{by}: {m['best_epoch']}; validation {m['valid_accuracy']:.1%}"
    return (
        f"{m['n_params']:,} parameters, {trained_on}{found}, test {m['test_accuracy']:.1%}; "
        f"{m['seconds'] / n:.1f} s per epoch; the network is in {out}"
    )


def still_rising(m: dict) -> bool:
    """Whether what the epoch is chosen by rose from the last quarter but one to a new best: by a
    point of accuracy, or a hundredth of a nat."""
    by, sign = 'valid_accuracy', 1
    if m.get('metric_for_best_model') == 'loss':
        by, sign = 'valid_loss', -1
    v = [sign * row[by] for row in m['history'] if by in row]
    n = len(v) // 4
    rose = sum(v[-n:]) - sum(v[-2 * n : -n]) > 0.01 * n
    return n > 0 and rose and max(v[-n:]) > max(v[:-n])


def draw(task, net: str, out: Path, device: str | None, progress: bool):
    "Draw what the task has to show, and say where it is."
    task.progress = progress
    try:
        network = room('lab.runs').checked_network(out, task.networks[net].cls, device)
        if picture := task.draw(net, network, out):
            print(f"look at {picture}")
    except (ImportError, OSError, ValueError) as e:
        print(f"no picture: {e}", file=sys.stderr)


def changed(task, net: str, lr: float | None, batch_size, bf16: bool, graphs: bool) -> dict:
    "What of the recipe differs; a cycle with another top begins at that top if it is lower."
    changes = dict(batch_size=batch_size, bf16=bf16, torch_compile=graphs)
    changes |= dict(torch_compile_mode='reduce-overhead' if graphs else None)
    if lr is not None:
        low, _ = task.recipe(net)['lr']
        changes |= dict(lr=(min(low, lr), lr))
    return {k: v for k, v in changes.items() if v}


def train(
    ctx: typer.Context,
    *,
    net: str | None = None,  # one of the task's networks ('?' lists them); else the first
    epochs: int | None = None,  # times through the training data; else the recipe's
    lr: float | None = None,  # learning rate, the highest of its cycle; else the recipe's
    batch_size: int | None = None,  # samples of a training step; else the recipe's
    bf16: bool = False,  # products in bfloat16 (autocast): faster where the processor has it
    graphs: bool = False,  # on a GPU: steps are compiled, and replayed as CUDA graphs
    seed: int = 0,  # of the weights, the order of the data and all draws
    seeds: int = 1,  # how many, from --seed on; more than one: each in a folder below --out
    out: Path | None = None,  # folder of the run, from the current one; else runs/NAME there
    start: Path | None = None,  # finished run whose weights to begin with, where they fit
    resume: bool = False,  # go on where an interrupted run in this folder stopped
    overwrite: bool = False,  # replace the run that this folder holds
    device: str | None = None,  # 'cpu', 'cuda' or 'mps'; else the best there is
    progress: bool | None = None,  # draw progress bars; else on a terminal
    as_json: bool = False,  # print one JSON object, and nothing else
    **own,  # options of the task
):
    "Train on a task, say what came out, draw its picture, and leave a page."
    if not progress:
        os.environ['HF_HUB_DISABLE_PROGRESS_BARS'] = '1'  # read when transformers is loaded
    name, how = ctx.info_name, again()
    task = open_task(name, {k: v for k, v in own.items() if typed(ctx, k)})
    last = name.split('@')[0].rstrip('/').replace(':', '/').rsplit('/', 1)[-1]
    out = out or Path('runs', last if ':' not in name or '.' not in last else Path(last).stem)
    tasks, net = room('lab.tasks'), task.known_net(net)
    row = changed(task, net, lr, batch_size, bf16, graphs)
    row |= dict(epochs=epochs, device=device, progress=progress, start=start, how_to_resume=how)
    for column in filter(None, map(own.get, ('image', 'text'))):
        room('lab.own')._column(task.parts.splits['train'], column, name)
    if seeds > 1:
        path, numbers = out / 'runs.json', tuple(range(seed, seed + seeds))
        out.mkdir(parents=True, exist_ok=True)
        kept = dict(runs=out, command=how, settings=settings_of(ctx))
        found = tasks.study(task, {task.name: dict(row, net=net)}, path, numbers, **kept)
        found = found[task.name]
        several = room('lab.runs').headline(room('lab.runs').summary(found))
        print(f"{task.name}, seeds {seed} to {numbers[-1]}: {several}; runs in {out}")
        return room('data.files').read_json(path)
    if task.names:  # read, where it is your own
        given = {k: v for k, v in row.items() if k in task.recipe(net) and v is not None}
        room('lab.train').check_recipe(**task.recipe(net) | given)
        if isinstance(task, room('lab.own').OwnTable):
            print(f"columns: {', '.join(task.read)}")
    room('lab.runs').claim(out, resume, overwrite, command_line=True)
    found = tasks.train(task, net, out, seed, resume=resume, overwrite=overwrite, **row)
    if not is_first():
        return
    whole = 'all training data, ' if 'validation' in task.roles['train'] else ''
    print(f"{name.rpartition(':')[2].rstrip('/')}, {net}, {told(found, out, whole)}")
    if still_rising(found):
        more = f"--overwrite --epochs {2 * found['epochs']}"
        print(f"validation was still rising: train longer, with {more}")
    draw(task, net, out, device, progress)
    leave('run', out)
    return found


def settings_of(ctx: typer.Context) -> dict:  # JSON-ready: what all seeds of a study share
    of_machine = 'seed seeds folder cache on_the_fly in_memory graphs out resume overwrite '
    of_machine += 'device progress as_json'
    asked = {k: v for k, v in ctx.params.items() if k not in of_machine.split()}
    return {k: str(v) if isinstance(v, Path) else v for k, v in asked.items()}


def open_task(name: str, own: dict):  # capsnb.lab.tasks.Task
    "A task with the options that were given; files are looked for before a transformer is loaded."
    if name.startswith(('file:', 'hub:')):
        own |= dict(columns=tuple(own['columns'].split(','))) if 'columns' in own else {}
        return room('lab.own').own_task(name, **own)
    if ':' in name:
        here_too()
    if name == 'sst':
        own = dict(validate=not own.get('published', False)) | own
        own |= dict(cache=False) if own.pop('on_the_fly', False) else {}
        if 'folder' in own:
            room('data.sst').find_sst(own['folder'])
        name = own.pop('task', 'sst5')
    own = preset.get(name, {}) | own
    return room('lab.tasks').with_options(room('lab.tasks').task_named(name), **own)


def on_the_fly(
    *,
    on_the_fly: bool = False,  # run the transformer for every batch; keep no hidden states
): ...


digits = ('lab.tasks:Digits',)
objects = ('lab.objects:Objects',)
photographs = *objects, 'lab.objects:Photographs'
own = tuple(f'lab.own:Own{kind}' for kind in ('Task', 'Pictures', 'Table', 'Texts'))
chosen = """

The epoch that validates best on what was held back is tested once, with --no-validate the last one.
Ctrl-C leaves a checkpoint and says how to go on."""
trained = {  # name -> where its options are, and what it is
    'sst': ('lab.sentiment:Sentiment', on_the_fly, 'The treebank, read by a frozen transformer.'),
    'toys': (*objects, 'Toys that the library draws itself.'),
    'smallnorb': (*objects, 'smallNORB, stereo images of toys.'),
    'norb': (*objects, 'NORB jittered-cluttered: its files, 6 GB.'),
    'eth80': (*photographs, 'ETH-80, photographs of eighty objects from 41 viewpoints.'),
    'digits': (*digits, '8x8 digits, always there.'),
    'mnist': (*digits, 'Its files, or a download.'),
    'fashion-mnist': (*digits, 'Its files, or a download.'),
    'cifar10': (*digits, 'Small photographs in colour: its files, or a download.'),
    'file:…': (*own, 'Pictures, texts or numbers of your own: a file, or a folder.'),
    'hub:…': (*own, 'Pictures, texts or numbers of the Hub.'),
    'module:task': ('A task of your own, in the current folder or installed.',),
}


hidden = 'data crops source origin known white'.split()  # matters of tests and of runs
preset = {'eth80': dict(size=48), 'norb': dict(size=108)}  # beside the fields' own
preset |= {kind: dict(image=None, text=None) for kind in ('file:…', 'hub:…')}


def trainer(name: str):  # a command
    "A sub-command of `capsnb train`: the same for all, and the options of its task."
    *places, said = trained[name]
    own = {}
    for place in places:
        own |= fields_of(place) if isinstance(place, str) else options_of(place)
    own |= {k: own[k].replace(default=v) for k, v in preset.get(name, {}).items()}
    for other in [*hidden, *(['subset', 'official'] if name == 'eth80' else [])]:
        own.pop(other, None)

    def command(ctx, **options):
        return train(ctx, **options)

    command.__doc__ = said + chosen
    return with_options(command, own | options_of(train))


def demo(
    *,
    seed: int = 0,  # of the weights, the order of the data and all draws
    out: Path = Path('runs/demo'),  # folder of picture, report and weights, from the current one
    resume: bool = False,  # go on where an interrupted demo in this folder stopped
    overwrite: bool = False,  # replace the demo that this folder holds
    epochs: int = 24,  # times through the 1,000 training digits
    device: str | None = None,  # 'cpu', 'cuda' or 'mps'; else the best there is
    progress: bool | None = None,  # draw progress bars; else on a terminal
    as_json: bool = False,  # print one JSON object, and nothing else
):
    """Train a small capsule network on real handwritten digits (8x8, from scikit-learn), next to a
    CNN of equal size.

    Prints both accuracies on the last 500 digits, from forms neither was trained on, and draws
    where each class got its score from. No download; one to three minutes of one core. Ctrl-C
    leaves a checkpoint and says how to go on."""
    rooms = room('lab.predict')
    kw = dict(epochs=epochs, device=device, resume=resume, overwrite=overwrite, progress=progress)
    if 'OMP_NUM_THREADS' not in os.environ:  # as fast for small networks, beside others faster
        room('core').need('torch').set_num_threads(1)
    results = rooms.demo(seed, out, how_to_resume=again(), **kw)
    weights = f"capsnb.DStepNet.from_pretrained('{out / 'dstep'}')"
    print(f"\n{rooms.demo_table(results)}\n\nlook at {out / 'picture.png'}; weights: {weights}")
    leave('run', out)
    return results


def confusion_table(names: list, confusion: list) -> str:  # [label][predicted] counts
    "What is taken for what, a line for each label."
    rows = [['label', 'read as', *names]]
    rows += [[name, '', *(f'{n:,}' for n in row)] for name, row in zip(names, confusion)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths = [-w for w in widths[:2]] + widths[2:]  # words stand left, numbers right
    return '\n'.join('  '.join('%*s' % o for o in zip(widths, row)) for row in rows)


def evaluate(
    run: Path,  # folder of a finished run
    *,
    split: str = 'test',  # 'train', 'validation' or 'test'; 'familiar' after train eth80 --by
    encoder: str | None = None,  # where the transformer lies now; else where it lay in training
    folder: Path | None = None,  # of the data, as for train
    cache: Path | None = None,  # folder for hidden states or drawn toys; else the user's cache
    on_the_fly: bool = False,  # run the transformer; keep no hidden states
    crops: int = 1,  # images of objects: the mean over so many views a side
    task: str | None = None,  # the run's, if it is your own: its code is run only if you name it
    as_json: bool = False,  # print one JSON object, and nothing else
    device: str | None = None,  # 'cpu', 'cuda' or 'mps'; else the best there is
    progress: bool | None = None,  # draw progress bars; else on a terminal
):
    "Accuracy of a finished run, and which classes it confuses."
    here_too()
    here = dict(encoder=encoder, folder=folder, cache=False if on_the_fly else cache)
    here |= dict(crops=None if crops == 1 else crops)
    here = {k: v for k, v in here.items() if v is not None}
    here |= dict(device=device, progress=progress, task=task)
    with contextlib.redirect_stdout(sys.stderr):
        e = room('lab.tasks').evaluate(run, split, **here)
    if as_json:
        leave('test', run, e, quiet=True)
        return e
    print(f"{e['split']}: {e['accuracy']:.1%} of {e['n']:,}\n")
    print(confusion_table(e['names'], e['confusion']))
    for angle, found in e.get('by_degrees', {}).items():
        print(f"\nby {angle}: " + ', '.join(f'{d}° {a:.0%}' for d, a in found.items()))
    print()
    leave('test', run, e)


def asked(run: Path, words, encoder: str | None, task: str | None, device: str | None) -> tuple:
    "A run; names of what it is asked about; and that."
    here_too()
    os.environ['HF_HUB_DISABLE_PROGRESS_BARS'] = '1'  # read when transformers is loaded
    if first := next((w for w in words if os.path.isfile(f'{w}/task.json')), None):
        raise ValueError(f"'{first}' is a run: it comes first")
    rooms, here = room('lab.predict'), {} if encoder is None else dict(encoder=encoder)
    loaded, words = rooms.load(run, device, task=task, **here), words or ['-']
    if '-' in words and sys.stdin.isatty():
        print('reading standard input, to its end (Ctrl-D)', file=sys.stderr)
    names, things = rooms.read(loaded, words)
    if loaded.kind == 'rows' and (
        left := [k for k in things.column_names if k in loaded.task.left]
    ):
        print(f"not read, as in training: {', '.join(left)}", file=sys.stderr)
    return loaded, names, things


def predict(
    run: Path,  # folder of a finished run, or its name on the Hub
    words: list[str] = (),  # images, folders; tables; texts, .txt or .csv of them; else -: stdin
    *,
    csv: Path | None = None,  # file for the probabilities of all classes
    html: Path | None = None,  # file of a page that shows them with their answers
    encoder: str | None = None,  # where the transformer lies now, or its name on the Hub
    task: str | None = None,  # the run's, if it is your own: its code is run only if you name it
    device: str | None = None,  # 'cpu', 'cuda' or 'mps'; else the best there is
    progress: bool | None = None,  # draw progress bars; else on a terminal
    as_json: bool = False,  # print one JSON object, and nothing else
):
    """What a finished run takes images, rows of a table or texts for, and how surely.

    Digits and MNIST are white on black: invert what is black on white first."""
    if csv and csv.exists():
        raise ValueError(f"'{csv}' is there already: name another file")
    if html and html.exists() and not room('lab.hub').is_own_page(html):
        raise ValueError(f"'{html}' is somebody's own file, and stays")
    loaded, names, things = asked(run, words, encoder, task, device)
    found = loaded.predict(things, progress)
    if csv:
        p = dict(zip(found.classes, found.p.T.tolist()))
        frame = room('core').need('pandas').DataFrame(p)
        frame.insert(0, 'what', names, allow_duplicates=True)
        frame.insert(1, 'predicted', found.names, allow_duplicates=True)
        csv.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(csv, index=False)
    if html:
        print(f"look at {room('lab.hub').leave_found(html, loaded, names, things, found)}")
    if as_json:
        each = [dict(zip(found.classes, p)) for p in found.p.tolist()]
        return [dict(what=k, predicted=n, p=p) for k, n, p in zip(names, found.names, each)]
    p = found.p.max(1).values.tolist()
    if loaded.kind == 'texts':
        names = [k if len(k) <= 60 else f'{k[:59]}…' for k in names]
    rows = list(zip(map(_plain, names), map(_plain, found.names), p))
    wide = [max(len(row[k]) for row in rows[:50]) for k in (0, 1)]
    for what, name, p in rows[:50]:
        print(f'{what:{wide[0]}s}  {name:{wide[1]}s}  {p:6.1%}')
    if len(rows) > 50:
        print(f'… and {len(rows) - 50:,} more: --html FILE, --csv FILE, or --json')


def _plain(text) -> str:
    "Without what commands a terminal: names may be a stranger's."
    return ''.join(c if c.isprintable() else ' ' for c in str(text))


def explain(
    run: Path,  # folder of a finished run, or its name on the Hub
    words: list[str] = (),  # as for predict
    *,
    html: Path | None = None,  # file of the page; else report_credit.html in the run's folder
    encoder: str | None = None,  # where the transformer lies now, or its name on the Hub
    task: str | None = None,  # the run's, if it is your own: its code is run only if you name it
    device: str | None = None,  # 'cpu', 'cuda' or 'mps'; else the best there is
    as_json: bool = False,  # print one JSON object, and nothing else
):
    """Which places, columns or words speak for an answer: what its class earned there, less the
    mean of the others, in points of the score (capsnet: of length; other routings: of data used).
    And how much of its probability is lost without the most credited tenth, two tenths … half, on
    average, beside as many at random.

    On a terminal words are blue for the answer, red against it; NO_COLOR turns that off."""
    loaded, names, things = asked(run, words, encoder, task, device)
    rooms, coloured = room('lab.predict'), False if 'NO_COLOR' in os.environ else None
    told = rooms.explain(loaded, things, names)
    for e in told:
        most = max((abs(v) for _, v in e.parts), default=0)
        what = ' '.join(_coloured(_plain(word), v, most) for word, v in e.parts)
        what = what if loaded.kind == 'texts' else _plain(e.what)
        lines = [f'{what}: {_plain(e.label)} {e.p:.1%}']
        lines += [f'{v:+9.3f}  {_plain(part)}' for part, v in e.parts]
        lost = 'lost without the most credited tenth to half'
        lines += [f'{lost} {e.lost[0]:.1%}, as many at random {e.lost[1]:.1%}\n']
        typer.echo('\n'.join(lines), color=coloured)  # None: on a terminal
    left = told, [e.image if e.image is None else rooms.drawn(e) for e in told]
    if html:
        print(f"look at {room('lab.hub').leave_credit(html, *left)}")
    elif run.is_dir():
        leave('credit', run / 'report_credit.html', *left)
    places = [None if e.places is None else e.places.tolist() for e in told]
    return [e._asdict() | dict(image=None, places=v) for e, v in zip(told, places)]


def _coloured(word: str, credit: float, most: float) -> str:  # for a terminal
    "Blue for positive, red for negative; bold from half of the strongest on, plain below a tenth."
    share, colour = abs(credit) / most if most else 0, 'blue' if credit > 0 else 'red'
    return word if share < 0.1 else typer.style(word, fg=colour, bold=share >= 0.5 or None)


def push(
    run: Path,  # folder of a finished run
    name: str,  # on the Hub: 'owner/name', or a name of your own; made if absent
    *,
    private: bool = False,  # nobody else may see it
    license: str = 'apache-2.0',  # of the weights
    encoder: str | None = None,  # runs on texts: the transformer's name on the Hub
    token: str | None = None,  # that may write; else that of 'hf auth login', or HF_TOKEN
    task: str | None = None,  # the run's, if it is your own: its code is run only if you name it
    card: Path | None = None,  # write the card into this file, and push nothing
):
    """Push a finished run to the Hugging Face Hub: weights, config, pictures, and a card written
    from the run. A run on texts is pushed as a classifier for transformers' pipelines.

    No folder of this machine is named in it."""
    here_too()
    if task:
        room('lab.tasks').task_named(task)
    hub, how = room('lab.hub'), dict(license=license, encoder=encoder)
    if card:
        text = str(hub.card_of(run, name, **how))
        return print(f'look at {hub.leave_card(card, text)}')
    print(hub.push_run(run, name, private=private or None, token=token, **how))


def bench(
    words: list[str] = (),  # routing, convcaps, capsnet, mixture, matrix_caps, sst, networks, gpu
    *,
    device: str = 'cpu',  # or 'cuda'
    threads: int | None = None,  # of PyTorch; else its own choice
    quick: bool = False,  # one case of each bench, one round, no memory
    out: Path = Path('runs/bench.json'),  # file of the record, from the current folder
    progress: bool | None = None,  # draw progress bars; else on a terminal
):
    "Time and memory of everything fast, side by side with the definition."
    if threads:
        room('core').need('torch').set_num_threads(threads)
    room('lab.speed').bench(tuple(words or ()), out, device, quick, progress=progress)
    print(f'the record is in {out}')


class Tasks(typer.core.TyperGroup):
    "The sub-commands of `capsnb train`; a name with a colon is data or a task of one's own."

    def get_command(self, ctx, name):
        kind, colon, _ = name.partition(':')
        own = f'{kind}:…' if kind in ('file', 'hub') else 'module:task'
        found = super().get_command(ctx, own if colon else name)
        if found is None and os.path.exists(name):
            ctx.fail(f"no task '{name}'; of your own data it is file:{name}")
        return found or ctx.fail(f"no task '{name}'; there are {', '.join(trained)}")


def top(
    version: Annotated[bool, typer.Option('--version', help='Print the version and exit.')] = False,
):
    """Capsule routing, derived in notebooks: mixtures of Gaussians, EM routing, and the D-step."""
    if version:
        print(f'capsnb {__version__}')
        raise typer.Exit()


def list_studies(ctx: typer.Context):
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


commands = {
    'demo': (demo, 'A capsule network and a CNN of equal size on real digits, in minutes.'),
    'eval': (evaluate, 'Accuracy of a finished run, and which classes it confuses.'),
    'predict': (predict, 'What a finished run takes images, rows or texts for.'),
    'explain': (explain, 'Which places, columns or words its answer comes from.'),
    'push': (push, 'Push a finished run to the Hugging Face Hub, with a card.'),
    'bench': (bench, 'Time and memory of everything fast.'),
}


def make_app() -> typer.Typer:
    "The `capsnb` command."
    plain = dict(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
    plain |= dict(context_settings=dict(help_option_names=['-h', '--help']))
    app = typer.Typer(name='capsnb', pretty_exceptions_enable=False, **plain)
    app.callback(invoke_without_command=True)(top)
    for name, (command, short) in commands.items():
        app.command(name, short_help=short)(entrance(with_options(command)))
    said = 'Train a network on a data set; one sub-command for each.'
    app.add_typer(group := typer.Typer(cls=Tasks, help=said, **plain), name='train')
    for name, (*_, short) in trained.items():
        group.command(name, short_help=short)(entrance(trainer(name)))
    said = 'Run a notebook of nbs/studies; one sub-command for each.'
    app.add_typer(study := typer.Typer(cls=Studies, help=said, rich_markup_mode=None), name='study')
    study.callback(invoke_without_command=True)(list_studies)
    return app
