"""Routers of mixtures of experts: where a block has its router, what that decided of a micro-batch, and the
losses that keep its experts in use.

Does not own what experts compute, nor who adds up what is told here (``oobleckd.worker.round.reduce``).
"""

from oobleckd.worker.models.routers.find import RouterPlace, check_coefficients, check_given, places_of
from oobleckd.worker.models.routers.losses import NUM_LOSSES, Coefficients
from oobleckd.worker.models.routers.router import BlockRouter

__all__ = [
    "NUM_LOSSES",
    "BlockRouter",
    "Coefficients",
    "RouterPlace",
    "check_coefficients",
    "check_given",
    "places_of",
]
