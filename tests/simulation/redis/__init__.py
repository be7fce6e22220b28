"""A model of Redis: one server, as its clients see it, with a clock and a network that are given from outside.

It knows the commands that the package uses, and some that tests use; scripts are run by a real Lua 5.1. What it does
not know ends the simulation by `UnknownCommand`: an answer that is a guess would show nothing.
"""

from tests.simulation.redis.cluster import ClusterMap, slot_of
from tests.simulation.redis.dataset import Change, Dataset
from tests.simulation.redis.replies import UnknownCommand
from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session

__all__ = ["Change", "ClusterMap", "Dataset", "RedisModel", "Session", "UnknownCommand", "slot_of"]
