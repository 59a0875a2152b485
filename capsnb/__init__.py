__version__ = "0.1.0"

_names = {  # room -> its public names; PyTorch, which all need, takes seconds
    'engine.mixture': ['GaussianMixture'],
    'routing.dstep': ['Routed', 'routing_ref'],
    'engine.dstep': ['Routing'],
    'engine.em': ['em_routing'],
    'routing.dynamic': ['squash'],
    'engine.dynamic': ['dynamic_routing', 'route_capsules'],
    'engine.layers': ['ClassCaps', 'ConvCaps', 'PrimaryCaps'],
    'zoo.routers': ['DynamicRouting', 'EMRouting', 'routing_layer'],
    'zoo.vectors': ['VectorRouting'],
    'lab.losses': ['margin_loss', 'spread_loss'],
    'lab.capsnet': ['CapsNet'],
    'lab.efficient': ['EfficientCapsNet'],
    'lab.matrix_caps': ['MatrixCapsNet'],
    'lab.vision': ['BaselineCNN', 'DStepNet', 'SmallNORBNet'],
    'lab.routing_net': ['RoutingNet'],
    'lab.text': ['RoutingClassifier', 'SSTNet'],
    'data.toys': ['load_toys'],
    'data.norb': ['load_smallnorb'],
    'data.eth80': ['load_eth80'],
    'data.cifar': ['load_cifar10'],
    'data.sst': ['load_sst'],
    'data.embed': ['FrozenEncoder'],
}
_floors = {  # floor -> its rooms; of rooms that share a name the later floor's is found
    'routing': ['dstep', 'dynamic', 'em', 'mixture', 'scene'],
    'engine': ['numerics', 'bench', 'dstep', 'dynamic', 'em', 'layers', 'mixture', 'moments'],
    'zoo': ['routers', 'noise', 'vectors', 'bayes', 'onestep', 'attention'],
    'data': ['cifar', 'embed', 'eth80', 'files', 'mnist', 'norb', 'sst', 'toys', 'world'],
    'lab': [
        'ablation',
        'capsnet',
        'demo',
        'depth',
        'digits',
        'efficient',
        'gpu',
        'inspect',
        'losses',
        'matrix_caps',
        'objects',
        'overlap',
        'photographs',
        'pictures',
        'report',
        'routing_net',
        'runs',
        'sentiment',
        'shootout',
        'speed',
        'tasks',
        'text',
        'train',
        'vision',
    ],
    'outlook': ['blocks', 'faithful', 'hub', 'language', 'own', 'pages', 'tuned'],
}
_moved = {'poses': 'inspect', 'votes': 'inspect'}  # rooms that were joined
_room_of = {name: room for room, names in _names.items() for name in names}
_floor_of = {room: floor for floor, rooms in _floors.items() for room in rooms}

__all__ = list(_room_of)


def __getattr__(name):  # imported when it is asked for
    from importlib import import_module

    if name in _room_of:
        return getattr(import_module(f'.{_room_of[name]}', __name__), name)
    name = _moved.get(name, name)
    if name in _floor_of:
        return import_module(f'.{_floor_of[name]}.{name}', __name__)
    raise AttributeError(f"module 'capsnb' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
