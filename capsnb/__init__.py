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
    'zoo.blocks': ['RoutedPool'],
    'zoo.vectors': ['VectorRouting'],
    'lab.losses': ['margin_loss', 'spread_loss'],
    'lab.capsnet': ['CapsNet', 'EfficientCapsNet'],
    'lab.matrix_caps': ['MatrixCapsNet'],
    'lab.vision': ['BaselineCNN', 'DStepNet', 'RoutingNet', 'SmallNORBNet'],
    'lab.text': ['SSTNet'],
    'lab.assembly': ['AssemblyNet'],
    'lab.hub': ['RoutingClassifier'],
    'data.toys': ['load_toys'],
    'data.norb': ['load_smallnorb'],
    'data.eth80': ['load_eth80'],
    'data.mnist': ['load_cifar10'],
    'data.sst': ['load_sst'],
    'data.embed': ['FrozenEncoder'],
}
_room_of = {name: room for room, names in _names.items() for name in names}

__all__ = list(_room_of)


def __getattr__(name):  # imported when it is asked for
    from importlib import import_module

    if name in _room_of:
        return getattr(import_module(f'.{_room_of[name]}', __name__), name)
    raise AttributeError(f"module 'capsnb' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
