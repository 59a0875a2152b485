__version__ = "0.1.0"

from .mixture import GaussianMixture
from .dstep import Routed, Routing, routing_ref
from . import moments as _moments   # adds the plans 'moments' and 'stream' to Routing
from .dynamic import dynamic_routing, route_capsules, squash
from .em import em_routing
from .layers import ClassCaps, ConvCaps, PrimaryCaps
from .losses import margin_loss, spread_loss

_networks = dict(CapsNet='capsnet', MatrixCapsNet='matrix_caps', DStepNet='vision', SmallNORBNet='vision', SSTNet='text')   # imported when asked for: they bring the Hub's client if it is there

__all__ = ['GaussianMixture', 'Routed', 'Routing', 'routing_ref', 'dynamic_routing', 'route_capsules', 'squash', 'em_routing',
           'ClassCaps', 'ConvCaps', 'PrimaryCaps', 'margin_loss', 'spread_loss', *_networks]

def __getattr__(name):
    if name not in _networks: raise AttributeError(f"module 'capsnb' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f'.{_networks[name]}', __name__), name)

def __dir__(): return sorted({*globals(), *__all__})
