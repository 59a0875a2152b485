"""The commands of `capsnb`: options, and calls of the lab's `train`, `evaluate` and `study`.

Rooms of the library are imported when a command runs (`room`), so that `--help` needs no PyTorch.
Written by hand, no notebook; nbs/lab/58_command_line.ipynb shows what the commands print.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .cli import at_home, entrance, is_first, plainly, room
from .study import Studies


def option(
    help: str,  # one sentence or two
    *names: str,  # on the command line; none: the parameter's
    **more,  # of `typer.Option`
):  # typer's description of an option
    "An option whose default is not shown when there is none to show."
    return typer.Option(*names, help=help, **more)


def unset(
    help: str,  # what happens where it is not given
    *names: str,  # on the command line; none: the parameter's
    **more,  # of `typer.Option`
):  # typer's description of an option
    "An option that may be left out."
    return typer.Option(*names, help=help, show_default=False, **more)


# Options of several commands
Seed = Annotated[
    int, option('Seed of the weights, the order of the data and all draws.', min=0, max=2**32 - 1)
]
Epochs = Annotated[
    int | None, unset("Times through the training data; the recipe's if not given.", min=1)
]
Rate = Annotated[
    float | None,
    unset("Learning rate, the highest of its cycle; the recipe's if not given.", '--lr'),
]
Half = Annotated[
    bool,
    option('Products in bfloat16 (autocast): faster where the processor has it.', '--bf16'),
]
Graphs = Annotated[
    bool,
    option(
        'On a GPU: compile, and replay steps as CUDA graphs (torch.compile); texts: --in-memory.',
        '--graphs',
    ),
]
BatchSize = Annotated[
    int | None, unset("Samples of a training step; the recipe's if not given.", min=1)
]
Device = Annotated[str | None, unset("'cpu', 'cuda' or 'mps'; the best there is if not given.")]
Progress = Annotated[
    bool | None, typer.Option(show_default='on a terminal', help='Draw progress bars.')
]
Resume = Annotated[
    bool, option('Go on where an interrupted run in this folder stopped.', '--resume')
]
Overwrite = Annotated[bool, option('Replace the run that this folder holds.', '--overwrite')]
Start = Annotated[
    Path | None, unset('Folder of a finished run whose weights to begin with, where they fit.')
]
AsJson = Annotated[bool, option('Print one JSON object, and nothing else.', '--json')]
Out = Annotated[
    Path | None,
    typer.Option(
        show_default='runs/<data set>',
        help='Folder for metrics.json, report.html, task.json and the network; made if missing.',
    ),
]
Data = Annotated[
    Path | None, unset('Folder of the files; else CAPSNB_DATA, or a download.', '--data')
]
AnyFiles = Annotated[
    bool, option('The files need not be the official ones, only in their format.', '--any-files')
]
Pairs = Annotated[
    int | None,
    unset('Toys, NORB: only so many pairs of each split; all if not given.', min=10),
]
ToyCache = Annotated[Path | None, unset("Toys: folder for drawn pictures; else the user's cache.")]
Size = Annotated[int, option('Pixels per side (smallNORB has 96).', min=29)]
Validate = Annotated[
    bool,
    option(
        'Choose the epoch on instance 9; if not, train on that one too and keep the last epoch.'
    ),
]


Named = Annotated[
    str | None,
    unset('The task of the run, if it is your own: its code is executed only when you name it.'),
]


def again(
    ctx: typer.Context,  # of a command
) -> str:  # a command to copy
    "The command that goes on with an interrupted run: as it was typed, and --resume."
    words = ['capsnb', *ctx.command_path.split()[1:]]
    for p in ctx.command.params:
        source = ctx.get_parameter_source(p.name)
        if p.name in ('resume', 'overwrite') or source is None or source.name != 'COMMANDLINE':
            continue
        value = ctx.params[p.name]
        if getattr(p, 'is_flag', False):
            words.append((p.opts if value else p.secondary_opts)[0])
        else:
            words += [p.opts[0], str(at_home(value))]
    return shlex.join([*words, '--resume'])


def told(
    out: Path,  # folder of a finished run
    trained_on: str = '',  # what, if that must be said
) -> str:  # a sentence
    "What a finished run found; `ValueError` when its metrics.json is damaged."
    numbers = dict(n_params=int, epochs=int, best_epoch=int, test_accuracy=float, seconds=float)
    kinds = dict(numbers, valid_accuracy=(float, None))
    m = room('data.files').read_json(out / 'metrics.json', **kinds)
    n, valid = m['epochs'], m['valid_accuracy']
    if n < 1:
        raise ValueError(f"'{out}/metrics.json' is damaged: expected an epoch, got {n}")
    found = f"epoch {n}"
    if valid is not None:
        found = f"best of {n} epochs: {m['best_epoch']}; validation {valid:.1%}"
    return (
        f"{m['n_params']:,} parameters, {trained_on}{found}, test {m['test_accuracy']:.1%}; "
        f"{m['seconds'] / n:.1f} s per epoch; the network is in {out}"
    )


def train_task(
    ctx: typer.Context,  # of the command
    task,  # capsnb.lab.tasks.Task
    net: str | None,  # a name of its networks; None: the first
    out: Path,  # folder of the run
    *,
    seed: int,  # of everything
    epochs: int | None,  # None: the recipe's
    lr: float | None,  # at the top of its cycle; None: the recipe's
    batch_size: int | None,  # of a training step; None: the recipe's
    bf16: bool,  # whether products are taken in bfloat16
    graphs: bool,  # whether steps are compiled into CUDA graphs
    device: str | None,  # None: the best there is
    resume: bool,  # go on where a run stopped
    overwrite: bool,  # replace the run that the folder holds
    start: Path | None,  # a finished run to begin with
    progress: bool,  # whether to draw bars
) -> dict | None:  # as in metrics.json; None in other processes than the first
    "Train on a task, say what came out, draw its picture, and leave a page."
    tasks, how = room('lab.tasks'), again(ctx)
    if not progress:
        room('lab.train').quiet_transformers().utils.logging.disable_progress_bar()

    def work():
        room('lab.runs').claim(out, resume, overwrite, command_line=True)
        found = tasks.train(
            task,
            net,
            out,
            seed,
            epochs=epochs,
            device=device,
            resume=resume,
            overwrite=overwrite,
            start=start,
            progress=progress,
            how_to_resume=how,
            **changed(task, net, lr, batch_size, bf16, graphs),
        )
        if not is_first():
            return
        net_ = task.known_net(net)
        whole = 'all training data, ' if 'validation' in task.roles['train'] else ''
        print(f"{task.name}, {net_}, {told(out, whole)}")
        picture = draw(task, net_, out, device, progress)
        leave('run', out, (picture,) if picture else ())
        return found

    return plainly(work, how)


def changed(
    task,  # capsnb.lab.tasks.Task
    net: str | None,  # a name of its networks; None: the first
    lr: float | None,  # at the top of its cycle; None: the recipe's
    batch_size: int | None,  # of a training step; None: the recipe's
    bf16: bool,  # whether products are taken in bfloat16
    graphs: bool,  # whether steps are compiled into CUDA graphs
) -> dict:  # what of the recipe differs
    "A cycle with another top begins and ends where it did, or at that top if it is lower."
    changes = {} if batch_size is None else dict(batch_size=batch_size)
    changes |= dict(bf16=True) if bf16 else {}
    changes |= dict(torch_compile=True, torch_compile_mode='reduce-overhead') if graphs else {}
    if lr is None:
        return changes
    low, _ = task.recipe(task.known_net(net))['lr']
    return changes | dict(lr=(min(low, lr), lr))


def leave(
    what: str,  # 'run', 'test', 'words' or 'study': the page of capsnb.lab.pages
    *args,  # of the function that leaves it
    quiet: bool = False,  # whether to say nothing of a page that was left
    **more,  # of that function
):
    "Leave a page beside what is finished, and say where; nothing that goes wrong there is fatal."
    if not is_first():
        return
    try:
        path = getattr(room('lab.pages'), f'leave_{what}')(*args, **more)
    except Exception as e:  # whatever it is: the results are on the disk, and must be told
        why = str(e) if isinstance(e, (ImportError, OSError, ValueError)) else repr(e)
        return print(f"no page: {why}", file=sys.stderr)
    if not quiet:
        print(f"look at {path}")


def leave_study(
    path: Path,  # of the record
    told: str,  # what the study says of its numbers
    pictures: tuple = (),  # paths of what it drew
) -> dict:  # the record
    "Leave a study's page; the record is for other programs."
    leave('study', path, told, pictures)
    return room('data.files').read_json(path)


def draw(
    task,  # capsnb.lab.tasks.Task
    net: str,  # a name of its networks
    out: Path,  # folder of a finished run
    device: str | None,  # None: the best there is
    progress: bool,  # whether to draw bars
) -> Path | None:  # of the picture
    "Draw what the task has to show, and say where it is."
    task.progress = progress
    cls = task.networks[net].cls
    try:
        network = room('lab.runs').checked_network(out, cls, device)
        picture = task.draw(net, network, out)
    except (ImportError, OSError, ValueError) as e:
        return print(f"no picture: {e}", file=sys.stderr)
    if picture:
        print(f"look at {picture}")
    return picture


def train_digits(
    ctx: typer.Context,
    net: Annotated[
        str,
        option(
            "'capsnet': dynamic routing, with a decoder; 'dstep': Heinsen (2019); 'matrix-caps': "
            "EM routing; 'cnn': as large as the D-step network; 'baseline': a larger CNN; "
            "'matrix-caps-norb': EM routing on the D-step network's convolutions; 'routing', "
            "'plain': the D-step network with another routing, or without capsules; 'efficient': "
            "Efficient-CapsNet (28x28 only)."
        ),
    ] = 'capsnet',
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    limit: Annotated[
        int | None,
        unset('Only so many training pictures, of validation at most a third.', min=1),
    ] = None,
    test_limit: Annotated[
        int | None, unset('Only so many test pictures, for eval too; all if not given.', min=1)
    ] = None,
    out: Out = None,
    data: Data = None,
    any_files: AnyFiles = False,
    validate: Annotated[
        bool,
        option(
            'Choose the epoch on pictures held back; if not, train on those too and keep the '
            'last epoch (not cifar10).'
        ),
    ] = True,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Small pictures: digits (scikit-learn's, 8x8), MNIST, Fashion-MNIST, CIFAR-10.

    Keeps the epoch that validates best on training pictures held back (with --no-validate the
    last one), and tests it once. Ctrl-C leaves a checkpoint and says how to go on."""
    name = ctx.info_name
    few = dict(limit=limit, n_test=test_limit, official=not any_files, folder=data)
    few |= {} if validate else dict(validate=False)
    tasks = room('lab.tasks')
    task = tasks.with_options(tasks.task_named(name), **few)
    if limit and not test_limit and name != 'digits' and is_first():
        print(
            "the test takes all pictures, however few are trained on; for a trial, "
            "--test-limit 500 saves minutes",
            file=sys.stderr,
        )
    out = out or Path('runs', name)
    usual = dict(seed=seed, epochs=epochs, device=device, resume=resume, overwrite=overwrite)
    usual |= dict(lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    return train_task(ctx, task, net, out, progress=progress, **usual)


def train_objects(
    ctx: typer.Context,
    net: Annotated[
        str,
        option(
            "'dstep': the paper's network; 'cnn': a CNN as large; 'baseline': the baseline CNN of "
            "Hinton et al. (2018); 'matrix-caps': its matrix capsules, best with --size 48; "
            "'matrix-caps-norb': those on the convolutions of 'dstep', normed; 'capsnet': that of "
            "Sabour et al. (2017)."
        ),
    ] = 'dstep',
    size: Annotated[
        int | None, unset('Pixels per side; 96, of NORB 108, if not given.', min=29)
    ] = None,
    pairs: Pairs = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    out: Out = None,
    data: Data = None,
    cache: ToyCache = None,
    as_published: Annotated[
        bool,
        option(
            "As published: learning rate, floor of the variances and start of beta of 'dstep', "
            "patches for 'baseline', width of 'capsnet'.",
            '--as-published',
        ),
    ] = False,
    validate: Validate = True,
    any_files: AnyFiles = False,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Stereo pictures of objects: toys that the library draws itself, smallNORB, or NORB.

    Keeps the epoch that validates best on instances held back (with --no-validate the last one),
    tests it once, and draws how poses move. Ctrl-C leaves a checkpoint and says how to go on."""
    tasks, options = room('lab.tasks'), dict(subset=pairs, published=as_published)
    options |= {} if size is None else dict(size=size)
    options |= dict(official=not any_files, validate=validate, folder=data, cache=cache)
    task = tasks.with_options(tasks.task_named(ctx.info_name), **options)
    out = out or Path('runs', ctx.info_name)
    usual = dict(seed=seed, epochs=epochs, device=device, resume=resume, overwrite=overwrite)
    usual |= dict(lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    return train_task(ctx, task, net, out, progress=progress, **usual)


def train_photographs(
    ctx: typer.Context,
    net: Annotated[
        str,
        option(
            "'dstep': the paper's network; 'cnn': a CNN as large; 'baseline': the baseline CNN of "
            "Hinton et al. (2018); 'matrix-caps': its matrix capsules, best with --size 48; "
            "'matrix-caps-norb': those on the convolutions of 'dstep', normed; 'capsnet': that of "
            "Sabour et al. (2017)."
        ),
    ] = 'dstep',
    size: Annotated[int, option('Pixels per side, at most those of the files.', min=29)] = 48,
    colour: Annotated[bool, option('Colour; grey if not given.', '--colour')] = False,
    background: Annotated[
        str, option("'kept', 'masked' (grey) or 'replaced' (coloured noise).")
    ] = 'kept',
    fold: Annotated[int, option('Which objects to test.', min=0)] = 0,
    folds: Annotated[
        int, option('10: one object of each category is tested; 5: two; 2: half of them.')
    ] = 10,
    by: Annotated[
        str | None,
        unset("'azimuth' or 'polar': train on familiar viewpoints, test on novel ones."),
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    out: Out = None,
    data: Annotated[Path | None, unset('Folder of the photographs; else CAPSNB_DATA.')] = None,
    cache: Annotated[
        Path | None, unset("Folder for the packed copy; if not given, the user's cache.")
    ] = None,
    as_published: Annotated[
        bool,
        option(
            "As published: learning rate, floor of the variances and start of beta of 'dstep', "
            "patches for 'baseline'.",
            '--as-published',
        ),
    ] = False,
    validate: Annotated[
        bool,
        option(
            'Choose the epoch on one object of each category; if not, train on those too and '
            'keep the last epoch.'
        ),
    ] = True,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """ETH-80: photographs of eighty objects from 41 viewpoints.

    Keeps the epoch that validates best on objects held back (with --no-validate the last one),
    tests it once on others, and draws how poses move. Ctrl-C leaves a checkpoint and says how to
    go on."""
    options = dict(size=size, colour=colour, background=background, fold=fold, folds=folds, by=by)
    options |= dict(published=as_published, validate=validate, folder=data, cache=cache)
    task = room('lab.photographs').Photographs(**options)
    out = out or Path('runs', ctx.info_name)
    usual = dict(seed=seed, epochs=epochs, device=device, resume=resume, overwrite=overwrite)
    usual |= dict(lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    return train_task(ctx, task, net, out, progress=progress, **usual)


def train_sst(
    ctx: typer.Context,
    task: Annotated[
        str, option("'sst5': five labels; 'sst2': negative or positive, neutral ones left out.")
    ] = 'sst5',
    encoder: Annotated[
        str, option('The frozen transformer: a name on the Hub, or a folder.')
    ] = 'gpt2-large',
    gguf: Annotated[str | None, unset('Name of a GGUF file in that folder.')] = None,
    revision: Annotated[str | None, unset('Commit, branch or tag on the Hub.')] = None,
    net: Annotated[
        str,
        option(
            "'sstnet': two routings (Heinsen 2019); 'vectors': three vector routings (Heinsen "
            "2022); 'plain': attention pooling; 'routing': as 'sstnet', for other routings."
        ),
    ] = 'sstnet',
    layers: Annotated[
        str, option("Hidden states to read, as in '0,12,24,36'; 0: embeddings.")
    ] = 'all',
    roots: Annotated[
        bool, option('Train on the 8,544 sentences only, not on all 159,274 phrases.', '--roots')
    ] = False,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    seeds: Annotated[
        int,
        option(
            'How many seeds, from --seed on; more than one: each in a folder of its own below '
            '--out, finished ones are kept.',
            min=1,
        ),
    ] = 1,
    limit: Annotated[
        int | None,
        unset('Only so many samples of each split, spread evenly: a trial.', min=1),
    ] = None,
    out: Annotated[
        Path, option('Folder for metrics.json, task.json and the network; made if missing.')
    ] = Path('runs/sst'),
    data: Annotated[
        Path | None,
        unset('Folder with train.txt, dev.txt and test.txt; else CAPSNB_DATA, or a download.'),
    ] = None,
    cache: Annotated[
        Path | None, unset("Folder of hidden states; if not given, the user's, to 20 GB.")
    ] = None,
    cache_dtype: Annotated[
        str, option("Hidden states are kept in 'float16', 'bfloat16' or 'float32'.")
    ] = 'float16',
    on_the_fly: Annotated[
        bool,
        option('Run the transformer for every batch; keep no hidden states.', '--on-the-fly'),
    ] = False,
    in_memory: Annotated[
        bool,
        option('Keep hidden states in the memory of the device that trains.', '--in-memory'),
    ] = False,
    as_published: Annotated[
        bool,
        option(
            "As published in 2019: learning rate, floor of the variances, start of beta, words as "
            'the treebank spells them; the last epoch is kept (--no-validate), unless --validate '
            'is given.',
            '--as-published',
        ),
    ] = False,
    validate: Annotated[
        bool | None,
        typer.Option(
            show_default='not with --as-published',
            help='Choose the epoch on validation; if not, keep the last, as the paper does.',
        ),
    ] = None,
    any_treebank: Annotated[
        bool,
        option('The files need not be the Stanford Sentiment Treebank.', '--any-treebank'),
    ] = False,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Route a frozen transformer's hidden states to sentiments (Heinsen 2019, section 5).

    Says its price, keeps the epoch that validates best (with --no-validate, or --as-published, the
    last one), tests once, and says what differs from the paper. Ctrl-C leaves a checkpoint."""
    ctx.params['validate'] = validate = not as_published if validate is None else validate
    options = dict(encoder=encoder, gguf_file=gguf, revision=revision, layers=layers, roots=roots)
    options |= dict(limit=limit, published=as_published, official=not any_treebank, folder=data)
    options |= dict(validate=validate)
    options |= dict(cache=False if on_the_fly else cache, cache_dtype=cache_dtype)
    options |= dict(in_memory=in_memory)
    if data is not None:
        room('data.sst').find_sst(data)  # before a transformer is loaded
    lab = room('lab.sentiment')
    made = lab.Sentiment(task, **options)
    usual = dict(epochs=epochs, lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    usual |= dict(device=device, progress=progress)
    if seeds > 1:
        found = train_seeds(ctx, made, net, range(seed, seed + seeds), out, **usual)
    else:
        usual |= dict(resume=resume, overwrite=overwrite)
        found = train_task(ctx, made, net, out, seed=seed, **usual)
    if is_first():
        print(lab.beside_paper(list(found['runs'].values()) if seeds > 1 else [found]))
    return found


def train_seeds(
    ctx: typer.Context,  # of the command
    task,  # capsnb.lab.tasks.Task
    net: str | None,  # as for `train_task`
    seeds: range,  # one run each
    out: Path,  # folder of the runs, and of runs.json
    *,
    lr: float | None,  # as for `train_task`
    batch_size: int | None,  # as for `train_task`
    bf16: bool,  # as for `train_task`
    graphs: bool,  # as for `train_task`
    **usual,  # of `train`
) -> dict | None:  # the record; None in other processes than the first
    "Train with one seed after the other; finished ones are kept."
    how = again(ctx)

    def work():
        path = room('lab.runs').check_room(out, 2**20) / 'runs.json'
        row = dict(net=net, how_to_resume=how, **changed(task, net, lr, batch_size, bf16, graphs))
        of_machine = 'seed seeds data cache on_the_fly in_memory graphs out resume overwrite '
        of_machine += 'device progress as_json'
        asked = {k: v for k, v in ctx.params.items() if k not in of_machine.split()}
        asked = {k: str(v) if isinstance(v, Path) else v for k, v in asked.items()}
        study, rows = room('lab.tasks').study, {task.name: row}
        own = dict(runs=out, command=how, settings=asked)
        return study(task, rows, path, tuple(seeds), **own, **usual)[task.name]

    s = room('lab.train').summary(plainly(work, how))
    if not is_first():
        return
    found = (
        f"{task.name}, seeds {seeds[0]} to {seeds[-1]}: "
        f"test {s['test']:.1f} ± {s['test_sd']:.1f} %, "
        f"validation {s['valid']:.1f} ± {s['valid_sd']:.1f} %"
    )
    print(f"{found}; runs in {out}")
    return leave_study(out / 'runs.json', found)


def train_own(
    ctx: typer.Context,
    net: Annotated[str | None, unset("One of the task's networks; the first if not given.")] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    out: Out = None,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """A task of your own: 'my_module:my_task', in the current folder or installed.

    nbs/lab/51_tasks.ipynb shows how one is written, in fifteen lines."""
    here_too()
    task = room('lab.tasks').task_named(ctx.info_name)
    out = out or Path('runs', ctx.info_name.split(':')[1])
    usual = dict(seed=seed, epochs=epochs, device=device, resume=resume, overwrite=overwrite)
    usual |= dict(lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    return train_task(ctx, task, net, out, progress=progress, **usual)


def train_columns(
    ctx: typer.Context,
    image: Annotated[str | None, unset('Column of pictures.')] = None,
    text: Annotated[str | None, unset('Column of texts.')] = None,
    columns: Annotated[
        str | None,
        unset('Columns of numbers, with commas; all there are if no column is named.'),
    ] = None,
    label: Annotated[str, option('Column of the classes.')] = 'label',
    test: Annotated[
        str | None, unset("Split to test; 'test' if not given, or else cut from the rest.")
    ] = None,
    held: Annotated[float, option('Share that is cut for each split that is missing.')] = 0.15,
    limit: Annotated[
        int | None, unset('Only so many samples of each split; all if not given.', min=1)
    ] = None,
    size: Annotated[int | None, unset('Pictures: pixels per side; 32 if not given.', min=8)] = None,
    grey: Annotated[bool, option('Pictures: without colour.', '--grey')] = False,
    encoder: Annotated[
        str | None, unset("Texts: a transformer's folder or name; gpt2-large if not given.")
    ] = None,
    cache: Annotated[
        Path | None, unset("Texts: folder for hidden states; else the user's cache.")
    ] = None,
    net: Annotated[
        str | None,
        unset(
            "Pictures: 'dstep', 'routing', 'cnn'; texts: 'sstnet', 'routing', 'plain', 'vectors'; "
            "numbers: 'table', 'plain'. The first if not given."
        ),
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    bf16: Half = False,
    graphs: Graphs = False,
    seed: Seed = 0,
    out: Out = None,
    start: Start = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Columns of your own: 'file:PATH' is a CSV, JSON or Parquet file, a folder of them, or a
    folder of pictures with a sub-folder for each class; 'hub:NAME' is a data set of the Hub.

    nbs/lab/55_own_data.ipynb tells more."""
    named = dict(image=image, text=text, columns=columns and tuple(columns.split(',')))
    own = dict(size=size, colour=False if grey else None, encoder=encoder, cache=cache)
    own = {k: v for k, v in own.items() if v is not None}
    how = dict(label=label, test=test, held=held, limit=limit, **own)
    task = room('lab.own').own_task(ctx.info_name, **named, **how)
    name = ctx.info_name.partition(':')[2].partition('@')[0].rstrip('/').rsplit('/', 1)[-1]
    usual = dict(seed=seed, epochs=epochs, device=device, resume=resume, overwrite=overwrite)
    usual |= dict(lr=lr, batch_size=batch_size, bf16=bf16, graphs=graphs, start=start)
    out = out or Path('runs', Path(name).stem)
    return train_task(ctx, task, net, out, progress=progress, **usual)


def here_too():
    "Let modules of the current folder be found; none of them takes an installed one's place."
    if '' not in sys.path:
        sys.path.append('')


@contextlib.contextmanager
def one_thread():
    "One thread, unless the user names a number: for small networks as fast, beside others faster."
    torch = room('core').need('torch')
    before = torch.get_num_threads()
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def demo(
    ctx: typer.Context,
    seed: Seed = 0,
    out: Annotated[
        Path,
        option(
            'Folder for metrics.json, report.html, picture.png, dstep/ and cnn/ (weights); made if '
            'missing.'
        ),
    ] = Path('runs/demo'),
    resume: Resume = False,
    overwrite: Overwrite = False,
    epochs: Annotated[int, option('Times through the 1,000 training digits.', min=1)] = 24,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Train a small capsule network on real handwritten digits (8x8, from scikit-learn), next to a
    CNN of equal size.

    Prints both accuracies on the last 500 digits, from forms neither was trained on, and draws
    where each class got its score from. No download; about a minute of one core. Ctrl-C leaves a
    checkpoint and says how to go on."""
    how, rooms = again(ctx), room('lab.demo')
    kw = dict(epochs=epochs, device=device, resume=resume, overwrite=overwrite, progress=progress)
    with one_thread():
        results = plainly(lambda: rooms.demo(seed, out, how_to_resume=how, **kw), how)
    weights = f"capsnb.DStepNet.from_pretrained('{out / 'dstep'}')"
    print(f"\n{rooms.demo_table(results)}\n\nlook at {out / 'picture.png'}; weights: {weights}")
    leave('run', out)
    return results


def confusion_table(
    names: list,  # of the classes
    confusion: list,  # [label][predicted] counts
) -> str:  # a line for each label
    "What is taken for what."
    rows = [['label', 'read as', *names]]
    rows += [[name, '', *(f'{n:,}' for n in row)] for name, row in zip(names, confusion)]
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row):
        left = [x.ljust(w) for x, w in zip(row[:2], widths)]
        right = [x.rjust(w) for x, w in zip(row[2:], widths[2:])]
        return '  '.join(left + right)

    return '\n'.join(map(line, rows))


def evaluate(
    run: Annotated[Path, typer.Argument(help='Folder of a finished run.')],
    split: Annotated[
        str,
        option(
            "'train', 'validation' or 'test'; on pictures of objects also 'train+validation', "
            "and 'familiar' after train eth80 --by."
        ),
    ] = 'test',
    encoder: Annotated[
        str | None,
        unset('Where the transformer lies now; where it lay in training if not given.'),
    ] = None,
    data: Annotated[Path | None, unset('Folder of the data, as for train.')] = None,
    cache: Annotated[
        Path | None, unset("Folder for hidden states or drawn toys; else the user's cache.")
    ] = None,
    on_the_fly: Annotated[
        bool, option('Run the transformer; keep no hidden states.', '--on-the-fly')
    ] = False,
    crops: Annotated[
        int,
        option(
            'Pictures of objects: the mean over crops times crops views, patches or small shifts '
            'as the network was trained; 1: the one in the middle.',
            min=1,
        ),
    ] = 1,
    task: Named = None,
    as_json: AsJson = False,
    device: Device = None,
    progress: Progress = None,
):
    """Accuracy of a finished run, and what it takes for what."""
    here_too()
    here = dict(encoder=encoder, folder=data, cache=cache)
    here = {k: v for k, v in here.items() if v is not None}
    here |= ({'cache': False} if on_the_fly else {}) | ({} if crops == 1 else {'crops': crops})
    with contextlib.redirect_stdout(sys.stderr):
        e = room('lab.tasks').evaluate(
            run, split, device=device, progress=progress, task=task, **here
        )
    if as_json:
        leave('test', run, e, quiet=True)
        return e
    print(f"{e['split']}: {e['accuracy']:.1%} of {e['n']:,}\n")
    print(confusion_table(e['names'], e['confusion']))
    for angle, found in e.get('by_degrees', {}).items():
        print(f"\nby {angle}: " + ', '.join(f'{d}° {a:.0%}' for d, a in found.items()))
    print()
    leave('test', run, e)


def explain(
    texts: Annotated[
        list[str] | None, typer.Argument(help='Sentences.', show_default=False)
    ] = None,
    run: Annotated[Path, option('Folder of a finished run on texts.')] = Path('runs/sst'),
    file: Annotated[Path | None, unset('File of sentences, one a line.')] = None,
    encoder: Annotated[
        str | None, unset('Where the transformer lies now, or its name on the Hub.')
    ] = None,
    html: Annotated[
        Path | None, unset("File of the page; report_words.html in the run's folder if not given.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
):
    """Which words a verdict owes its score to, positive against negative: each word's credit,
    which adds up to the sentence's, and what is lost without the word.

    On a terminal words are blue for positive, red for negative; NO_COLOR turns that off."""
    lines = sentences_in(file) if file else []
    if not (texts := [*(texts or ()), *filter(str.strip, lines)]):
        raise ValueError("expected a sentence, or --file with one a line")
    if folder := next((t for t in texts if os.path.isfile(f'{t}/task.json')), None):
        raise ValueError(f"'{folder}' is a run: capsnb explain --run {folder} SENTENCE")
    room('lab.train').quiet_transformers().utils.logging.disable_progress_bar()
    here = {} if encoder is None else dict(encoder=encoder)
    network, task, note = room('lab.tasks').load_run(run, device, **here)
    if not hasattr(task, 'reader'):
        raise ValueError(f"'{run}' is no run on texts, but on {task.name}")
    if len(note['names']) > 2 and not task.ordered:
        raise ValueError(
            f"words are weighed positive against negative, but {', '.join(note['names'])} have no "
            "such order; capsnb.lab.text.credit gives the credit of each class"
        )
    text = room('lab.text')
    told = [text.explain(t, network, task.reader(), note['names']) for t in texts]
    coloured = False if 'NO_COLOR' in os.environ else None  # None: on a terminal
    typer.echo('\n\n'.join(map(_in_columns, told)) + '\n', color=coloured)
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        print(f"look at {room('lab.pages').leave_words(html, told)}")
    else:
        leave('words', run / 'report_words.html', told)
    return [e._asdict() | dict(leaning=e.leaning()) for e in told]


def sentences_in(
    file: Path,  # text; a pipe, too
) -> list:  # its lines
    "What stands in a file; `ValueError` for one without an end."
    most = 10_000_000
    with file.open(encoding='utf-8') as f:
        text = f.read(most + 1)
    if len(text) > most:
        raise ValueError(f"'{file}': expected at most {most:,} letters, got more")
    return text.splitlines()


def _in_columns(
    e,  # capsnb.lab.text.Explanation
) -> str:  # shares of the classes, and a line for each word
    shares = importlib.import_module('torch').tensor(e.a).softmax(0)
    most = max((abs(v) for _, v in e.words), default=0)
    lines = [' '.join(_coloured(word, v, most) for word, v in e.words)]
    lines += ['  '.join(f'{n} {q:.0%}' for n, q in zip(e.names, shares)), '']
    lines += ['  credit   lost without']
    for (word, v), (_, lost) in zip(e.words, e.without):
        lines.append(f"{v:+8.3f} {lost:+8.3f}  {word}")
    return '\n'.join([*lines, f"{e.leaning():+8.3f}           together"])


def _coloured(
    word: str,  # of a sentence
    credit: float,  # of it
    most: float,  # credit of the strongest word
) -> str:  # for a terminal
    "Blue for positive, red for negative; bold from half of the strongest on, plain below a tenth."
    share = abs(credit) / most if most else 0
    colour = 'blue' if credit > 0 else 'red'
    return word if share < 0.1 else typer.style(word, fg=colour, bold=share >= 0.5 or None)


def push(
    run: Annotated[Path, typer.Argument(help='Folder of a finished run.')],
    name: Annotated[
        str, typer.Argument(help="On the Hub: 'owner/name', or a name of your own; made if absent.")
    ],
    private: Annotated[bool, option('Nobody else may see it.', '--private')] = False,
    license: Annotated[str, option('Of the weights.')] = 'apache-2.0',
    encoder: Annotated[
        str | None, unset('Runs on texts: name on the Hub of the transformer that was trained on.')
    ] = None,
    token: Annotated[
        str | None, unset("That may write; that of 'hf auth login', or HF_TOKEN, if not given.")
    ] = None,
    task: Named = None,
    card: Annotated[Path | None, unset('Write the card into this file, and push nothing.')] = None,
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
        return print(f'look at {hub.write_card(card, text)}')
    print(hub.push_run(run, name, private=private or None, token=token, **how))


def capsules_of(
    text: str | None,  # as on the command line
) -> tuple | None:  # A, B, C, D
    "Four numbers of capsules; `ValueError` for anything else."
    if text is None:
        return None
    try:
        numbers = tuple(map(int, text.split(',')))
    except ValueError:
        numbers = ()
    if len(numbers) != 4 or min(numbers) < 1:
        raise ValueError(
            f"--capsules takes four whole numbers from 1 on, as in 64,8,16,16, got {text!r}"
        )
    return numbers


def floor_of(
    text: str | None,  # as on the command line
) -> float | str | None:  # 'auto', a share as in '300%', or a number
    "A floor of the variances; `ValueError` for anything else."
    if text is None or text == 'auto' or text.endswith('%'):
        return text
    try:
        return float(text)
    except ValueError:
        said = f"--eps takes 'auto', a number or a share as in 300%, got {text!r}"
        raise ValueError(said) from None


row_names = (
    '1 iteration, 2 iterations, 3 iterations, 5 iterations, vector, no coordinates, '
    '"vector, no coordinates", margin loss, cross-entropy, mixing proportions, floor of 1e-4'
)


def ablate(
    data: Annotated[
        str, option("'toys', 'smallnorb', 'eth80', 'digits', 'mnist' or 'fashion-mnist'.")
    ] = 'toys',
    size: Annotated[int | None, unset('Objects: pixels per side; 48 if not given.', min=29)] = None,
    pairs: Annotated[
        int | None,
        unset('Only so many pairs, or pictures to train on; all if not given.', min=10),
    ] = None,
    epochs: Annotated[int, option('Times through the training data, for every row.', min=1)] = 50,
    lr: Rate = None,
    seeds: Annotated[int, option('Runs of each row.', min=1)] = 3,
    rows: Annotated[
        str, option("'table': the paper's Table 1; 'ingredients': what makes them train.")
    ] = 'table',
    preset: Annotated[
        str,
        option(
            "Set-up of the routing: 'paper', 'gritzman' or 'google'; the others get a row each. "
            "'normalised': the table's rows on matrix capsules that train."
        ),
    ] = 'paper',
    capsules: Annotated[
        str | None,
        unset("A,B,C,D of every network, as in 64,8,16,16, the paper's small one."),
    ] = None,
    eps: Annotated[
        str | None,
        unset(
            "Floor of the variances in every row but the one that says otherwise: 'auto', a "
            "number, or a share of the votes' spread, as in 300%; the preset's if not given."
        ),
    ] = None,
    validate: Validate = True,
    only: Annotated[
        list[str] | None,
        unset(
            f"Name of a row; may be repeated. All if not given: {row_names}, or other presets, "
            "as in 'preset google'; with --rows ingredients other names, which an error lists."
        ),
    ] = None,
    out: Annotated[Path, option('File that collects the runs; finished ones are kept.')] = Path(
        'runs/ablate/em_ablation.json'
    ),
    runs: Annotated[Path, option('Folder of the runs themselves.')] = Path('runs/ablate'),
    folder: Annotated[
        Path | None,
        unset(
            'smallNORB, ETH-80, MNIST: folder of the files; else CAPSNB_DATA, or a download.',
            '--data-folder',
        ),
    ] = None,
    cache: ToyCache = None,
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """What each part of matrix capsules is worth: the rows of Table 1 of Hinton et al. (2018),
    beside the paper's errors.

    Trains one network after another; a study that was stopped goes on with the same command."""
    tasks, ablation = room('lab.tasks'), room('lab.ablation')
    options = dict(size=size or 48, subset=pairs, validate=validate, folder=folder, cache=cache)
    if data in room('lab.digits').sides:
        asked = dict(size=size, cache=cache, validate=None if validate else False)
        options = {k: v for k, v in asked.items() if v is not None}  # which digits have not
        options |= dict(limit=pairs, folder=folder)
    task = tasks.with_options(tasks.task_named(data), **options)
    ablation.ablate(
        task,
        out,
        epochs,
        tuple(range(seeds)),
        rows=rows,
        preset=preset,
        only=tuple(only or ()) or None,
        capsules=capsules_of(capsules),
        eps=floor_of(eps),
        runs=runs,
        device=device,
        progress=progress,
        **({} if lr is None else dict(lr=(min(lr, 1e-5), lr))),
    )
    if not is_first():
        return
    picture, table = out.with_suffix('.png'), ablation.ablation_table(out)
    ablation.plot_ablation(out).savefig(picture, dpi=120)
    print(f"{table}\n\nlook at {picture}")
    return leave_study(out, table, (picture,))


def shootout(
    data: Annotated[
        str,
        typer.Argument(
            help="'toys', 'eth80', 'mnist', 'fashion-mnist' or 'treebank'.", metavar='DATA'
        ),
    ] = 'toys',
    only: Annotated[
        list[str] | None,
        unset(
            "A routing (an error lists them), 'cnn', or one with other settings: "
            "'em-part' (misfit in the part's pose), 'em-identity' (maps start there), "
            "'em-part-identity', 'em-student', 'em-laplace', "
            "'em-full', 'em-vmf', 'bayes-published' (as its authors' code); may be repeated. "
            'All routings and the CNN if not given.'
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        unset("A network of the data's task, in its own size, instead; may be repeated."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        unset('Top learning rate to try; may be repeated. If not given: 0.003, 0.01 and 0.03.'),
    ] = None,
    seeds: Annotated[int, option('Final runs of each routing.', min=1)] = 3,
    scale: Annotated[float, option('Multiplies the number of epochs.', min=0.01, max=1000)] = 1.0,
    costs: Annotated[
        bool, option('Time and memory of a training step instead; trains nothing.', '--costs')
    ] = False,
    out: Annotated[Path, option('Folder of the records; finished runs are kept.')] = Path(
        'runs/shootout'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Every routing on one stem: equal parameters, budget and search, then fresh seeds.

    Trains one network after another; a study that was stopped goes on with the same command."""
    shoot = room('lab.shootout')
    if costs:
        path = out / f'shootout_{data}_costs.json'
        found = shoot.measure_costs(data, path)['costs'].items()
        each = '{:14s} {:7.1f} ms {:7.1f} MB'
        lines = [each.format(k, 1e3 * c['seconds'], c['bytes'] / 1e6) for k, c in found]
        print(*lines, sep='\n')
        return leave_study(path, '\n'.join(lines))
    how = dict(scale=scale, runs=out / 'runs', device=device, progress=progress)
    tried = dict(lrs=lrs) if (lrs := checked_rates(rate)) else None
    how |= dict(networks=tuple(network or ()), tried=tried)
    shoot.shoot_out(data, out, tuple(only or ()) or None, tuple(range(seeds)), **how)
    if not is_first():
        return
    record = out / f"{'networks' if network else 'shootout'}_{data}.json"
    timed = None  # by --costs, into the same folder
    if not network and (at := out / f'shootout_{data}_costs.json').exists():
        timed = room('data.files').read_json(at, costs=dict)['costs']
    picture, table = record.with_suffix('.png'), shoot.standings(record, timed)
    shoot.plot_shootout(record).savefig(picture, dpi=120)
    print(f"{table}\n\nlook at {picture}")
    return leave_study(record, table, (picture,))


def study_viewpoint(
    data: Annotated[str, option("'toys', 'eth80' or 'smallnorb'.")] = 'toys',
    by: Annotated[str, option("'azimuth' or 'elevation': what is novel in the test.")] = 'azimuth',
    protocol: Annotated[
        str,
        option("'extrapolation', as in the paper: novel views beyond; 'interpolation': between."),
    ] = 'extrapolation',
    plane: Annotated[bool, option('Shift and turn the pictures in training.')] = True,
    only: Annotated[
        list[str] | None, unset("A routing, 'cnn' or 'baseline'; may be repeated.")
    ] = None,
    against: Annotated[
        str, option('Whom the others are compared with at equal familiar accuracy.')
    ] = 'cnn',
    seeds: Annotated[int, option('Runs of each contestant.', min=1)] = 5,
    scale: Annotated[float, option('Multiplies the number of epochs.', min=0.01, max=1000)] = 1.0,
    shootout: Annotated[
        Path | None,
        unset('Record of a shoot-out to take learning rates from; else they are searched for.'),
    ] = None,
    rate: Annotated[
        list[float] | None,
        unset('A learning rate to try where no shoot-out tells one; may be repeated.'),
    ] = None,
    costs: Annotated[
        bool, option('CPU time of the study instead, from a few steps; trains nothing.', '--costs')
    ] = False,
    folder: Annotated[
        Path | None, unset('Folder of the files; else CAPSNB_DATA.', '--folder')
    ] = None,
    any_files: AnyFiles = False,
    out: Annotated[Path, option('Folder of the records; finished runs are kept.')] = Path(
        'runs/viewpoint'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """New viewpoints: trained on a third of the views, compared where familiar ones are read alike.

    Trains one network after another; a study that was stopped goes on with the same command."""
    view, only = room('lab.viewpoint'), tuple(only or ()) or None
    if against not in (only or view.contestants):
        raise ValueError(f"--against {against}: it is not among the contestants")
    if shootout and not shootout.is_file():
        raise ValueError(f"--shootout {shootout}: no such file; `capsnb shootout` writes one")
    own, lrs = dict(folder=folder) if folder else {}, checked_rates(rate) or view.rates
    own |= dict(official=False) if any_files else {}
    if costs:
        minutes = view.write_price(data, out, by, protocol, plane, scale, only, **own)['minutes']
        lines = [f"{name:10s} {m:6.1f} CPU minutes a run" for name, m in minutes.items()]
        tried = 0 if shootout or len(lrs) == 1 else len(lrs)
        spent = view.hours(minutes, seeds, tried)
        searched = 'with the search' if tried else 'without a search'
        lines.append(f"{spent:.1f} CPU hours for all, {searched}")
        print(*lines, sep='\n')
        return leave_study(out / f'viewpoint_{data}_costs.json', '\n'.join(lines))
    how = dict(protocol=protocol, plane=plane, only=only, seeds=tuple(range(seeds)), scale=scale)
    how |= dict(shootout=shootout, options=own, lrs=lrs)
    view.viewpoint_study(data, by, out, **how, device=device, progress=progress)
    if not is_first():
        return
    record = view.record_of(out, data, by, protocol, plane)
    picture, table = record.with_suffix('.png'), view.viewpoint_table(record, against)
    view.plot_viewpoints(record, against).savefig(picture, dpi=120)
    print(f"{table}\n\nlook at {picture}")
    return leave_study(record, table, (picture,))


def checked_rates(
    rates: list | None,  # as typed
) -> tuple | None:  # the same; None: none was
    "Learning rates to try; `ValueError` where one is not above 0."
    if wrong := [lr for lr in rates or () if not lr > 0]:
        raise ValueError(f"--rate must be above 0, got {wrong[0]:g}")
    return tuple(rates or ()) or None


def plateau(
    only: Annotated[
        list[str] | None,
        unset("A row, e.g. '3 iterations'; may be repeated. All if not given."),
    ] = None,
    seeds: Annotated[int, option('Runs of each row.', min=1)] = 3,
    epochs: Annotated[int, option('Times through 1,600 pairs.', min=1)] = 5,
    out: Annotated[Path, option('File of the record; finished runs are kept.')] = Path(
        'runs/plateau/plateau.json'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """What keeps matrix capsules from learning at first: watched runs on toys of 32 pixels.

    Trains one network after another; a study that was stopped goes on with the same command."""
    room('lab.plateau').plateau_study(
        path=out,
        seeds=tuple(range(seeds)),
        only=tuple(only or ()) or None,
        epochs=epochs,
        runs=out.parent,
        device=device,
        progress=progress,
    )
    if not is_first():
        return
    print(table := room('lab.plateau').plateau_table(out))
    return leave_study(out, table)


def depth(
    only: Annotated[
        list[str] | None,
        unset("A cure, e.g. 'norm', or 'no cure'; may be repeated. All if not given."),
    ] = None,
    layers: Annotated[int, option('The most layers below the classes; from 1 on.', min=1)] = 6,
    seeds: Annotated[int, option('Runs of each row.', min=1)] = 3,
    epochs: Annotated[int, option('Times through 1,600 pairs.', min=1)] = 4,
    out: Annotated[Path, option('File of the record; finished runs are kept.')] = Path(
        'runs/depth/depth.json'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Deep networks of matrix capsules with and without cures, on toys of 32 pixels.

    Trains one network after another; a study that was stopped goes on with the same command."""
    told = f'capsnb study depth --layers {layers} --seeds {seeds} --epochs {epochs}'
    told += room('lab.tasks').as_typed(only=only)
    room('lab.depth').depth_study(
        path=out,
        depths=range(1, layers + 1),
        seeds=tuple(range(seeds)),
        only=tuple(only or ()) or None,
        runs=out.parent,
        command=told,
        epochs=epochs,
        device=device,
        progress=progress,
    )
    if not is_first():
        return
    print(table := room('lab.depth').depth_table(out))
    return leave_study(out, table)


def study_language(
    which: Annotated[
        str, option("'blocks': routing between blocks of self-attention; 'outputs': routed words.")
    ] = 'blocks',
    only: Annotated[list[str] | None, unset('A contestant; may be repeated.')] = None,
    seeds: Annotated[int, option('Final runs of each contestant.', min=1)] = 3,
    costs: Annotated[
        bool, option('Time and memory of a training step instead; trains nothing.', '--costs')
    ] = False,
    folder: Annotated[
        Path | None, unset('Folder of the treebank; else CAPSNB_DATA.', '--folder')
    ] = None,
    out: Annotated[Path, option('Folder of the records; finished runs are kept.')] = Path(
        'runs/language'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Small language models with routing inside, or at the end: equal parameters and search.

    Trains one network after another; a study that was stopped goes on with the same command."""
    lab, who = room('outlook.language'), tuple(only or ()) or None
    g = lab.stage(which, folder=folder)
    if costs:
        lines = []
        for name, c in lab.measure_language(which, out, who, g=g)['costs'].items():
            tokens = c['tokens']
            each = f"{1e6 * c['seconds'] / tokens:9,.0f} µs {c['bytes'] / tokens:10,.0f} B a token"
            lines.append(f'{name:15s} {each}')
        print(*lines, sep='\n')
        return leave_study(out / f'language_{which}_costs.json', '\n'.join(lines))
    how = dict(g=g, runs=out / 'runs', device=device, progress=progress)
    lab.language_study(which, out, who, tuple(range(seeds)), **how)
    if not is_first():
        return
    path = out / f'language_{which}.json'
    print(table := lab.language_table(path))
    return leave_study(path, table)


def study_heads(
    task: Annotated[str, option("'sst5': five labels; 'sst2': two.")] = 'sst5',
    encoder: Annotated[
        str, option('The frozen transformer: a name on the Hub, or a folder.')
    ] = 'gpt2-large',
    gguf: Annotated[str | None, unset('Name of a GGUF file in that folder.')] = None,
    layers: Annotated[
        str, option("Hidden states to read, as in '0,12,24,36'; 0: embeddings.")
    ] = 'all',
    only: Annotated[
        list[str] | None,
        unset(
            "'dstep', 'em', 'attention', 'vectors' or 'large attention'; may be repeated; or "
            "'probes': no head. All if not given."
        ),
    ] = None,
    seeds: Annotated[int, option('Final runs of each head.', min=1)] = 3,
    epochs: Annotated[int, option('Of the final runs; the search takes half.', min=1)] = 4,
    start: Annotated[
        Path | None,
        unset("Folder of such runs, as runs/heads/runs/sst5; 'vectors' begins with theirs, too."),
    ] = None,
    folder: Annotated[
        Path | None, unset('Folder of the treebank; else CAPSNB_DATA.', '--folder')
    ] = None,
    cache: Annotated[Path | None, unset('Folder of cached hidden states.')] = None,
    cache_dtype: Annotated[str, option("On disk: 'float16', 'bfloat16' or 'float32'.")] = 'float16',
    any_treebank: Annotated[
        bool,
        option('The files need not be the Stanford Sentiment Treebank.', '--any-treebank'),
    ] = False,
    out: Annotated[Path, option('Folder of the records; finished runs are kept.')] = Path(
        'runs/heads'
    ),
    device: Device = None,
    progress: Progress = None,
    as_json: AsJson = False,
):
    """Heads on the same hidden states: two routings, three, attention pooling, a linear probe.

    Trains one network after another; a study that was stopped goes on with the same command."""
    options = dict(encoder=encoder, gguf_file=gguf, layers=layers, roots=True, folder=folder)
    options |= dict(official=not any_treebank, cache=cache, cache_dtype=cache_dtype)
    found = room('lab.sentiment').Sentiment(task, **options)
    how = dict(epochs=epochs, runs=out / 'runs', start=start, device=device, progress=progress)
    room('outlook.heads').head_study(
        found, out, tuple(only or ()) or None, tuple(range(seeds)), **how
    )
    if not is_first():
        return
    record = out / f'heads_{task}.json'
    heads = only != ['probes']
    table = room('lab.shootout').standings(record) + '\n' if heads else ''
    probes = record.with_name(f'{record.stem}_probes.json')
    best = room('data.files').read_json(probes, probes=list)['probes'][0]
    told = f"linear probe of hidden state {best['layer']}, the best on validation"
    print(table := f"{table}{told}: test {best['test_accuracy']:.1%}")
    return leave_study(record if heads else probes, table)


def study_tuned(
    task: Annotated[str, option("'sst2': two labels; 'sst5': five.")] = 'sst2',
    encoder: Annotated[
        str, option('The transformer: a name on the Hub, or a folder.')
    ] = 'gpt2-large',
    gguf: Annotated[str | None, unset('Name of a GGUF file in that folder.')] = None,
    only: Annotated[
        list[str] | None,
        unset("'frozen', 'lora' or 'whole'; may be repeated. All if not given."),
    ] = None,
    seeds: Annotated[int, option('Runs of each way.', min=1)] = 3,
    epochs: Annotated[int, option('Times through the training sentences.', min=1)] = 2,
    limit: Annotated[
        int | None, unset('At most so many training sentences; all if not given.', min=1)
    ] = None,
    folder: Annotated[
        Path | None, unset('Folder of the treebank; else CAPSNB_DATA.', '--folder')
    ] = None,
    any_treebank: Annotated[
        bool,
        option('The files need not be the Stanford Sentiment Treebank.', '--any-treebank'),
    ] = False,
    out: Annotated[Path, option('Folder of the record; finished runs are kept.')] = Path(
        'runs/tuned'
    ),
    device: Device = None,
    as_json: AsJson = False,
):
    """A head with its transformer frozen, with low-rank adapters (LoRA), or trained whole.

    Trains one network after another; a study that was stopped goes on with the same command."""
    lab, ways = room('outlook.tuned'), tuple(only or ())
    if unknown := sorted(set(ways) - set(lab.ways)):
        raise ValueError(f"--only must be {', '.join(lab.ways)}, got {', '.join(unknown)}")
    how = dict(gguf_file=gguf, folder=folder, official=not any_treebank, device=device)
    make, data, about = lab.on_treebank(encoder, task, limit, **how)
    record = out / f'tuned_{task}.json'
    told = f'capsnb study tuned --task {task} --encoder FOLDER --seeds {seeds} --epochs {epochs}'
    told += room('lab.tasks').as_typed(limit=limit, gguf=gguf, only=only)
    told += ' --any-treebank' if any_treebank else ''
    how = dict(seeds=tuple(range(seeds)), runs=out / 'runs' / task, command=told, epochs=epochs)
    how |= dict(settings=about | dict(epochs=epochs), device=device)
    lab.tuned_study(make, data, record, ways or tuple(lab.ways), **how)
    print(table := lab.tuned_table(record))
    return leave_study(record, table)


def study_credit(
    runs: Annotated[list[Path], typer.Argument(help='Finished runs on the treebank.')],
    limit: Annotated[int, option('Test sentences of each run.', min=1)] = 300,
    folder: Annotated[
        Path | None, unset('Folder of the treebank; else CAPSNB_DATA.', '--folder')
    ] = None,
    cache: Annotated[Path | None, unset('Folder of cached hidden states.')] = None,
    out: Annotated[Path, option('Record; runs that it holds are kept.')] = Path('runs/credit.json'),
    device: Device = None,
    as_json: AsJson = False,
):
    """Credit through the routings against deletion, gradients and integrated gradients."""
    lab = room('outlook.faithful')
    here = dict(folder=folder) | ({} if cache is None else dict(cache=cache))
    record = lab.credit_study(runs, out, limit, device, **here)
    told = [f'taken away: a {kind}\n{lab.credit_table(record, kind)}\n' for kind in lab.kinds]
    print(*told, sep='\n')
    return leave_study(out, '\n'.join(told))


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help='routing, convcaps, capsnet, zoo, mixture, matrix_caps, sst, networks; '
            'all if none.',
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, option("'cpu' or 'cuda'.")] = 'cpu',
    threads: Annotated[
        int | None, unset("Threads of PyTorch; its own choice if not given.", min=1)
    ] = None,
    quick: Annotated[
        bool, option('One case of each bench, one round, no memory.', '--quick')
    ] = False,
    out: Annotated[Path, option('File of the record.')] = Path('runs/bench.json'),
    progress: Progress = None,
):
    """Time and memory of everything fast, side by side with the definition."""
    if threads:
        room('core').need('torch').set_num_threads(threads)
    room('lab.speed').bench(tuple(names or ()), out, device, quick, progress=progress)
    print(f'the record is in {out}')


class Tasks(typer.core.TyperGroup):
    "The sub-commands of `capsnb train`; a name with a colon is data or a task of one's own."

    def get_command(self, ctx, name):
        kind, colon, _ = name.partition(':')
        own = f'{kind}:…' if kind in ('file', 'hub') else 'module:task'
        return super().get_command(ctx, own if colon else name)


def show_version(
    wanted: bool,  # whether --version was given
):
    if wanted:
        typer.echo(f"capsnb {__version__}")
        raise typer.Exit()


def top(
    version: Annotated[
        bool,
        typer.Option(
            '--version', callback=show_version, is_eager=True, help='Print the version and exit.'
        ),
    ] = False,
):
    """Capsule routing, derived in notebooks: mixtures of Gaussians, EM routing, and the D-step."""


def make_app() -> typer.Typer:
    "The `capsnb` command."
    plain = dict(no_args_is_help=True, rich_markup_mode=None)
    app = typer.Typer(
        name='capsnb',
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=dict(help_option_names=['-h', '--help']),
        **plain,
    )
    group = typer.Typer(
        cls=Tasks, help='Train a network on a data set; one sub-command for each.', **plain
    )
    app.callback()(top)
    short = 'A capsule network and a CNN of equal size on real digits, in a minute.'
    app.command('demo', short_help=short)(entrance(demo))
    app.add_typer(group, name='train')
    group.callback()(lambda: None)
    for name, command, short in (
        ('sst', train_sst, 'The Stanford Sentiment Treebank, read by a frozen transformer.'),
        ('toys', train_objects, 'Toys that the library draws itself.'),
        ('smallnorb', train_objects, 'smallNORB, stereo pictures of toys.'),
        ('norb', train_objects, 'NORB jittered-cluttered: its files, 6 GB.'),
        ('eth80', train_photographs, 'ETH-80, photographs of eighty objects.'),
        ('digits', train_digits, '8x8 digits, always there.'),
        ('mnist', train_digits, 'Its files, or a download.'),
        ('fashion-mnist', train_digits, 'Its files, or a download.'),
        ('cifar10', train_digits, 'Small photographs in colour: its files, or a download.'),
        ('file:…', train_columns, 'Pictures, texts or numbers of your own.'),
        ('hub:…', train_columns, 'Pictures, texts or numbers of the Hub.'),
        ('module:task', train_own, 'A task of your own.'),
    ):
        group.command(name, short_help=short)(entrance(command))
    app.command('eval')(entrance(evaluate))
    app.command('explain')(entrance(explain))
    short = 'Push a finished run to the Hugging Face Hub, with a card.'
    app.command('push', short_help=short)(entrance(push))
    short = 'What each part of matrix capsules is worth: Table 1 of the paper.'
    app.command('ablate', short_help=short)(entrance(ablate))
    short = 'Compare every routing on one stem.'
    app.command('shootout', short_help=short)(entrance(shootout))
    study = typer.Typer(
        cls=Studies, help='Run a notebook of nbs/studies; one sub-command for each.', **plain
    )
    app.add_typer(study, name='study')
    study.callback()(lambda: None)
    for name, command, short in (
        ('viewpoint', study_viewpoint, 'Trained on some viewpoints, tested on others.'),
        ('plateau', plateau, 'Why matrix capsules learn late.'),
        ('depth', depth, 'How many layers of capsules can be trained?'),
        ('language', study_language, 'Routing inside, and at the end of, language models.'),
        ('heads', study_heads, "What may read a frozen transformer's hidden states."),
        ('tuned', study_tuned, 'Heads with transformers that are trained, too.'),
        ('credit', study_credit, 'Whether credit tells which words decide.'),
    ):
        study.command(name, short_help=short)(entrance(command))
    app.command('bench', short_help='Time and memory of everything fast.')(entrance(bench))
    return app
