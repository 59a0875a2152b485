__version__ = "0.1.0"

_where = dict(    # module -> its public names; PyTorch, which all need, takes seconds
    mixture=['GaussianMixture'], dstep=['Routed', 'Routing', 'routing_ref'], em=['em_routing'],
    dynamic=['dynamic_routing', 'route_capsules', 'squash'],
    layers=['ClassCaps', 'ConvCaps', 'PrimaryCaps'], losses=['margin_loss', 'spread_loss'],
    capsnet=['CapsNet'], matrix_caps=['MatrixCapsNet'], vision=['DStepNet', 'SmallNORBNet'],
    text=['SSTNet'])
_modules = {name: module for module, names in _where.items() for name in names}

__all__ = list(_modules)

def __getattr__(name):             # imported when it is asked for
    from importlib import import_module
    if name in _modules: return getattr(import_module(f'.{_modules[name]}', __name__), name)
    if name in _where or name in ('core', 'moments'): return import_module(f'.{name}', __name__)
    raise AttributeError(f"module 'capsnb' has no attribute {name!r}")

def __dir__(): return sorted({*globals(), *__all__})
