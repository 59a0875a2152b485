"""Capsule routing, exact and fast: layers, networks, data and trained runs (`load`).

Routing layers are `Routing`, `ConvCaps`, `em_routing`, `dynamic_routing`, `RoutedPool` and
`routing_layer`; `help(capsnb.NAME)` explains each, and the book derives them.
"""

from importlib.util import find_spec as _found

__version__ = "0.1.0"

_names = {  # room -> its public names; PyTorch, which all need, takes seconds
    'core': ['seed_everything', 'plot_style', 'film'],
    'routing.scene': ['make_scene', 'draw_parts', 'draw_votes', 'cast_votes', 'bare'],
    'routing.dynamic': ['squash'],
    'routing.em': ['em_routing_ref'],
    'routing.dstep': ['votes', 'Routed', 'routing_ref'],
    'engine.mixture': ['GaussianMixture'],
    'engine.dstep': ['Routing', 'vote_density'],
    'engine.em': ['em_routing'],
    'engine.dynamic': ['dynamic_routing', 'route_capsules'],
    'engine.layers': ['ClassCaps', 'ConvCaps', 'PrimaryCaps'],
    'zoo.routers': [
        'Router',
        'DynamicRouting',
        'EMRouting',
        'RoutedPool',
        'RoutingBlock',
        'routing_layer',
        'all_routings',
    ],
    'zoo.vectors': ['VectorRouting'],
    'zoo.bayes': ['BayesRouting'],
    'zoo.noise': [
        'StudentRouting',
        'LaplaceRouting',
        'FullRouting',
        'DirectionRouting',
        'HardKMeans',
    ],
    'zoo.onestep': [
        'SelfRouting',
        'UniformRouting',
        'RandomRouting',
        'MeanPooling',
        'AttentionPooling',
        'InvertedAttention',
    ],
    'data.toys': ['load_toys', 'toys_tensors'],
    'data.views': ['load_smallnorb', 'load_eth80'],
    'data.mnist': ['load_cifar10'],
    'data.sst': ['load_sst', 'tiny_treebank'],
    'data.embed': ['FrozenEncoder', 'tiny_transformer'],
    'lab.capsnet': ['CapsNet', 'EfficientCapsNet', 'margin_loss'],
    'lab.matrix_caps': ['MatrixCapsNet', 'spread_loss'],
    'lab.vision': ['BaselineCNN', 'PlainCNN', 'DStepNet', 'RoutingNet', 'SmallNORBNet', 'n_params'],
    'lab.text': ['SSTNet', 'RoutingText', 'PlainText', 'VectorText'],
    'lab.assembly': ['AssemblyNet', 'Arrangements', 'similarity', 'homogeneous'],
    'lab.hub': ['RoutingClassifier'],
    'lab.predict': ['load', 'explain'],
    'lab.train': ['fit'],
    'lab.tasks': ['Task', 'Net', 'Digits', 'task_named', 'train', 'load_run', 'evaluate'],
    'lab.objects': ['Toys', 'SmallNORB', 'Photographs'],
    'lab.sentiment': ['Sentiment'],
    'lab.report': ['runs_of', 'interval', 'lead_of', 'table'],
}
_room_of = {name: room for room, names in _names.items() for name in names}

__all__ = list(_room_of)
if not _found('transformers'):  # a star gives what the installation has
    __all__.remove('RoutingClassifier')


def __getattr__(name):  # imported when it is asked for
    from importlib import import_module

    if name in _room_of:
        thing = getattr(import_module(f'.{_room_of[name]}', __name__), name)
        return import_module('.core', __name__).with_arguments(thing)
    raise AttributeError(f"module 'capsnb' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
